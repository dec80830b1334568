"""What a target offers beside logits: the model's own numbers, recorded without touching it."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from engine import BadInput
from engine.ports import NORM, Ports, layer_tap

from .families import build, feed, ids, rows_of, target_on
from .pools import FAMILIES, target_of

IDS = mx.array([[3, 5, 7, 2, 9]])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_on_the_norms_tap_is_the_models_logits(family: str) -> None:
    """Bitwise, soft cap and tied embedding included, also over many rows."""
    target = target_of(family)
    rows = target.new_rows((NORM,))
    logits = rows.forward(IDS)
    (normed,) = rows.tapped
    assert mx.array_equal(target.ports.logits(normed), logits)
    assert mx.array_equal(logits, target.new_rows().forward(IDS))
    two = rows.joined(target.new_rows((NORM,)))
    logits = two.forward(mx.concatenate([IDS, IDS + 1]))
    assert mx.array_equal(target.ports.logits(two.tapped[0]), logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_taps_are_named_before_and_behind_the_final_norm(family: str) -> None:
    """In the order asked for; the last layer's output normed is the norm's."""
    target = target_of(family)
    ports = target.ports
    names = (NORM, ports.last_layer, layer_tap(0))
    rows = target.new_rows(names)
    rows.forward(IDS)
    normed, last, first = rows.tapped
    backbone: Any = ports.backbone
    assert mx.array_equal(backbone.norm(last), normed)
    assert not mx.array_equal(last, normed)
    assert first.shape == last.shape == normed.shape == (1, 5, normed.shape[-1])
    assert not mx.array_equal(first, last)


@pytest.mark.parametrize("family", ["hybrid", "sliding"])
def test_taps_and_rollback_do_not_disturb_each_other(family: str) -> None:
    """A window that is cut is recorded as any other; what stays is the same with and without."""
    target = target_of(family)
    tapped, plain = target.new_rows((NORM,)), target.new_rows()
    for rows in (tapped, plain):
        rows.forward(IDS)
        rows.begin()
        rows.forward(IDS + 1)
        rows.resolve([2])
    assert mx.array_equal(tapped.forward(IDS), plain.forward(IDS))
    assert tapped.tapped[0].shape[:2] == (1, 5)
    assert plain.tapped == ()


def test_the_embedding_is_what_the_first_layer_is_handed() -> None:
    """With Gemma's scale and llama's none."""
    for family, scale in (("gemma4_text", 32**0.5), ("llama", 1.0)):
        model = build(family)
        ports = Ports(model)
        raw = ports.backbone.embed_tokens(IDS)
        assert mx.allclose(ports.embed(IDS), raw * scale, rtol=1e-6)


def test_a_missing_port_is_refused_by_name() -> None:
    target = target_of("dense")
    with pytest.raises(BadInput, match=r"tap 'layers.9': the target has layers.0, .*, norm"):
        target.new_rows(("layers.9",))
    with pytest.raises(BadInput, match="no backbone with layers, norm and embedding"):
        _ = target_on(build("mamba2"), target).ports


@pytest.mark.parametrize("tokens", [5, 40])
@pytest.mark.parametrize("windowed", [False, True])
def test_a_donor_shows_keys_in_the_order_of_their_tokens(tokens: int, windowed: bool) -> None:
    """Native and in a group alike, before and behind the window."""
    rows = rows_of("gemma4_text")
    feed(rows, ids(tokens))
    feed(rows, ids(1))
    native = rows.donor(windowed)
    columns = rows.lifted().donor(windowed)
    assert native.offsets == columns.offsets == (tokens + 1,)
    shown = native.held[0]
    assert shown == columns.held[0] == (min(tokens + 1, 8) if windowed else tokens + 1)
    for ours, theirs in ((native.keys, columns.keys), (native.values, columns.values)):
        assert mx.array_equal(ours, theirs[:, :, :shown])
    whole = rows_of("gemma4_text")
    feed(whole, [*ids(tokens), *ids(1)])
    assert mx.allclose(
        native.keys[:, :, -5:], whole.donor(windowed).keys[:, :, -5:], atol=1e-5, rtol=1e-5
    )


def test_no_donor_is_refused() -> None:
    with pytest.raises(BadInput, match="no sliding attention layer holds keys"):
        target_of("dense").new_rows().donor(True)
