"""What the children do; `python -m parity.fuzz.disk.jobs` waits for work."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

from engine.cache.files import Files
from engine.cache.format import plan, read_header
from engine.cache.strict import Damaged, Foreign

from .budget import quiet
from .children import Job, Say, killed_at, serve
from .contract import ids, opened, perform, restored
from .faults import Intercepted
from .hostile import hostile_file
from .plays import NAMESPACES, Put, an_entry, operations, own, tokens

MEMORY_BYTES = 256 << 20
"""That a hostile header may take at most, and seconds."""

LONGEST_S = 1.0


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


def headers(say: Say, seed: int, count: int) -> None:
    """Read hostile headers in little memory and time; one that is accepted is one of ours."""
    limit = _limit_memory()
    before = _peak()
    slowest = 0.0
    for number in range(count):
        image = hostile_file(Random(f"{seed} {number}"))
        began = time.process_time()
        try:
            header = read_header(Image(image=image), 0, len(image))
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
class Image(Files):
    """A file's bytes, in memory."""

    image: bytes | bytearray = b""

    def read(self, file: int, into: memoryview, offset: int) -> int:
        data = memoryview(self.image)[offset : offset + len(into)]
        into[: len(data)] = data
        return len(data)


JOBS: dict[str, Job] = {"play": play, "recover": recover, "share": share, "headers": headers}

if __name__ == "__main__":
    quiet()
    serve(JOBS)
