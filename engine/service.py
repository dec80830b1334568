"""Requests from any thread or coroutine, one model thread that serves them in groups."""

from __future__ import annotations

import atexit
import itertools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

import mlx.core as mx

from .batches import Kind, Member
from .collector import Collector
from .drafters.source import DraftProvider
from .errors import BadInput
from .groups import GroupRound, Groups, Limits
from .prefill import Prompt
from .requests import (
    check,
    drafter_for,
    make_row,
    make_row_sampling,
    require_its_target,
)
from .sampling import resolve_seed
from .streams import Stream
from .target import Target
from .tiers import Tiers
from .values import Request


class Engine:
    """A target, the drafters mounted beside it, and the requests in flight.

    `submit` may be called from any thread. All forwards run on one thread of the engine's own,
    from `with Engine(...) as engine` or `start` until `close`; `turn` runs them in the caller's
    instead, for hosts without threads.

    Args:
        drafters: the first is used by requests that name none.
        adapters: targets made by `target.adapted`, under the names that requests use.
        limits: how much is in flight at once.
        tiers: what keeps states between requests; nothing does if None.
        on_round: called on the model thread after each round of each group.
    """

    def __init__(
        self,
        target: Target,
        drafters: Sequence[DraftProvider] = (),
        *,
        adapters: Mapping[str, Target] | None = None,
        limits: Limits | None = None,
        tiers: Tiers | None = None,
        on_round: Callable[[GroupRound], None] | None = None,
    ) -> None:
        self._drafters: Mapping[str, DraftProvider] = {d.id: d for d in drafters}
        self._default = drafters[0].id if drafters else None
        self._limits = limits or Limits()
        self._tiers = tiers or Tiers()
        self._groups = Groups(self._limits, on_round, self._tiers)
        self._targets: dict[str | None, Target] = {None: target}
        self._targets.update(adapters or {})
        # These run forwards and remember the answers: here, not in the threads that submit.
        self._rows = {name: mounted.new_rows() for name, mounted in self._targets.items()}
        for name, mounted in self._targets.items():
            if mounted is not target and (
                mounted.adapter is None or mounted.adapter.base is not target
            ):
                raise BadInput(f"adapter {name!r} is not mounted on the engine's target")
            _ = mounted.cannot_share, mounted.footprint
            if drafters:
                _ = self._rows[name].cannot_roll_back
        for drafter in drafters:
            require_its_target(target, drafter_for(target, drafter))
            _ = drafter.cannot_share, drafter.state_bytes(1)
        self._numbers = itertools.count()
        self._inbox: list[Member] = []
        self._changed = threading.Condition()
        self._closed = False
        self._process: int | None = None
        self._thread: threading.Thread | None = None
        self._served = threading.Event()

    def submit(
        self,
        request: Request,
        *,
        adapter: str | None = None,
        drafter: str | None = "default",
        depth: int | None = None,
    ) -> Stream:
        """Queue a request and return its stream at once.

        Args:
            adapter: the name of a mounted adapter; None is the base model.
            drafter: the id of a mounted drafter, or "default": the first one; None decodes plainly.
            depth: drafts per round; the drafter's default if None.

        Raises:
            BadInput: options that cannot be served, a request that the limits can never admit, or
                a closed engine.
        """
        member = self._member(request, adapter, self._drafter(drafter), depth)
        with self._changed:
            if self._closed:
                raise BadInput("the engine is closed")
            self._inbox.append(member)
            self._changed.notify()
        return member.stream

    def turn(self) -> bool:
        """One turn of everything in flight, in this thread; False if there was nothing to do."""
        with self._changed:
            members, self._inbox = self._inbox, []
        for member in members:
            self._groups.add(member)
        if self._groups.idle:
            return False
        self._groups.turn()
        return True

    def start(self) -> None:
        """Start the model thread.

        Raises:
            BadInput: it has been started.
            RuntimeError: the system has no thread to give.
        """
        if self._thread is not None:
            raise BadInput("the engine has been started already")
        # Whatever interrupts `close`, or comes before it: the end of the process has it done.
        atexit.register(self.close)
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._serve, name="model", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._thread = self._process = None
            raise

    def close(self) -> None:
        """End all requests and the thread; what a durable tier is to keep is then in its files.

        A generation in flight is kept too, and goes on if the same request comes again. A Ctrl-C
        may come meanwhile: the thread goes on closing, and the process does not end before it.

        Raises:
            RuntimeError: called by the model thread, in `on_round`, which cannot wait for itself.
        """
        if self._thread is threading.current_thread():
            raise RuntimeError("an engine cannot be closed by its model thread")
        if self._process not in (None, os.getpid()):
            return  # the child of a fork has neither the thread nor whoever holds the lock
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            # First, since CPython 3.11 takes a `join` that was interrupted for the thread's end.
            self._served.wait()
            self._thread.join()
        elif not self._served.is_set():
            self._wind_up()
            self._served.set()
        self._end(BadInput("the engine is closed"))
        atexit.unregister(self.close)

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _serve(self) -> None:
        try:
            self._tiers.write_behind(self._wake)
            while not self._closed:
                had_turn, served = self.turn(), self._tiers.serve()
                if not (had_turn or served):
                    self._tiers.set_idle(True)
                    self._tiers.demote()
                    with self._changed:
                        self._changed.wait_for(self._has_work, self._tiers.demote_after_s)
                    self._tiers.set_idle(False)
            self._wind_up()
        except BaseException as error:
            with self._changed:
                self._closed = True
            self._end(error)
            self._tiers.flush()  # what is kept of others is not to blame
            raise
        finally:
            # MLX aborts the process at its end if a thread is gone whose streams are not.
            mx.clear_streams()
            self._served.set()

    def _has_work(self) -> bool:
        return bool(self._inbox) or self._closed or self._tiers.asks

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def _wind_up(self) -> None:
        """Keep what is to go on later, then make durable what is to be."""
        self._groups.suspend()
        self._tiers.flush()

    def _end(self, error: BaseException) -> None:
        """End every request with that error."""
        with self._changed:
            members, self._inbox = self._inbox, []
        for member in members:
            self._groups.add(member)
        self._groups.close(error)

    def _drafter(self, name: str | None) -> DraftProvider | None:
        if name == "default":
            name = self._default
        if name is None:
            return None
        if name not in self._drafters:
            mounted = ", ".join(self._drafters) or "none"
            raise BadInput(f"drafter {name!r} is not mounted (mounted: {mounted})")
        return self._drafters[name]

    def _member(
        self,
        request: Request,
        adapter: str | None,
        drafter: DraftProvider | None,
        depth: int | None,
    ) -> Member:
        if adapter not in self._targets:
            mounted = ", ".join(name for name in self._targets if name) or "none"
            raise BadInput(f"adapter {adapter!r} is not mounted (mounted: {mounted})")
        target, limits = self._targets[adapter], self._limits
        drafter = drafter_for(target, drafter)
        depth = check(target, self._rows[adapter], request, drafter, depth)
        sampling = resolve_seed(request.sampling)
        tokens = len(request.prompt) + request.max_tokens
        state_bytes = target.footprint.bytes(tokens)
        if drafter is not None:
            state_bytes += drafter.state_bytes(tokens)
        for what, limit, wanted in (
            ("tokens", limits.tokens, tokens),
            ("state_bytes", limits.state_bytes, state_bytes),
        ):
            if limit is not None and wanted > limit:
                raise BadInput(f"a request of {wanted} {what} exceeds the limit of {limit}")
        number = next(self._numbers)
        shares = not target.cannot_share and not (drafter is not None and drafter.cannot_share)
        alone = None if shares and sampling.rng == "positional" else number
        text = Collector(target, request, sampling.seed)
        row = make_row(target, request, text)

        def cancel() -> None:
            row.cancelled = True
            with self._changed:
                self._changed.notify()

        return Member(
            number=number,
            kind=Kind(target, drafter, depth, alone=alone),
            sampling=make_row_sampling(target, sampling),
            prompt=Prompt(request.prompt, row),
            text=text,
            stream=Stream(cancel),
            tokens=tokens,
            state_bytes=state_bytes,
        )
