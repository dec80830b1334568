"""What the children do; `python -m parity.fuzz.disk.jobs` waits for work."""

from __future__ import annotations

import resource
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from engine.cache.durability import Durability
from engine.cache.entry import Entry, RunStep, Tokens
from engine.cache.files import Files
from engine.cache.format import plan, read_header
from engine.cache.strict import Damaged, Foreign

from .budget import quiet
from .children import Job, Say, killed_at, serve
from .contract import ids, opened, perform, restored
from .crashes import ROOMY
from .faults import Intercepted
from .hostile import hostile_file
from .plays import NAMESPACES, Put, an_entry, operations, own, tokens
from .small import read

MEMORY_BYTES = 256 << 20
LONGEST_S = 1.0
"""What reading a hostile header may take at most."""

MOST_SCHEDULED = 200
"""Prefixes in one job: as many as a flush is given to write."""


def play(say: Say, folder: str, seed: int, cap: int, call: int | None) -> None:
    """Operations from the seed, each told when it is done, until it is killed."""
    store = opened(Path(folder), cap, Intercepted(killed_at(call)))
    for number, operation in enumerate(operations(Random(seed)), 1):
        perform(operation, store)
        say("done", number)


def recover(_: Say, folder: str, cap: int, call: int | None) -> None:
    """Open a store."""
    opened(Path(folder), cap, Intercepted(killed_at(call)))


def share(say: Say, folder: str, seed: int, number: int, cap: int) -> None:
    """Use and put entries that others use and put as well, and those of a namespace of its own.

    What is wrong is told; what is restored must be whole, and nothing may look damaged.
    """
    store = opened(Path(folder), cap, Files())
    random = Random(f"{seed} {number}")
    mine = own(seed, number)
    for version in range(1 << 30):
        kind = random.random()
        if kind < 0.3:
            perform(Put(an_entry(random, (number + 1 << 32) + version)), store)
        elif kind < 0.6:
            perform(next(mine), store)
            say("done", version)
        else:
            entry = store.find(ids(tokens(random)), random.choice(NAMESPACES))
            if entry is not None and (wrong := restored(store, entry.entry)) not in (None, "miss"):
                say("found wrong bytes", wrong)
        if store.counts.damaged:
            say("took a file for damaged", store.counts.damaged)
            return


def flush(say: Say, folder: str, seed: int, bound: float) -> None:
    """Schedule prefixes, write some of them, and at SIGTERM flush the rest."""
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: ended.append(number))
    store = opened(Path(folder), ROOMY)
    held: dict[tuple[str, bytes], Entry] = {}
    random = Random(f"{seed} flush")

    def write(tokens: Tokens, namespace: str, run_step: RunStep) -> bool | None:
        entry = held[namespace, tokens.tobytes()]
        return store.put(entry, read(entry), run_step)

    durability = Durability(store.has_durable_prefix, write, debounce_s=0)
    say("ready", None)
    for number, operation in enumerate(own(seed, 0)):
        if ended or number == MOST_SCHEDULED:
            break
        assert isinstance(operation, Put)
        entry = operation.entry
        held[entry.namespace, entry.tokens.tobytes()] = entry
        durability.schedule(entry.tokens, entry.namespace)
        say("scheduled", number + 1)
        if random.random() < 0.3 and durability.step():
            while durability.step():
                pass
            if store.has_durable_prefix(entry.tokens, entry.namespace):
                say("written", number)
    while not ended:
        time.sleep(0.001)
    say("flushed", asdict(durability.flush(bound)))


def headers(say: Say, seed: int, count: int) -> None:
    """Read hostile headers in little memory and time; one that is accepted is one of ours."""
    limit = _limit_memory()
    before = _peak()
    slowest = 0.0
    for number in range(count):
        image = hostile_file(Random(f"{seed} {number}"))
        began = time.process_time()
        try:
            header = read_header(InMemory(image=image), 0, len(image))
        except (Damaged, Foreign):
            pass
        except BaseException as error:
            say("raised on", f"{number}: {error!r}"[:500])
            return
        else:
            plan(header.entry, header.origin)  # raises if we would not write it
            if header.size != len(image):
                say("accepted another size", number)
                return
        slowest = max(slowest, time.process_time() - began)
        if slowest > LONGEST_S:
            say("took long", f"{number}: {slowest:.2f} s")
            return
    say("read", {"seconds": slowest, "bytes": _peak() - before, "limited": limit})


def _limit_memory() -> bool:
    """Let allocations beyond the limit fail, where the system can."""
    if not sys.platform.startswith("linux"):
        return False
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return True


def _peak() -> int:
    """The most memory that this process has held."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@dataclass(frozen=True, slots=True)
class InMemory(Files):
    """One file, whose bytes are in memory; any descriptor reads it."""

    image: bytes | bytearray = b""

    def read(self, file: int, into: memoryview, offset: int) -> int:
        data = memoryview(self.image)[offset : offset + len(into)]
        into[: len(data)] = data
        return len(data)


JOBS: dict[str, Job] = {
    "flush": flush,
    "play": play,
    "recover": recover,
    "share": share,
    "headers": headers,
}

if __name__ == "__main__":
    quiet()
    serve(JOBS)
