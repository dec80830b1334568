"""P5: what speculation brings when a draft is cheap and mostly right.

No pair of fixtures is like that, so one is built in memory from the dense fixture. The target is
that model with further layers whose output projections are zero: they cost what layers cost and
add nothing, so its text is the fixture's. The draft is the fixture with noise on its weights, as
cheap beside the target as it has fewer layers, and wrong now and then.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from engine import Target
from engine.drafters.two_model import TwoModelProvider
from fixtures.model import build
from parity.bench.loops import Ids, Models, open_rounds
from parity.bench.pairs import Pair

LAYERS = 24
NOISE = 0.15
"""In standard deviations of each matrix; more, and too many drafts are wrong."""

DEPTH = 3
SILENT = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
"""What a layer adds to its input comes out of these."""

Change = Callable[[str, mx.array], mx.array]


def cheap_pair(models: Models) -> Models:
    """A deep target and a draft for it, both made from the dense fixture."""
    base = models.target
    config = json.loads((base.path / "config.json").read_text(encoding="utf-8"))
    flat: Any = tree_flatten(base.model.parameters())
    weights: dict[str, mx.array] = dict(flat)
    own = config["num_hidden_layers"]
    deep = dict(weights)
    for number in range(own, LAYERS):
        prefix = f"model.layers.{number % own}."
        for name, weight in weights.items():
            if name.startswith(prefix):
                part = name.removeprefix(prefix)
                adds = mx.zeros_like(weight) if part in SILENT else weight
                deep[f"model.layers.{number}.{part}"] = adds
    keys = mx.random.split(mx.random.key(0), len(weights))
    noisy = {
        name: weight + NOISE * mx.std(weight) * mx.random.normal(weight.shape, key=key)
        if weight.ndim == 2
        else weight
        for (name, weight), key in zip(weights.items(), keys, strict=True)
    }
    target = _bound(base, {**config, "num_hidden_layers": LAYERS}, deep)
    draft = _bound(base, config, noisy)
    return Models(target, draft, TwoModelProvider(draft, target))


def _bound(base: Target, config: dict[str, Any], weights: dict[str, mx.array]) -> Target:
    model: Any = build(config)
    model.load_weights(list(weights.items()))
    model.eval()
    mx.eval(model.parameters())
    return Target(model, base.tokenizer, config, base.path)


def accepted(models: Models, prompts: Sequence[Ids], budget: int) -> tuple[Pair, ...]:
    """Per prompt, accepted drafts over all drafts: counts, not seconds."""
    counts = []
    for prompt in prompts:
        rounds, row, _ = open_rounds(models.target, prompt, budget, models.drafter, DEPTH)
        while not rounds.done:
            rounds.step()
        drafted = sum(len(told.draft) for told in row.trace)
        counts.append(Pair(sum(told.accepted for told in row.trace), drafted))
    return tuple(counts)
