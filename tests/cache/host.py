"""A process that serves prompts from a folder of states, for tests that kill it.

`python -m tests.cache.host FOLDER FAMILY KIND N ...`: requests N of the pool, as JSON lines.
"""

from __future__ import annotations

import json
import signal
import sys

from engine import Engine, Limits
from engine.tiers import open_tiers
from tests.engine.pools import drafter_of, requests_of, target_of


def main(folder: str, family: str, kind: str, *numbers: str) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    target, drafter = target_of(family), drafter_of(family, kind)
    requests = requests_of(family)
    tiers = open_tiers(target, ram_bytes=1 << 20, ssd=folder, checkpoint_tokens=8)
    drafters = [drafter] if drafter else []
    with Engine(target, drafters, limits=Limits(rows=4), tiers=tiers) as engine:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        streams = [engine.submit(requests[int(number)]) for number in numbers]
        for number, stream in zip(numbers, streams, strict=True):
            finish = stream.result()
            said = [int(number), finish.tokens, finish.text, finish.usage.cached_tokens]
            sys.stdout.write(json.dumps(said) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
