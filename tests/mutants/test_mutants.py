"""`mutants`: every wrong engine and every wrong tester is caught by what is named for it.

An engine mutant runs one case of the matrix against running oracle servers, which all share.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import fixtures
from oracle.client import Client
from oracle.inprocess import load
from oracle.server import Server

from . import checks, row_checks, tier_checks
from .catalog import ENGINE, LAWS, TESTERS, EngineMutant, LawMutant, SuiteMutant
from .rows import ROWS
from .tier import TIER
from .world import World, changed

FAILURES = (AssertionError, pytest.fail.Exception, IndexError)


def named(mutant: EngineMutant | LawMutant | SuiteMutant) -> str:
    return mutant.name.replace(" ", "-")


class Servers:
    """The two oracle servers, started when first asked for and shared by all mutants."""

    def __init__(self, stack: ExitStack, log_dir: Path) -> None:
        self._stack = stack
        self._log_dir = log_dir
        self._loaded = load(fixtures.target_dir("dense"))
        self._running: dict[str, Server] = {}

    def mount(self, references: Any, source: Any) -> None:
        """Give `references` a running server of the kind that `source` names."""
        if source not in self._running:
            draft = fixtures.drafter_dir("dense-draft") if "draft" in source else None
            log = self._log_dir / f"{'draft' if draft else 'plain'}.log"
            server = Server(fixtures.target_dir("dense"), draft=draft, log_path=log)
            self._running[source] = self._stack.enter_context(server)
        server = self._running[source]
        loaded = self._loaded
        client = Client(server, eos_ids=loaded.eos_ids, encode=loaded.encode_bare)
        references.mount(source, server, self._stack.enter_context(client))


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers(stack, tmp_path_factory.mktemp("servers"))


def run_case(world: World, case_id: str, servers: Servers) -> tuple[str, list[str]]:
    """A case's verdict in a world, and what is said about it."""
    matrix = world["parity.plans"].catalogue()
    (case,) = [case for case in matrix if case.id == case_id]
    with world["parity.session"].open_session(
        world["parity.models"].known_models("dense")
    ) as session:
        if case.source.startswith("mlx_lm.server"):
            servers.mount(session.references, case.source)
        result = session.run(case)
        return result.verdict, world["parity.report.words"].sentences(result, session.setting)


@pytest.mark.parametrize("mutant", ENGINE, ids=named)
def test_a_wrong_engine_is_caught_by_its_case(
    mutant: EngineMutant, servers: Servers, tmp_path: Path
) -> None:
    with changed(tmp_path, mutant.file, mutant.old, mutant.new) as world:
        verdict, said = run_case(world, mutant.case, servers)
    assert verdict == "different"
    message = said[0]
    assert message.startswith(f"{mutant.case}: ")
    assert f"python -m parity run -k {mutant.case}" in message
    for words in mutant.says:
        assert words in message


@pytest.mark.parametrize("case_id", sorted({mutant.case for mutant in ENGINE}))
def test_the_right_engine_passes_the_same_cases(
    case_id: str, servers: Servers, tmp_path: Path
) -> None:
    """The cases fail because of the mutants, and not anyway."""
    with changed(tmp_path, "engine/errors.py", '"""The ways', '""" The ways') as world:
        assert run_case(world, case_id, servers) == ("equal", [])


@pytest.mark.parametrize("mutant", [*LAWS, *ROWS, *TIER, *TESTERS], ids=named)
def test_a_wrong_law_or_tester_is_caught_by_its_check(
    mutant: LawMutant | SuiteMutant, tmp_path: Path
) -> None:
    homes = (checks, row_checks, tier_checks)
    (check,) = [found for home in homes if (found := getattr(home, mutant.check, None))]
    mutant_world = changed(tmp_path / "mutant", mutant.file, mutant.old, mutant.new)
    with mutant_world as world, pytest.raises(FAILURES):
        check(world)
    with changed(tmp_path / "right", mutant.file, mutant.old, mutant.old) as world:
        check(world)


def test_a_stale_mutant_is_an_error(tmp_path: Path) -> None:
    stale = changed(tmp_path, "engine/errors.py", "no such text", "")
    with pytest.raises(ValueError, match="holds the replaced text 0 times"), stale:
        pass


def test_there_are_enough() -> None:
    assert len(ENGINE) + len(LAWS) >= 12
    assert len(TESTERS) >= 6
