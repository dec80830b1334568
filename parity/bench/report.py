"""The figures as a table and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rich.table import Table

from parity.bench.costs import Shares
from parity.bench.figures import Measured, Setting

SCHEMA = 1


def table(measured: Sequence[Measured]) -> Table:
    """One line per figure."""
    made = Table(box=None, pad_edge=False)
    for name in ("goal", "what", "ratio of"):
        made.add_column(name)
    for name in ("median", "95 % interval", "pairs", "wanted", "possible", "met", "load"):
        made.add_column(name, justify="right")
    for one in measured:
        figure = one.figure
        low, high = figure.interval
        bound = "≥" if figure.goal.bound == "at least" else "≤"
        made.add_row(
            figure.goal.id,
            figure.name,
            f"{figure.over} / {figure.under}",
            _number(figure.median),
            f"{_number(low)} – {_number(high)}",
            str(len(figure.pairs)),
            f"{bound} {figure.goal.limit:g}",
            "" if one.possible is None else _number(one.possible),
            {True: "yes", False: "no", None: "–"}[figure.met],
            f"{one.load:.1f}",
        )
    return made


def rounds_table(measured: Sequence[Measured]) -> Table:
    """Where a round's time goes, in medians over requests, and how often it waits."""
    made = Table(box=None, pad_edge=False)
    made.add_column("round")
    for name in ("waits", "µs", "waiting", "queueing", "building graphs", "host work"):
        made.add_column(name, justify="right")
    for one in measured:
        if not one.rounds:
            continue
        made.add_row(
            one.figure.name,
            f"{waits_per_round(one.rounds):g}",
            f"{median(run.total_s / run.rounds for run in one.rounds) * 1e6:.0f}",
            *(
                f"{100 * median(getattr(run, part) / run.total_s for run in one.rounds):.1f} %"
                for part in ("wait_s", "queue_s", "build_s", "host_s")
            ),
        )
    return made


def waits_per_round(runs: Sequence[Shares]) -> float:
    """Calls that waited for the device, over all rounds of `runs`."""
    return sum(len(run.waits) for run in runs) / sum(run.rounds for run in runs)


def document(
    measured: Sequence[Measured], setting: Setting, environment: Mapping[str, str | int]
) -> dict[str, Any]:
    """Everything, pair by pair, as one JSON object.

    Pairs are seconds, but for the one figure about acceptance: there they count drafts.
    """
    return {
        "schema": SCHEMA,
        "environment": dict(environment),
        "setting": {
            "prompt_tokens": [len(prompt) for prompt in setting.prompts],
            "pairs": setting.num_pairs,
            "budget": setting.budget,
            "history": setting.history,
        },
        "figures": [_figure(one) for one in measured],
    }


def _figure(one: Measured) -> dict[str, Any]:
    figure = one.figure
    made: dict[str, Any] = {
        "goal": figure.goal.id,
        "name": figure.name,
        "over": figure.over,
        "under": figure.under,
        "bound": figure.goal.bound,
        "limit": figure.goal.limit,
        "median": figure.median,
        "interval": list(figure.interval),
        "possible": one.possible,
        "met": figure.met,
        "load": one.load,
        "pairs": [[pair.over_s, pair.under_s] for pair in figure.pairs],
    }
    if one.rounds:
        made["rounds"] = [
            {
                "rounds": run.rounds,
                "waits": list(run.waits),
                "total_s": run.total_s,
                "wait_s": run.wait_s,
                "queue_s": run.queue_s,
                "build_s": run.build_s,
                "host_s": run.host_s,
            }
            for run in one.rounds
        ]
    return made


def _number(value: float) -> str:
    return f"{value:.3f}" if value >= 0.1 else f"{value:.4f}"
