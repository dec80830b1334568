"""The JSON of a run: what `run --json` writes, pytest reads back and every page is made from.

JSON has no NaN and no infinity: where a failure or a tie holds one, its name stands as a string.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from parity.asking import asked_of
from parity.cases import Case
from parity.compare import Failure, Tie
from parity.errors import BadInput
from parity.report.acceptance import acceptances
from parity.report.files import write_whole
from parity.report.words import (
    Setting,
    closing_line,
    exit_code,
    reproduce,
    round_at,
    sentences,
)
from parity.runner import CaseResult, Claim
from parity.trace import Answer, Round

SCHEMA = 3


@dataclass(frozen=True, slots=True)
class Stored:
    """One case of a stored run, as far as it is read back."""

    digest: str
    verdict: str
    sentences: tuple[str, ...]
    actual: Answer | None


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A stored run: its environment, what made it, and its cases by id."""

    sources: str
    options: tuple[str, ...]
    backend: str
    cases: Mapping[str, Stored]
    claims: tuple[Claim, ...]


def document(
    results: Sequence[CaseResult],
    claims: Sequence[Claim],
    environment: Mapping[str, str | int],
    sources: str,
    settings: Mapping[str, Setting],
    *,
    capabilities: Sequence[Mapping[str, str]] = (),
    not_checked: Sequence[str] = (),
) -> dict[str, Any]:
    """A whole run as one JSON object.

    `acceptance` counts drafts by position, for each model, drafter and depth that drafted.
    `capabilities` are what the subject was found to do, each with `name`, `value` and `note`;
    `not_checked` says in sentences what this run leaves open.
    """
    known = {
        model: Setting(cache(setting.decode), setting.options)
        for model, setting in settings.items()
    }
    cases = {r.case.id: _case(r, known[r.case.cell.model]) for r in results}
    return {
        "schema": SCHEMA,
        "environment": dict(environment),
        "sources": sources,
        "options": [o for setting in settings.values() for o in setting.options],
        "summary": closing_line(results, claims),
        "exit_code": exit_code(results, claims),
        "cases": cases,
        "acceptance": [asdict(one) for one in acceptances(cases.values())],
        "claims": {claim.id: {"met": claim.met, "text": claim.text} for claim in claims},
        "capabilities": [dict(one) for one in capabilities],
        "not_checked": list(not_checked),
    }


def asked(case: Case) -> dict[str, Any]:
    """What a case asks and of whom; also what `list --json` prints."""
    sampling = case.cell.sampling
    return {
        "id": case.id,
        "model": case.cell.model,
        # How an HTTP subject is asked takes the lane's place; what it drafts with is its own.
        "lane": case.cell.column,
        "rows": case.cell.rows,
        "turn": case.group[case.row].turn if case.group else None,
        "drafter": "its own" if case.cell.style else case.cell.drafter,
        "depth": case.cell.depth,
        "sampling": sampling.name,
        "sampling_label": sampling.label,
        "rng": sampling.mode,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "xtc_probability": sampling.xtc_probability,
        "xtc_threshold": sampling.xtc_threshold,
        **asdict(sampling.penalties),
        "kind": case.cell.kind,
        "prompt": asked_of(case.prompt),
        "seed": case.seed,
        "max_tokens": case.max_tokens,
        "stop": list(case.stop),
        "law": case.law,
        "reference": str(case.source),
        "digest": case.digest,
    }


def _case(result: CaseResult, setting: Setting) -> dict[str, Any]:
    comparison = result.comparison
    difference = comparison.logprob_difference
    return {
        **asked(result.case),
        "verdict": str(result.verdict),
        "checked": comparison.checked,
        "total": comparison.total,
        "unchecked": list(comparison.unchecked),
        "failures": [_failure(result, failure, setting) for failure in comparison.failures],
        "ties": [_tie(result, tie, setting) for tie in comparison.ties],
        # A NaN is a failure and stands there.
        "logprob_difference": difference
        if difference is not None and math.isfinite(difference)
        else None,
        "sentences": sentences(result, setting),
        "reproduce": reproduce(result.case.id, setting.options),
        "expected": _answer(result.expected, setting.decode),
        "actual": _answer(result.actual, setting.decode),
    }


