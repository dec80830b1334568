"""The matrix as pytest sees it: outcomes run here or read from a file, and their snapshots."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import pytest
from syrupy.assertion import SnapshotAssertion

from parity.amber import extension_for, remove, remove_strangers
from parity.cases import Case
from parity.compare import Verdict
from parity.errors import Unsound
from parity.provenance import Margins, Recorder, recorded_backends, storages
from parity.report.document import StoredRun
from parity.report.words import Setting, sentences
from parity.runner import CaseResult, Claim, claims
from parity.snapshots import (
    BLOCKS,
    PORTABLE,
    Part,
    entries_in,
    entry_name,
    file_of,
    storage_of,
)
from parity.tolerance import Tolerance
from parity.trace import Answer

PASSING = frozenset({Verdict.EQUAL, Verdict.NEAR_TIE, Verdict.SHAPE_TIE})
"""A tie is a verdict only on backends whose tolerance allows ties; elsewhere it is `different`."""


def keep_all_snapshots(config: pytest.Config) -> None:
    """Make syrupy look for snapshots through our extension, which finds none to be unused.

    Its own would take every entry that a run did not touch, and the provenance, for left over.
    """
    config.option.default_extension = "parity.amber.StoredSnapshots"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a case, wherever it ran."""

    verdict: Verdict
    sentences: tuple[str, ...]
    actual: Answer | None


class Outcomes(Protocol):
    """Outcomes by case."""

    def floor(self, case: Case, /) -> float:
        """The recording floor for the margins of the case's model."""
        ...

    def of(self, case: Case) -> Outcome: ...

    def margins(self, case: Case, /) -> Margins:
        """The margins behind the case's answer, for recording."""
        ...

    def claims(self, cases: Sequence[Case], /) -> Sequence[Claim] | str:
        """The claims of the whole matrix `cases`, or why they cannot be judged."""
        ...


class Opened(Protocol):
    """What is needed of a model's `session.Session`."""

    @property
    def setting(self) -> Setting: ...
    @property
    def tolerance(self) -> Tolerance: ...
    def margins(self, result: CaseResult, /) -> Margins: ...


@dataclass(slots=True)
class Live:
    """Runs a case when it is first asked for. `session_of` takes a model's name."""

    run: Callable[[Case], CaseResult]
    session_of: Callable[[str], Opened]
    results: dict[str, CaseResult] = field(default_factory=dict)

    def floor(self, case: Case, /) -> float:
        return self.session_of(case.cell.model).tolerance.recording_floor

    def of(self, case: Case) -> Outcome:
        if case.id not in self.results:
            self.results[case.id] = self.run(case)
        result = self.results[case.id]
        setting = self.session_of(case.cell.model).setting
        return Outcome(result.verdict, tuple(sentences(result, setting)), result.actual)

    def margins(self, case: Case) -> Margins:
        return self.session_of(case.cell.model).margins(self.results[case.id])

    def claims(self, cases: Sequence[Case]) -> Sequence[Claim] | str:
        missing = sum(case.id not in self.results for case in cases)
        if missing:
            return f"{missing} of {len(cases)} cases did not run here"
        return claims([self.results[case.id] for case in cases])


@dataclass(frozen=True, slots=True)
class FromFile:
    """Reads what `python -m parity run --json` stored."""

    stored: StoredRun

    def floor(self, _: Case, /) -> float:
        raise AssertionError("a stored run is not recorded from")

    def of(self, case: Case) -> Outcome:
        found = self.stored.cases.get(case.id)
        if found is None:
            pytest.fail(f"{case.id} is not in the stored run", pytrace=False)
        if found.digest != case.digest:
            pytest.fail(f"{case.id} asks for something else than in the stored run", pytrace=False)
        return Outcome(Verdict(found.verdict), found.sentences, found.actual)

    def margins(self, _: Case, /) -> Margins:
        raise AssertionError("a stored run is not recorded from")

    def claims(self, _: Sequence[Case], /) -> Sequence[Claim] | str:
        return self.stored.claims or "the stored run was not of the whole matrix"


@dataclass(frozen=True, slots=True)
class Shelf:
    """Where a run compares or records its snapshots."""

    folder: Path
    backend: str
    recording: bool
    recorder: Recorder

    @classmethod
    @contextmanager
    def open(
        cls,
        folder: Path,
        environment: Mapping[str, str | int],
        backend: str,
        cases: Sequence[Case],
        *,
        recording: bool,
    ) -> Iterator[Shelf]:
        """The snapshots of the matrix `cases`, of which a run may select some.

        A recording run drops what no case of the matrix claims, and writes provenance at its end.
        """
        case_ids = {case.id for case in cases}
        if recording:
            remove_strangers(folder, case_ids)
        recorder = Recorder(folder, environment, backend)
        yield cls(folder, backend, recording, recorder)
        recorder.write(case_ids)

    def check(
        self, case: Case, part: Part, outcomes: Outcomes, snapshot: SnapshotAssertion
    ) -> None:
        """Compare one part of a case with its snapshot, or record it."""
        outcome = outcomes.of(case)
        if outcome.actual is None:
            pytest.fail("; ".join(outcome.sentences), pytrace=False)
        block = BLOCKS[part](outcome.actual)
        storage = self._record(case, part, outcomes) if self.recording else self._find(case, part)
        matches = block == snapshot(extension_class=extension_for(storage))
        if not matches:
            pytest.fail(self._moved(case, part, storage, block), pytrace=False)

    def _find(self, case: Case, part: Part) -> str:
        storage = storage_of(self.folder, part, case.id, self.backend)
        if storage is not None:
            return storage
        backends = recorded_backends(self.folder)
        if self.backend in backends or not backends:
            pytest.fail(
                f"{case.id}: no snapshot of its {part} for {self.backend}; "
                f"record it: python -m parity review --accept {case.id}",
                pytrace=False,
            )
        pytest.skip(
            f"its {part} was recorded on {', '.join(sorted(backends))} and is not portable; "
            f"nothing is recorded for {self.backend}"
        )

    def _record(self, case: Case, part: Part, outcomes: Outcomes) -> str:
        outcome = outcomes.of(case)
        if outcome.verdict is not Verdict.EQUAL:
            said = "; ".join(outcome.sentences)
            pytest.fail(f"not recorded, the verdict is {outcome.verdict}: {said}", pytrace=False)
        margins = self.recorder.margins.get(case.id)
        if margins is None:
            try:
                margins = outcomes.margins(case)
            except Unsound as error:
                pytest.fail(f"not recorded, its margins are not sound: {error}", pytrace=False)
            self.recorder.margins[case.id] = margins
        storage = storages(margins, outcomes.floor(case), self.backend, PORTABLE)[part]
        remove(self.folder, self.backend if storage == PORTABLE else PORTABLE, part, case.id)
        return storage

    def _moved(self, case: Case, part: Part, storage: str, block: str) -> str:
        entries = entries_in(file_of(self.folder, storage, case.id))
        stored = entries.get(entry_name(part, case.id), "nothing")
        return (
            f"{case.id}: its {part} is not the recorded one ({storage})\n"
            f"recorded:\n{stored}\nnow:\n{block}\n"
            f"see: python -m parity review; accept: python -m parity review --accept {case.id}"
        )
