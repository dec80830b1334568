"""The JSON of a run: written by `run --json`, read back by the pytest collection."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parity.cases import Case
from parity.errors import BadInput
from parity.report.words import Setting, closing_line, exit_code, reproduce, sentences
from parity.runner import CaseResult, Claim
from parity.trace import Answer, Round

SCHEMA = 1


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
) -> dict[str, Any]:
    """A whole run as one JSON object."""
    return {
        "schema": SCHEMA,
        "environment": dict(environment),
        "sources": sources,
        "options": [o for setting in settings.values() for o in setting.options],
        "summary": closing_line(results, claims),
        "exit_code": exit_code(results, claims),
        "cases": {
            result.case.id: _case(result, settings[result.case.cell.model]) for result in results
        },
        "claims": {claim.id: {"met": claim.met, "text": claim.text} for claim in claims},
    }


def asked(case: Case) -> dict[str, Any]:
    """What a case asks and of whom; also what `list --json` prints."""
    sampling = case.cell.sampling
    return {
        "id": case.id,
        "model": case.cell.model,
        "lane": case.cell.lane,
        "drafter": case.cell.drafter,
        "depth": case.cell.depth,
        "sampling": sampling.name,
        "rng": sampling.mode,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "kind": case.cell.kind,
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
        "ties": [
            {
                "position": tie.position,
                "kind": str(tie.kind),
                "expected": tie.expected,
                "actual": tie.actual,
                "margin": tie.margin,
                "delta": tie.delta,
            }
            for tie in comparison.ties
        ],
        # JSON has no NaN; a NaN is a failure and stands in the sentences.
        "logprob_difference": difference
        if difference is not None and math.isfinite(difference)
        else None,
        "sentences": sentences(result, setting),
        "reproduce": reproduce(result.case.id, setting.options),
        "expected": _answer(result.expected),
        "actual": _answer(result.actual),
    }


def _answer(answer: Answer | None) -> dict[str, Any] | None:
    if answer is None:
        return None
    return {
        "origin": answer.origin,
        "ids": list(answer.ids),
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "rounds": [[list(r.draft), r.accepted, list(r.emitted)] for r in answer.rounds],
    }


def write(path: Path, run: Mapping[str, Any]) -> None:
    """Write a document whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(run, indent=1, allow_nan=False), encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read(path: Path) -> StoredRun:
    """Read a document back.

    Raises:
        BadInput: no such file, not a document, or of another schema.

    """
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
        if run["schema"] != SCHEMA:
            raise BadInput(f"results {path} have schema {run['schema']}, this is {SCHEMA}")
        return StoredRun(
            run["sources"],
            tuple(run["options"]),
            run["environment"]["backend"],
            {case_id: _stored(case) for case_id, case in run["cases"].items()},
            tuple(Claim(name, c["met"], c["text"]) for name, c in run["claims"].items()),
        )
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise BadInput(f"results {path} cannot be read: {error}") from error
    except (KeyError, TypeError, IndexError) as error:
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
