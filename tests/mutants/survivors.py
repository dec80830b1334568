"""Sum up a cosmic-ray session: `python -m tests.mutants.survivors SESSION`.

Exit 1 if fewer than 80 % of the generated mutants were killed, or if one survived whose reason is
not in `survivors.toml`. An entry there that no survivor needs any more is stale: exit 1 as well.
"""

from __future__ import annotations

import sqlite3
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

MINIMUM_KILLED = 0.8
REASONS = Path(__file__).with_name("survivors.toml")


@dataclass(frozen=True, slots=True, order=True)
class Change:
    """One generated mutant: the line as it was and as it became, without indentation."""

    file: str
    old: str
    new: str


def change_of(file: str, diff: str) -> Change:
    """The changed lines of a unified diff."""
    lines = diff.splitlines()
    old = [x[1:].strip() for x in lines if x.startswith("-") and not x.startswith("---")]
    new = [x[1:].strip() for x in lines if x.startswith("+") and not x.startswith("+++")]
    return Change(file, " ".join(old), " ".join(new))


def results(session: Path) -> tuple[list[Change], list[Change]]:
    """Killed and surviving mutants of a finished session.

    Raises:
        ValueError: a mutant was not run, or its run says neither.
    """
    connection = sqlite3.connect(session)
    rows = connection.execute(
        "select module_path, diff, test_outcome, worker_outcome from mutation_specs"
        " left join work_results using (job_id)"
    ).fetchall()
    connection.close()
    killed: list[Change] = []
    survived: list[Change] = []
    for file, diff, outcome, worker in rows:
        if worker == "SKIPPED":
            continue
        if outcome not in ("KILLED", "SURVIVED"):
            raise ValueError(f"a mutant of {file} was not judged: {worker or 'not run'}")
        (killed if outcome == "KILLED" else survived).append(change_of(file, diff))
    return killed, survived


def explained(path: Path = REASONS) -> dict[Change, str]:
    """The survivors that are known, each with the reason why nothing can catch it."""
    entries = tomllib.loads(path.read_text(encoding="utf-8")).get("survivor", [])
    return {Change(e["file"], e["old"], e["new"]): e["reason"] for e in entries}


def verdict(killed: list[Change], survived: list[Change], known: dict[Change, str]) -> list[str]:
    """What is wrong with the outcome; empty if nothing is."""
    total = len(killed) + len(survived)
    complaints = []
    if len(killed) < MINIMUM_KILLED * total:
        complaints.append(f"{len(killed)} of {total} killed, at least {MINIMUM_KILLED:.0%} wanted")
    complaints += [f"unexplained survivor: {c}" for c in sorted(set(survived) - known.keys())]
    complaints += [f"stale explanation: {c}" for c in sorted(known.keys() - set(survived))]
    return complaints


def main() -> None:
    killed, survived = results(Path(sys.argv[1]))
    known = explained()
    for change in sorted(survived):
        said = f"{change.file}\n  - {change.old}\n  + {change.new}\n  {known.get(change, '?')}\n"
        sys.stdout.write(said)
    complaints = verdict(killed, survived, known)
    share = len(killed) / (len(killed) + len(survived))
    sys.stdout.write("\n".join([*complaints, f"{len(killed)} killed ({share:.1%}), "]))
    sys.stdout.write(f"{len(survived)} survived, {len(complaints)} complaints\n")
    sys.exit(1 if complaints else 0)


if __name__ == "__main__":
    main()
