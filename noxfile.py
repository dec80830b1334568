"""What people and CI run: `nox -s parity`, `nox -s tests`, and the sessions beside them."""

import sys
from pathlib import Path

import nox

nox.needs_version = ">=2024.4.15"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["tests", "lint", "types", "parity"]

ENV = {"MLX_ENABLE_TF32": "0"}


@nox.session
def parity(session: nox.Session) -> None:
    """The main job: the matrix against mlx_lm.server, then its snapshots.

    Arguments behind `--` go to the run.
    """
    session.install("-e", ".[test]")
    report = str(Path(session.create_tmp(), "report").resolve())
    session.run("python", "-m", "parity", "list", "--coverage", env=ENV)
    session.run("python", "-m", "parity", "run", "--report", report, *session.posargs, env=ENV)
    session.log(f"the report: {report}/index.html")
    if session.posargs:
        session.skip("snapshots are compared by runs of the whole matrix")
    results = f"{report}/report.json"
    session.run(
        "pytest", "parity", "-q", "--parity-results", results, "--snapshot-no-cleanup", env=ENV
    )


@nox.session
def canary(session: nox.Session) -> None:
    """Do basic operations on this machine's default device agree with the CPU?"""
    session.install("-e", ".[test]")
    session.run("python", "-m", "parity.canary", env=ENV)


@nox.session
def tests(session: nox.Session) -> None:
    """The test suite; arguments behind `--` go to pytest."""
    session.install("-e", ".[test]")
    session.run("pytest", "-n", "2", *session.posargs, env=ENV)


@nox.session
def oracle_drafters(session: nox.Session) -> None:
    """The second oracle: mlx-vlm in an environment of its own, then the tests that ask it.

    Arguments behind `--` go to pytest.
    """
    mlx = "mlx[cpu]" if sys.platform == "linux" else "mlx"
    session.install(f"{mlx}==0.32.4", "mlx-vlm==0.7.10")
    python = str(Path(session.bin, "python").absolute())
    session.notify("oracle_drafters_tests", [python, *session.posargs])


@nox.session
def oracle_drafters_tests(session: nox.Session) -> None:
    """Started by `oracle_drafters`, which names the Python of its environment."""
    if not session.posargs:
        session.error("run `nox -s oracle_drafters`, which starts this session")
    session.install("-e", ".[test]")
    python, *arguments = session.posargs
    files = ["tests/oracle/test_drafters.py", *map(str, Path("tests/oracle").glob("*_vlm.py"))]
    env = {**ENV, "MLX_PARITY_MLX_VLM_PYTHON": python}
    session.run("pytest", *files, *arguments, env=env)


@nox.session
def lint(session: nox.Session) -> None:
    session.install("ruff>=0.17")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    session.install("-e", ".[test,types]", "nox")
    session.run("mypy")


@nox.session
def review(session: nox.Session) -> None:
    """What moved in the snapshots, case by case."""
    session.install("-e", ".[test]")
    session.run("python", "-m", "parity", "review", *session.posargs, env=ENV)


@nox.session
def bench(session: nox.Session) -> None:
    """Ratios to mlx-lm, `-- --json FILE` keeps every pair; then single operations in seconds."""
    session.install("-e", ".[test]")
    session.run("python", "-m", "parity.bench", *session.posargs, env=ENV)
    session.run("pytest", "parity/bench", "-q", env=ENV)


@nox.session
def fixtures(session: nox.Session) -> None:
    """`-- --check` compares the committed files with the manifest; `-- --out DIR` trains anew."""
    session.install("-e", ".[test]")
    module = "fixtures.check" if "--check" in session.posargs else "fixtures.train"
    arguments = [a for a in session.posargs if a != "--check"]
    session.run("python", "-m", module, *arguments, env=ENV)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Our states and mlx-lm's caches, then the durable tier; `-- --minutes 10` is the default.

    The tier's rows go on from where the last run ended. With `--properties` the property tests at
    their nightly counts instead; what else stands behind `--` then goes to pytest.
    """
    session.install("-e", ".[test]")
    if "--properties" not in session.posargs:
        progress = str(Path(session.create_tmp(), "progress.json").resolve())
        arguments = ["--progress", progress, *session.posargs]
        session.run("python", "-m", "parity.fuzz", *arguments, env=ENV)
        return
    arguments = [a for a in session.posargs if a != "--properties"]
    env = {**ENV, "HYPOTHESIS_PROFILE": "nightly"}
    session.run("pytest", "-n", "2", "tests/engine", "tests/parity", *arguments, env=env)


@nox.session
def mutation(session: nox.Session) -> None:
    """Generated mutants of acceptance, rounds and rollback, in a clone that may be changed.

    Fails if fewer than 80 % are killed, or if a survivor has no reason in
    tests/mutants/survivors.toml.
    """
    session.install(".[test,mutation]")
    clone = str(Path(session.create_tmp(), "clone").resolve())
    session.run("rm", "-rf", clone, external=True)
    session.run("git", "clone", "-q", ".", clone, external=True)
    session.chdir(clone)
    env = {**ENV, "HYPOTHESIS_PROFILE": "mutation", "PYTHONPATH": clone}
    session.run("cosmic-ray", "init", "tests/mutation.toml", "mutation.sqlite", env=env)
    session.run("cr-filter-operators", "mutation.sqlite", "tests/mutation.toml", env=env)
    session.run("cosmic-ray", "exec", "tests/mutation.toml", "mutation.sqlite", env=env)
    session.run("python", "-m", "tests.mutants.survivors", "mutation.sqlite", env=env)
