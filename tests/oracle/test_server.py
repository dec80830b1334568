"""A server comes up as ours and ready, or not at all, and never outlives us."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

import oracle.server
from oracle.server import HOST, Server, ServerFailed, free_port

WATCH = Path(oracle.server.__file__).with_name("watch.py")


def running(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    if sys.platform == "linux":  # where a small machine may have no `ps`
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].strip()
        except OSError:
            return False
    else:
        ps = ["ps", "-o", "stat=", "-p", str(pid)]
        state = subprocess.run(ps, capture_output=True, text=True, check=False).stdout.strip()
    return bool(state) and not state.startswith("Z")


def soon(condition: Callable[[], bool], timeout_s: float = 5.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_it_is_ready_inside_the_block_and_gone_behind_it(pair: tuple[Path, Path]) -> None:
    """The server answers at once when the block begins; its log is kept, also behind the block."""
    with Server(pair[0]) as server:
        assert server.alive()
        assert running(server.pid)
        assert httpx.get(f"{server.url}/health", trust_env=False).json() == {"status": "ok"}
        assert "Starting httpd" in server.log_tail(10)
    assert not server.alive()
    assert not running(server.pid)
    assert "Starting httpd" in server.log_tail(10)
    assert server.log_tail(0) == ""
    server.stop()


def test_it_is_started_as_the_oracle_needs_it(stand_in: dict[str, str], tmp_path: Path) -> None:
    """No prefix reuse and no TF32 unless asked for; the draft model and other options as given."""
    with Server(tmp_path, env=stand_in) as server:
        log = server.log_tail(99)
    assert f"started with server --model {tmp_path} --host 127.0.0.1 --port {server.port} " in log
    assert "--prompt-cache-size 0 TF32 0" in log
    options = {"MLX_ENABLE_TF32": "1", **stand_in}
    with Server(
        tmp_path, draft=".", prompt_cache_size=3, extra_args=["--kv-bits", "8"], env=options
    ) as server:
        log = server.log_tail(99)
    assert f"--model {tmp_path} --draft-model . --host" in log
    assert "--prompt-cache-size 3 --kv-bits 8 TF32 1" in log


def test_it_computes_on_the_device_that_the_environment_names(pair: tuple[Path, Path]) -> None:
    """The same server behind a launcher; a device that is not there is said in one line."""
    with Server(pair[0], env={"MLX_PARITY_DEVICE": "cpu"}) as server:
        assert httpx.get(f"{server.url}/health", trust_env=False).json() == {"status": "ok"}
    with pytest.raises(ServerFailed, match=r"must name a device .* got 'tpu'"):
        Server(pair[0], env={"MLX_PARITY_DEVICE": "tpu"}).start()


def test_an_exception_or_a_ctrl_c_in_the_block_ends_it(
    stand_in: dict[str, str], tmp_path: Path
) -> None:
    """No way out of the block leaves it running, and a log with a name is kept."""
    log = tmp_path / "server.log"
    with pytest.raises(KeyboardInterrupt), Server(tmp_path, log_path=log, env=stand_in) as server:
        raise KeyboardInterrupt
    assert not running(server.pid)
    assert "Starting httpd" in log.read_text(encoding="utf-8")


HOLDER = """
import sys, time
from oracle.server import Server
with Server(sys.argv[1]) as server:
    print(server.pid, server._watch.pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=str)
def test_it_ends_with_its_parent(
    stand_in: dict[str, str], tmp_path: Path, sent: signal.Signals
) -> None:
    """However the process that holds it dies, kill -9 too, neither it nor its watcher is left."""
    root = Path(oracle.server.__file__).parents[1]
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        env={**os.environ, **stand_in},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=root,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        assert all(running(pid) for pid in pids)
        parent.send_signal(sent)
        parent.wait(10)
    assert soon(lambda: not any(running(pid) for pid in pids))


def test_a_killed_server_is_not_alive(stand_in: dict[str, str], tmp_path: Path) -> None:
    """A dead server is noticed."""
    with Server(tmp_path, env=stand_in) as server:
        os.kill(server.pid, signal.SIGKILL)
        assert soon(lambda: not server.alive())


def test_a_killed_watcher_leaves_no_server(stand_in: dict[str, str], tmp_path: Path) -> None:
    """Even `kill -9` of the watcher alone ends with nothing left."""
    with Server(tmp_path, env=stand_in) as server:
        assert server._watch is not None
        os.kill(server._watch.pid, signal.SIGKILL)
        assert soon(lambda: not server.alive())
        assert running(server.pid)
    assert soon(lambda: not running(server.pid))