def _failure(result: CaseResult, failure: Failure, setting: Setting) -> dict[str, Any]:
    measure = failure.measure
    is_token = failure.what == "token"
    return {
        "what": failure.what,
        "expected": _plain(failure.expected),
        "actual": _plain(failure.actual),
        "expected_piece": _piece(failure.expected, setting) if is_token else None,
        "actual_piece": _piece(failure.actual, setting) if is_token else None,
        "position": failure.position,
        "round": round_at(result, failure.position),
        "margin": None if measure is None else _plain(measure.margin),
        "delta": None if measure is None else _plain(measure.delta),
    }


def _tie(result: CaseResult, tie: Tie, setting: Setting) -> dict[str, Any]:
    return {
        "kind": str(tie.kind),
        "expected": tie.expected,
        "actual": tie.actual,
        "expected_piece": _piece(tie.expected, setting),
        "actual_piece": _piece(tie.actual, setting),
        "position": tie.position,
        "round": round_at(result, tie.position),
        "margin": _plain(tie.margin),
        "delta": _plain(tie.delta),
    }


def _plain(value: object) -> object:
    """A value as JSON can hold it."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return value


def _piece(token: object, setting: Setting) -> str | None:
    """The text of a token; None for the end."""
    return setting.decode(token) if isinstance(token, int) else None


def _answer(answer: Answer | None, decode: Callable[[int], str]) -> dict[str, Any] | None:
    if answer is None:
        return None
    return {
        "origin": answer.origin,
        "ids": list(answer.ids),
        "pieces": [decode(token) for token in answer.ids],
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "rounds": [[list(r.draft), r.accepted, list(r.emitted)] for r in answer.rounds],
        "company": None if answer.company is None else asdict(answer.company),
    }


def write(path: Path, run: Mapping[str, Any]) -> None:
    """Write a document whole or not at all."""
    write_whole(path, dumps(run))


def dumps(run: Mapping[str, Any]) -> str:
    """A document as the text of its file."""
    return json.dumps(run, indent=1, allow_nan=False)


def load(path: Path) -> dict[str, Any]:
    """Read a document back as it was written, to show it again.

    Raises:
        BadInput: no such file, not a document, or of another schema.

    """
    return _load(path)[0]


def read(path: Path) -> StoredRun:
    """Read a document back as far as snapshots are compared with it.

    Raises:
        BadInput: no such file, not a document, or of another schema.

    """
    return _load(path)[1]


def _load(path: Path) -> tuple[dict[str, Any], StoredRun]:
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
        if run["schema"] != SCHEMA:
            raise BadInput(f"results {path} have schema {run['schema']}, this is {SCHEMA}")
        return run, StoredRun(
            run["sources"],
            tuple(run["options"]),
            run["environment"]["backend"],
            {case_id: _stored(case) for case_id, case in run["cases"].items()},
            tuple(Claim(name, c["met"], c["text"]) for name, c in run["claims"].items()),
        )
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise BadInput(f"results {path} cannot be read: {error}") from error
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise BadInput(f"results {path} are no document of this suite: {error!r}") from error


def _stored(case: dict[str, Any]) -> Stored:
    actual = case["actual"]
    return Stored(
        case["digest"],
        case["verdict"],
        tuple(case["sentences"]),
        None
        if actual is None
        else Answer(
            actual["origin"],
            tuple(actual["ids"]),
            actual["text"],
            actual["finish_reason"],
            actual["prompt_tokens"],
            actual["completion_tokens"],
            (),
            None,
            tuple(Round(tuple(d), a, tuple(e)) for d, a, e in actual["rounds"]),
        ),
    )
