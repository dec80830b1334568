"""The benchmarks' arithmetic, their report, and one tiny run. No time is asserted anywhere."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parity.bench import cheap, cli, tiers
from parity.bench.costs import replay
from parity.bench.figures import GOALS, LIKE_FOR_LIKE, ROUND, Setting, measure
from parity.bench.loops import Ids, Models, engine_ids, load_fixtures, open_rounds, timed
from parity.bench.meter import metered
from parity.bench.pairs import FEWEST_PAIRS, Figure, Pair, bootstrap, interleave
from parity.bench.report import document, table
from parity.errors import Unusable

SECONDS = st.floats(1e-6, 1e3)
RATIOS = st.lists(st.floats(0.01, 100), min_size=1, max_size=40)


@pytest.fixture(scope="module")
def models() -> Models:
    return load_fixtures()


@pytest.fixture(scope="module")
def setting(models: Models) -> Setting:
    prompts = ("Name: Anna. Say it again: ", "In Tolm there is a lot o")
    return Setting(tuple(tuple(models.target.encode(p)) for p in prompts), 2, 8, history=500)


@given(RATIOS)
def test_the_interval_is_within_the_ratios_and_the_same_each_time(ratios: list[float]) -> None:
    low, high = bootstrap(ratios, resamples=200)
    assert min(ratios) <= low <= high <= max(ratios)
    assert bootstrap(ratios, resamples=200) == (low, high)


@given(RATIOS, st.integers(-8, 8))
def test_the_interval_scales_with_the_ratios(ratios: list[float], power: int) -> None:
    """Powers of two are exact."""
    low, high = bootstrap(ratios, resamples=200)
    scaled = bootstrap([ratio * 2.0**power for ratio in ratios], resamples=200)
    assert scaled == pytest.approx((low * 2.0**power, high * 2.0**power))


def test_the_interval_holds_the_true_median_19_times_in_20() -> None:
    """Of 400 samples of 24 log-normal ratios; the generator's seed makes it no matter of luck."""
    draw = np.random.default_rng(7)
    samples = np.exp(draw.normal(0.0, 0.3, (400, 24))).tolist()
    intervals = [bootstrap(sample, resamples=400) for sample in samples]
    held = sum(low <= 1.0 <= high for low, high in intervals)
    assert 0.92 <= held / 400 <= 0.98


def test_no_ratios_have_no_interval() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        bootstrap([])


@given(st.integers(0, 9), st.integers(0, 3))
def test_pairs_alternate_in_order_and_warm_ups_do_not_count(num_pairs: int, warm_ups: int) -> None:
    called: list[tuple[str, int]] = []

    def side(name: str, seconds: float) -> Any:
        def run(number: int) -> float:
            called.append((name, number))
            return seconds

        return run

    pairs = interleave(side("over", 3.0), side("under", 2.0), num_pairs, warm_ups=warm_ups)
    assert [pair.ratio for pair in pairs] == [1.5] * num_pairs
    counted = called[2 * warm_ups :]
    orders = [("over", "under"), ("under", "over")]
    assert counted == [(name, n) for n in range(num_pairs) for name in orders[n % 2]]


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=FEWEST_PAIRS, max_size=30))
def test_a_figure_is_met_as_its_goal_says(seconds: list[tuple[float, float]]) -> None:
    pairs = tuple(Pair(*pair) for pair in seconds)
    median = statistics.median(pair.ratio for pair in pairs)
    ratio = Figure(LIKE_FOR_LIKE, "", "", "", pairs)
    assert ratio.median == pytest.approx(median)
    low, high = ratio.interval
    assert ratio.met == (ratio.median >= 1.0 or low <= 1.0 <= high)
    assert Figure(ROUND, "", "", "", pairs).met == (ratio.median <= 1.10)


def test_few_pairs_meet_nothing() -> None:
    pairs = (Pair(1.0, 1.0),) * FEWEST_PAIRS
    assert Figure(LIKE_FOR_LIKE, "", "", "", pairs).met is True
    assert Figure(LIKE_FOR_LIKE, "", "", "", pairs[1:]).met is None


@pytest.mark.parametrize("seconds", [(1.0, 0.0), (-1.0, 1.0), (float("nan"), 1.0)])
def test_a_pair_without_time_is_refused(seconds: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="positive seconds"):
        Pair(*seconds)


def test_a_cheap_pair_is_what_it_is_said_to_be(models: Models, setting: Setting) -> None:
    """The deep target says what the fixture says; its draft is mostly right, and not always."""
    pair = cheap.cheap_pair(models)
    assert len(pair.target.model.layers) == cheap.LAYERS > 4 * len(pair.draft.model.layers)
    for prompt in setting.prompts:
        assert engine_ids(pair, 0)(prompt, 48) == engine_ids(models, 0)(prompt, 48)
        assert engine_ids(pair, cheap.DEPTH)(prompt, 48) == engine_ids(models, 0)(prompt, 48)
    counts = cheap.accepted(pair, setting.prompts, 96)
    right, drafted = (sum(getattr(c, side) for c in counts) for side in ("over_s", "under_s"))
    assert 0.8 <= right / drafted < 1.0


