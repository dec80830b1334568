"""Everything a run needs, opened once per target: models, engine, oracles, limits."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from engine import BadInput as EngineBadInput
from engine import Target
from oracle import device
from oracle.inprocess import Loaded, load
from parity.cases import Case
from parity.errors import BadInput, Unusable
from parity.models import Models
from parity.probe import Probe
from parity.provenance import Margins
from parity.references import References
from parity.report.words import Setting
from parity.runner import CaseResult, run_case
from parity.subjects import EngineSubject, Once
from parity.tolerance import Tolerance


@dataclass(frozen=True, slots=True)
class Session:
    """An engine and its oracles on one target and draft model."""

    references: References
    subject: Once
    probe: Probe
    tolerance: Tolerance
    setting: Setting

    def run(self, case: Case) -> CaseResult:
        """Run one case; `Unusable` if an oracle is gone."""
        return run_case(case, self.references, self.subject, self.probe, self.tolerance)

    def margins(self, result: CaseResult) -> Margins:
        """The margins that decide where a passed case's snapshot is kept."""
        assert result.actual is not None, "only a case with an answer has margins"
        return self.probe.margins(result.case, result.actual)


@contextmanager
def open_session(models: Models) -> Iterator[Session]:
    """Load both sides; servers start when first needed and stop at the end, whatever ends it.

    The oracle's own copy of the weights is read only when something is measured on it.

    The servers' logs are kept if the run breaks off.

    Raises:
        BadInput: a folder that cannot be loaded, or a draft model that does not fit.

    """
    try:
        device.apply()
        engine_target = Target.load(models.target)
        subject = Once(EngineSubject.open(engine_target, models.draft))
        target = load(models.target, lazy=True)
        draft = None if models.draft is None else load(models.draft, lazy=True)
    except (EngineBadInput, ValueError) as error:
        raise BadInput(str(error)) from error
    setting = Setting(lambda token: str(target.tokenizer.decode([token])), models.options)
    with (
        _log_dir() as log_dir,
        References(models, target, draft, subject, log_dir) as references,
    ):
        probe = Probe(target, draft)
        yield Session(references, subject, probe, tolerance_of(target), setting)


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
def _log_dir() -> Iterator[Path]:
    """A folder for logs, which stays behind only when a run breaks off and names one of them."""
    folder = Path(tempfile.mkdtemp(prefix="mlx-parity-"))
    try:
        yield folder
    except Unusable:
        raise
    except BaseException:
        shutil.rmtree(folder)
        raise
    shutil.rmtree(folder)


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