@pytest.fixture
def foreigner() -> Iterator[int]:
    """The port of a web server that is not ours and says it is well."""

    class Well(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Access-Control-Allow-Origin", "*")
            self.end_headers()
            self.wfile.write(b'{"status": "ok"}')

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer((HOST, 0), Well) as foreign:
        threading.Thread(target=foreign.serve_forever, daemon=True).start()
        yield foreign.server_address[1]
        foreign.shutdown()


def test_a_port_in_use_is_refused_before_anything_starts(chains: Path, foreigner: int) -> None:
    """Bad input: one line that names the port."""
    server = Server(chains, port=foreigner)
    with pytest.raises(ServerFailed, match=f"^port {foreigner} is in use$"):
        server.start()
    assert server._watch is None


def test_a_port_taken_in_between_is_not_mistaken_for_ours(
    chains: Path, foreigner: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever answers /health must be our process."""
    monkeypatch.setattr(oracle.server, "require_free", lambda _: None)
    server = Server(chains, port=foreigner)
    with pytest.raises(ServerFailed, match=f"port {foreigner} is answered by another process"):
        server.start()
    assert not running(server.pid)


def test_a_port_that_does_not_speak_http_is_not_waited_for(
    chains: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server outlives its failed bind; its log tells."""
    monkeypatch.setattr(oracle.server, "require_free", lambda _: None)
    with socket.create_server((HOST, 0)) as mute:
        port = mute.getsockname()[1]
        server = Server(chains, port=port)
        monkeypatch.setattr(server, "_healthy", lambda _: False)  # it would wait 5 s for words
        with pytest.raises(ServerFailed, match=f"port {port} was taken by another process"):
            server.start()


def test_a_folder_without_config_is_one_line_from_the_log(tmp_path: Path) -> None:
    """Bad input: the server stays up without a worker; its last words are the message."""
    server = Server(tmp_path)
    with pytest.raises(ServerFailed, match=r"its worker died: .*config\.json") as failed:
        server.start()
    assert "\n" not in str(failed.value)
    assert "FileNotFoundError" in failed.value.log
    assert not running(server.pid)


def test_an_early_exit_is_one_line_from_the_log(chains: Path) -> None:
    """Bad input: a server that exits by itself."""
    with pytest.raises(ServerFailed, match=r"it exited: .*unrecognized arguments: --bogus$"):
        Server(chains, extra_args=["--bogus"]).start()


def test_a_start_that_takes_too_long_is_ended(chains: Path) -> None:
    """A bounded wait."""
    server = Server(chains, start_timeout_s=0.05)
    with pytest.raises(ServerFailed, match=r"no answer within 0\.05 s"):
        server.start()
    assert not running(server.pid)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "/no/such/folder"}, "model folder /no/such/folder does not exist"),
        ({"model": "./no"}, r"model folder \./no does not exist"),
        ({"draft": "/no/such/draft"}, "model folder /no/such/draft does not exist"),
        ({"log_path": "/no/such/log"}, "log file /no/such/log cannot be written: No such file"),
        ({"port": 65536}, r"port must be within 1\.\.65535, got 65536"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    chains: Path, options: dict[str, str | int], message: str
) -> None:
    """Bad input: one line naming the thing and the limit."""
    server = Server(**{"model": chains, **options})  # type: ignore[arg-type]
    with pytest.raises(ServerFailed, match=message):
        server.start()
    assert server._watch is None


@pytest.mark.skipif(sys.platform != "linux", reason="only there mlx compiles with g++")
def test_a_missing_compiler_is_one_line(chains: Path, tmp_path: Path) -> None:
    """Bad input: mlx on the CPU cannot run without one."""
    with pytest.raises(ServerFailed, match=r"^no C\+\+ compiler: .*g\+\+"):
        Server(chains, env={"PATH": str(tmp_path)}).start()


def test_the_watcher_refuses_to_lead_its_callers_group() -> None:
    """It ends its group, so it must not be ours."""
    done = subprocess.run(
        [sys.executable, str(WATCH), "sleep", "9"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "must lead its own process group" in done.stderr


def test_the_watcher_ends_what_its_command_started() -> None:
    """A compiler or any other child of the server goes with it."""
    shell = shutil.which("sh")
    assert shell is not None
    with subprocess.Popen(
        [sys.executable, str(WATCH), shell, "-c", "sleep 60 & echo $! >&2; wait"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    ) as watch:
        assert watch.stdin is not None
        assert watch.stdout is not None
        assert watch.stderr is not None
        pids = [int(watch.stdout.readline()), int(watch.stderr.readline())]
        assert all(running(pid) for pid in pids)
        watch.stdin.close()
        watch.wait(10)
    assert soon(lambda: not any(running(pid) for pid in pids))


def test_a_free_port_is_free() -> None:
    """What is given out can be bound."""
    port = free_port()
    with socket.create_server((HOST, port)):
        pass