def test_loops_that_disagree_are_not_timed() -> None:
    def loop(_prompt: Ids, _budget: int) -> list[int]:
        return [1, 2]

    assert timed(loop, [(1,)], [[1, 2]], 2)(0) >= 0.0
    with pytest.raises(Unusable, match="disagree on prompt 0"):
        timed(loop, [(1,)], [[1, 3]], 2)(0)


KEPT = ("P7", "P8", "P9", "P10", "P11")
"""What is about states that are kept; at full size it takes minutes."""


def test_a_small_folder_of_states_measures_what_a_large_one_does(
    models: Models, setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "ROW", (1, 8, 256, 128))
    monkeypatch.setattr(tiers, "PREFIX", 64)
    monkeypatch.setattr(tiers, "ENTRIES", 20)
    measured = list(measure(models, setting, KEPT))
    assert {one.figure.goal.id for one in measured} >= {"P7", "P10", "P11"}
    assert all(one.figure.met is not None for one in measured)


def test_a_tiny_run_measures_every_goal(models: Models, setting: Setting) -> None:
    """And its document says what was measured, pair by pair, in plain JSON."""
    goals = [goal for goal in GOALS if goal not in KEPT]
    measured = list(measure(models, setting, goals))
    assert {one.figure.goal.id for one in measured} == set(goals)
    assert table(measured).row_count == len(measured) == 31
    made = json.loads(json.dumps(document(measured, setting, {"mlx": "0"}), allow_nan=False))
    assert set(made) == {"schema", "environment", "setting", "figures"}
    assert made["setting"]["pairs"] == 2
    for figure, one in zip(made["figures"], measured, strict=True):
        assert set(figure) - {"rounds"} == {
            *("goal", "name", "over", "under", "bound", "limit"),
            *("median", "interval", "possible", "met", "load", "pairs"),
        }
        assert [over / under for over, under in figure["pairs"]] == [
            pair.ratio for pair in one.figure.pairs
        ]
    told = [figure for figure in made["figures"] if "rounds" in figure]
    assert len(told) == 5
    for run in (run for figure in told for run in figure["rounds"]):
        parts = run["wait_s"] + run["queue_s"] + run["build_s"] + run["host_s"]
        assert parts == pytest.approx(run["total_s"])
        assert run["waits"] == ["eval"] * run["rounds"]


def test_the_command_writes_what_it_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bench.json"
    with pytest.raises(SystemExit) as left:
        cli.main(["--only", "P12", "--pairs", "1", "--json", str(file)])
    assert left.value.code == 0
    names = [figure["name"] for figure in json.loads(file.read_text())["figures"]]
    printed = capsys.readouterr().out
    assert names
    assert all(name in printed for name in names)
    assert "1 pairs are too few" in printed


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--pairs", "0"], "--pairs must be at least 1, got 0"),
        (["--tokens", "7"], "between 8 and 512, got 7"),
        (["--only", "P4"], "P4: the goals are P1, P2, P3, P5, P7"),
        (["--json", "/nowhere/b.json"], "its folder does not exist"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    assert left.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert names in line


@pytest.mark.parametrize("depth", [1, 3])
def test_bare_forwards_are_those_of_the_rounds(
    models: Models, setting: Setting, depth: int
) -> None:
    """What the target is fed and keeps in the replay is what it was fed and kept in the rounds."""
    prompt = setting.prompts[0]
    rounds, row, collector = open_rounds(models.target, prompt, 24, models.drafter, depth)
    while not rounds.done:
        rounds.step()
    text = [*prompt, *collector.ids]
    held = draft_held = len(prompt) - 1
    for step in replay(prompt[-1], row.trace, with_draft_model=True):
        window: Any = step.window.tolist()
        assert window[0][0] == text[held]
        assert len(step.fed) == max(1, len(window[0]) - 1)
        first: Any = step.fed[0].tolist()
        assert first[0] == text[draft_held : draft_held + len(first[0])]
        held += len(window[0]) - step.forget
        draft_held += sum(ids.size for ids in step.fed) - step.forget_draft
    assert held == len(row.held)


@pytest.mark.parametrize(
    "read",
    [
        lambda array: mx.eval(array),
        lambda array: mx.synchronize(),
        lambda array: array.tolist(),
        lambda array: array[0].item(),
        lambda array: bool(array[0] == 1),
        lambda array: int(array[0]),
        lambda array: float(array[0]),
        lambda array: [0, 1, 2][array[0]],
        lambda array: f"{array}",
        lambda array: repr(array),
        lambda array: np.array(array),
        lambda array: np.asarray(array),
        lambda array: np.from_dlpack(array),
    ],
)
def test_a_wait_is_seen_however_it_is_asked_for(read: Any) -> None:
    array = mx.array([1, 2]) + 0
    with metered() as meter:
        read(array)
    assert len(meter.waits) == 1


def test_reading_what_has_landed_is_no_wait() -> None:
    array = mx.array([1, 2]) + 0
    with metered() as meter:
        mx.eval([array])
        array.tolist()
        mx.eval({"again": array})
        assert meter.waits == ["eval"]
        array[0].item()  # a new array
        assert meter.waits == ["eval", "item"]


def test_a_meter_leaves_nothing_behind() -> None:
    before = mx.eval, mx.async_eval, mx.array.tolist, mx.array.__bool__, np.asarray
    with pytest.raises(KeyError), metered():
        raise KeyError
    assert before == (mx.eval, mx.async_eval, mx.array.tolist, mx.array.__bool__, np.asarray)
