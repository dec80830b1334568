"""Run a command for as long as standard input stays open, then end it and all it started.

Started by ``server`` as a script (standard library only), in a process group of its own, with the
read end of a pipe as standard input. The parent's death closes the pipe however it dies, on Linux
and on macOS alike; a Ctrl-C in the terminal does not reach the group. The command's process id
goes to standard output.

What is not promised: to end the command after ``kill -9`` of this process. Its parent does that.
"""

import os
import signal
import subprocess
import sys
import threading


def main(command: list[str]) -> None:
    if os.getpgrp() != os.getpid():
        sys.exit("watch must lead its own process group, or it would end its caller's")
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)

    def end(*_: object) -> None:
        child.kill()  # not a request: a server has nothing to save, and a stuck one would stay

    def end_with_parent() -> None:
        sys.stdin.buffer.read()
        end()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    threading.Thread(target=end_with_parent, daemon=True).start()
    sys.stdout.write(f"{child.pid}\n")
    sys.stdout.flush()
    child.wait()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(os.getpgrp(), signal.SIGTERM)  # what the command left behind, such as a compiler
    os._exit(0)  # a normal exit would wait for the thread inside read()


if __name__ == "__main__":
    main(sys.argv[1:])
