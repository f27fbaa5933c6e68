"""The client without what only POSIX has: a program with those modules and functions hidden uses a pool in this process.

Not covered here: paths, file rights and consoles of a real Windows or macOS.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn

from gpool.client.config import SessionFile, Tokens
from tests.client.inprocess import Node, RealPool
from tests.tools.processes import PATIENCE_S

HIDDEN = """
import asyncio, os, pathlib, select, shutil, signal, subprocess, sys, tempfile, threading  # this system's own use those modules

class Hidden:
    NAMES = {"fcntl", "pwd", "grp", "termios", "resource", "pty", "tty", "syslog", "spwd", "crypt", "uvloop"}

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.NAMES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
for module, names in {
    os: "fork forkpty register_at_fork fchmod fchown chown getuid geteuid getgid getpgid setsid mkfifo sched_yield "
        "sched_getaffinity O_NOFOLLOW O_DIRECTORY O_CLOEXEC O_NONBLOCK O_SYNC wait4 killpg setpgid nice statvfs sendfile",
    select: "poll epoll",
    signal: "SIGALRM SIGKILL SIGHUP SIGUSR1 SIGWINCH setitimer pthread_sigmask",
    __import__("socket"): "AF_UNIX socketpair",
}.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
os.supports_dir_fd = set()
os.supports_fd = set()
for name in Hidden.NAMES:
    sys.modules.pop(name, None)
"""

PROGRAM = """
import gpool

@gpool.task
def square(x):
    return x * x

assert square.remote(7) == 49
assert list(square.map(range(100))) == [x * x for x in range(100)]
with gpool.Executor(max_workers=2) as executor:
    assert list(executor.map(abs, [-1, -2])) == [1, 2]
done = gpool.run(["python", "train.py"], inputs=["train.py"], outputs=["model/"], into="out")
assert (done.exit_code, done.stdout) == (0, "trained\\n"), done
assert [path.read_bytes() for path in done.outputs] == [b"weights"]
import gpool.core.errors
from pathlib import Path
Path("elsewhere").mkdir()
Path("out/model/weights").unlink()
Path("out/model").rmdir()
Path("out/model").symlink_to(Path("elsewhere").absolute())
try:
    gpool.run(["python", "train.py"], inputs=["train.py"], outputs=["model/"], into="out")
except gpool.Conflict as error:
    assert "is a link or a file" in str(error), error
else:
    raise SystemExit("a link was followed")
assert not list(Path("elsewhere").iterdir())
from gpool.cli.main import main
main(["run", "--input", "train.py", "--output", "model/", "--into", "cli", "--", "python", "train.py"])
"""


@pytest.fixture
def address(real: RealPool) -> Iterator[str]:
    """The in-process pool on a loopback socket."""
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(real.app, lifespan="off", log_level="warning")
    server = uvicorn.Server(config)
    serving = threading.Thread(
        target=lambda: real.wait(_served(server, listening)), name="listener", daemon=True
    )
    serving.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    server.should_exit = True
    serving.join(PATIENCE_S)
    listening.close()


async def _served(server: uvicorn.Server, listening: socket.socket) -> None:
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    await server.startup(sockets=[listening])
    await server.main_loop()
    await server.shutdown(sockets=[listening])


def test_the_client_needs_nothing_of_posix(
    real: RealPool, node: Node, address: str, tmp_path: Path
) -> None:
    real.command = lambda _: (0, [(1, b"trained\n")], {"model/weights": b"weights"})
    (tmp_path / "train.py").write_text("print('trained')")
    script = tmp_path / "program.py"
    script.write_text(HIDDEN + PROGRAM)
    environ = {
        "GPOOL_URL": address,
        "GPOOL_KEY": real.key,
        "GPOOL_HOME": str(tmp_path / "home"),
        "PATH": "/usr/bin:/bin",
    }
    said = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    assert said.stdout == "trained\n"
    assert (tmp_path / "cli" / "model" / "weights").read_bytes() == b"weights"


LOCKING = """
from pathlib import Path
from gpool.client.config import SessionFile, Tokens
import sys
file = SessionFile(Path(sys.argv[1]))
for _ in range(25):
    with file.locked():
        tokens = file.read()
        file.write(Tokens("a", str(int(tokens.refresh_token) + 1)))
"""


def test_a_session_file_is_locked_without_flock(tmp_path: Path) -> None:
    file = SessionFile(tmp_path / "session")
    file.write(Tokens("a", "0"))
    script = tmp_path / "locking.py"
    script.write_text(HIDDEN + LOCKING)
    words = [sys.executable, str(script), str(file.path)]
    started = [subprocess.Popen(words, stderr=subprocess.PIPE) for _ in range(2)]
    for one in started:
        _, problem = one.communicate(timeout=PATIENCE_S)
        assert one.returncode == 0, problem
    found = file.read()
    assert found is not None
    assert found.refresh_token == "50"
