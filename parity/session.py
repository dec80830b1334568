"""Everything a run needs, opened once per target: models, engine, oracles, limits."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from oracle import device
from oracle.inprocess import Loaded, load
from parity.capability import Capability
from parity.cases import Case
from parity.errors import BadInput, Unusable
from parity.models import Models
from parity.probe import Probe
from parity.provenance import Margins
from parity.references import References
from parity.report.words import Setting
from parity.runner import CaseResult, Claim, Subject, run_case
from parity.tolerance import Tolerance


@dataclass(frozen=True, slots=True)
class Session:
    """A subject and its oracles on one target and draft model."""

    references: References
    subject: Subject
    probe: Probe
    tolerance: Tolerance
    setting: Setting

    @property
    def capabilities(self) -> tuple[Capability, ...]:
        """What the subject was found to offer; nothing is asked of an engine in process."""
        return ()

    def begin(self, cases: Sequence[Case]) -> list[Case]:
        """The cases as they will be run; the oracles start to work on them, in this order."""
        self.references.ask_ahead(cases)
        return list(cases)

    def claims(self, results: Sequence[CaseResult], /) -> tuple[Claim, ...]:
        """What must hold of the subject as a whole."""
        return ()

    def not_checked(self, results: Sequence[CaseResult], /) -> tuple[str, ...]:
        """What a run of these cases says nothing about, one line each."""
        return ()

    def run(self, case: Case) -> CaseResult:
        """Run one case; `Unusable` if an oracle is gone."""
        return run_case(case, self.references, self.subject, self.probe, self.tolerance)

    def margins(self, result: CaseResult) -> Margins:
        """The margins that decide where a passed case's snapshot is kept."""
        assert result.actual is not None, "only a case with an answer has margins"
        return self.probe.margins(result.case, result.actual)


@contextmanager
def open_session(models: Models) -> Iterator[Session]:
    """Load the engine and its oracles; servers start when first needed, and always stop.

    The oracle's own copy of the weights is read only when something is measured on it.

    The servers' logs are kept if the run breaks off.

    Raises:
        BadInput: a folder that cannot be loaded, or a draft model that does not fit.

    """
    # A run on another subject does without the engine.
    from engine import BadInput as EngineBadInput
    from engine import KVQuantization, Target
    from parity.subjects import EngineSubject, Once

    try:
        device.apply()
        stored = None if models.kv_bits is None else KVQuantization(models.kv_bits, start=0)
        engine_target = Target.load(models.target, quantization=stored)
        subject = Once(EngineSubject.open(engine_target, models.draft, models.readers))
        target = load(models.target, lazy=True)
        draft = None if models.draft is None else load(models.draft, lazy=True)
    except (EngineBadInput, ValueError) as error:
        raise BadInput(str(error)) from error
    with (
        log_folder() as log_dir,
        References(models, target, draft, subject, log_dir) as references,
    ):
        setting = setting_of(target, models)
        yield Session(
            references, subject, Probe(target, draft, models.kv_bits), tolerance_of(target), setting
        )


class Sessions:
    """Sessions by model, each opened when first asked for. A context manager."""

    def __init__(self, models_of: Callable[[str], Models]) -> None:
        self._models_of = models_of
        self._open: dict[str, Session] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Sessions:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def of(self, model: str) -> Session:
        """The session of one model; raises what `open_session` raises."""
        if model not in self._open:
            self._open[model] = self._stack.enter_context(open_session(self._models_of(model)))
        return self._open[model]


@contextmanager
def log_folder() -> Iterator[Path]:
    """A folder for logs, which stays behind only when a run breaks off and names one of them."""
    folder = Path(tempfile.mkdtemp(prefix="mlx-parity-"))
    try:
        yield folder
    except BaseException as error:
        if not (isinstance(error, Unusable) and str(folder) in str(error)):
            shutil.rmtree(folder)
        raise
    shutil.rmtree(folder)


def setting_of(target: Loaded, models: Models) -> Setting:
    """What sentences about a model need."""

    def text_of(token: int) -> str:
        try:
            return str(target.tokenizer.decode([token]))
        except (OverflowError, TypeError):  # an id beyond any vocabulary
            return "no token"

    return Setting(text_of, models.options)


def tolerance_of(target: Loaded) -> Tolerance:
    """The limits for a model where MLX computes by default."""
    name = "cpu" if mx.default_device() == mx.Device(mx.cpu) else "gpu"
    return Tolerance(_dtype(target), name)


def _dtype(target: Loaded) -> str:
    """The dtype of most of a model's floating-point parameters."""
    sizes: dict[str, int] = {}
    for _, array in cast(
        "list[tuple[str, mx.array]]", tree_flatten(cast("Any", target.model).parameters())
    ):
        if mx.issubdtype(array.dtype, mx.floating):
            name = str(array.dtype).removeprefix("mlx.core.")
            sizes[name] = sizes.get(name, 0) + array.size
    return max(sizes, key=lambda name: sizes[name])
