"""Tiny models and the servers that serve them, one of each for all tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from oracle.drafters import python_in_environment
from oracle.inprocess import Loaded, load
from oracle.server import Server

from .tiny import write_chains, write_pair

# What asks mlx-vlm itself runs where its Python is named: `nox -s oracle_drafters`.
collect_ignore = [] if python_in_environment() else ["test_drafters_vlm.py", "test_blocks_vlm.py"]

# What the chain model says after the first letter of each, before EOS.
CHAINS = (b"Ab ", b"Cd\xe2\x82", b"FgUV", b"Jk\xc3\xa9l", b"Pqrst")


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def target(pair: tuple[Path, Path]) -> Loaded:
    return load(pair[0])


@pytest.fixture(scope="session")
def draft(pair: tuple[Path, Path]) -> Loaded:
    return load(pair[1])


@pytest.fixture(scope="session")
def chains(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chains(tmp_path_factory.mktemp("chains") / "model", CHAINS)


# Starts in a tenth of the time, for tests of how a server lives and dies.
STAND_IN = """
import argparse, http.server, os, sys
print("started with", *sys.argv[1:], "TF32", os.environ["MLX_ENABLE_TF32"], flush=True)
options = argparse.ArgumentParser()
options.add_argument("--port", type=int)
options.add_argument("--allowed-origins")
options = options.parse_known_args()[0]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Access-Control-Allow-Origin", options.allowed_origins)
        self.end_headers()
    def do_POST(self):
        self.send_error(404)
server = http.server.HTTPServer(("127.0.0.1", options.port), Handler)
print("Starting httpd")
server.serve_forever()
"""


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which ``python -m mlx_lm server`` is a stand-in without a model."""
    site = tmp_path_factory.mktemp("site")
    (site / "mlx_lm").mkdir()
    (site / "mlx_lm" / "__init__.py").touch()
    (site / "mlx_lm" / "__main__.py").write_text(STAND_IN, encoding="utf-8")
    return {"PYTHONPATH": str(site)}


@pytest.fixture(scope="session")
def target_server(pair: tuple[Path, Path]) -> Iterator[Server]:
    with Server(pair[0]) as server:
        yield server


@pytest.fixture(scope="session")
def draft_server(pair: tuple[Path, Path]) -> Iterator[Server]:
    with Server(pair[0], draft=pair[1]) as server:
        yield server


@pytest.fixture(scope="session")
def chains_server(chains: Path) -> Iterator[Server]:
    with Server(chains) as server:
        yield server
