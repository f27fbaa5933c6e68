"""The command as a real process: its speed, its exit codes, its bytes."""

from __future__ import annotations

import contextlib
import os
import pty
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gpool.cli.lending.children import ChildProcess, Program
from gpool.cli.lending.up import (
    command_name,
    data_folder,
    locked_folder,
    loopback_note,
    require_free_port,
)
from gpool.core.errors import Conflict, Invalid
from tests.tools.processes import PATIENCE_S, eventually, free_port

GPOOL = [sys.executable, "-m", "gpool"]


def test_help_is_quick_and_loads_neither_http_nor_rich() -> None:
    code = (
        "import sys\nfrom gpool.cli.main import cli\n"
        "cli.main(['--help'], standalone_mode=False)\n"
        "print(sorted({'httpx2', 'rich', 'pydantic', 'cloudpickle', 'msgspec'} & set(sys.modules)))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.splitlines()[-1] == "[]"
    assert "gpool run" in said.stdout


def test_an_unreachable_server_is_one_helpful_line_and_code_5(tmp_path: Path) -> None:
    environment = {"GPOOL_HOME": str(tmp_path), "GPOOL_URL": "http://127.0.0.1:9", "PATH": ""}
    environment |= {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [*GPOOL, "ps"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 5
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 2
    assert "http://127.0.0.1:9" in done.stderr


def test_two_pools_never_share_a_data_directory(tmp_path: Path) -> None:
    with locked_folder(tmp_path), pytest.raises(Conflict, match="already"), locked_folder(tmp_path):
        pass


def test_a_port_in_use_is_reported_before_anything_starts() -> None:
    port = free_port()
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(Conflict, match=f"port {port}.*--port"),
    ):
        require_free_port("127.0.0.1", port)
    require_free_port("127.0.0.1", port)
    with pytest.raises(Conflict, match="--host"):
        require_free_port("203.0.113.7", port)


def test_a_child_is_restarted_after_a_crash_and_stops_on_request(tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text("import signal\nprint('up', flush=True)\nsignal.pause()\n")
    child = ChildProcess(
        Program("sleeper", "sleeper", {"PYTHONPATH": str(tmp_path)}, tmp_path / "sleeper.log")
    )
    child.start()
    try:
        first = child.pid
        assert first is not None
        assert child.keep_alive() is None
        child._process.kill()  # type: ignore[union-attr]
        child._process.wait()  # type: ignore[union-attr]
        told = child.keep_alive()
        assert told is not None
        assert "signal 9" in told
        eventually("it is started again", lambda: started(child, 2), PATIENCE_S)
        assert child.pid != first
    finally:
        child.stop()
    assert child.exit_code() is not None


def started(child: ChildProcess, times: int) -> bool:
    child.keep_alive()
    return child._starts >= times


def on_a_terminal(code: str) -> bytes:
    """What a program writes to a terminal."""
    parent, child = pty.openpty()
    subprocess.run(
        [sys.executable, "-c", code], stdout=child, stderr=child, check=True, timeout=PATIENCE_S
    )
    os.close(child)
    said = b""
    with contextlib.suppress(OSError), open(parent, "rb", buffering=0) as terminal:
        while piece := terminal.read(4096):
            said += piece
    return said


def ended(child: ChildProcess) -> ChildProcess:
    child.start()
    assert child._process is not None
    child._process.wait(PATIENCE_S)
    return child


def told_to_exit(tmp_path: Path, code: int) -> ChildProcess:
    said = f"import sys; print('gpool: what was wrong', file=sys.stderr); sys.exit({code})"
    (tmp_path / "ends.py").write_text(said)
    log = tmp_path / "log"
    log.write_text("gpool: an older story\n")
    return ChildProcess(Program("agent", "ends", {"PYTHONPATH": str(tmp_path)}, log))


def test_a_usage_error_ends_the_first_start_of_a_child(tmp_path: Path) -> None:
    """Another start would not mend it: it is said at once, in the child's own words."""
    child = ended(told_to_exit(tmp_path, 2))
    with pytest.raises(Invalid, match=r"the agent does not start: what was wrong\Z"):
        child.keep_alive()


def test_a_child_that_ran_before_is_restarted_after_any_error(tmp_path: Path) -> None:
    """The pool around it goes on meanwhile."""
    child = ended(told_to_exit(tmp_path, 1))
    told = child.keep_alive()
    assert told is not None
    assert "(code 1): what was wrong. " in told
    assert "older" not in told
    (tmp_path / "ends.py").write_text("import sys; sys.exit(2)")
    eventually("it is started again", lambda: started(child, 2), PATIENCE_S)
    assert child._process is not None
    child._process.wait(PATIENCE_S)
    told = child.keep_alive()
    assert told is not None
    assert "code 2" in told


@pytest.mark.parametrize("code", [1, 2])
def test_the_error_line_is_reported_without_the_advice_below_it(tmp_path: Path, code: int) -> None:
    child = told_to_exit(tmp_path, code)
    program = tmp_path / "ends.py"
    advice = "import sys; print('gpool: no bwrap\\n  Look closer with: gpool node doctor', file=sys.stderr)"
    program.write_text(f"{advice}; sys.exit({code})")
    ended(child)
    if code == 2:
        with pytest.raises(Invalid, match=r"the agent does not start: no bwrap\Z"):
            child.keep_alive()
    else:
        assert "(code 1): no bwrap. " in str(child.keep_alive())
    child.stop()


def test_a_data_directory_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Invalid, match="--data"):
        data_folder(tmp_path / "file" / "data")


def test_gpool_server_reports_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        words = ["server", "--port", port, "--data", str(tmp_path)]
        done = subprocess.run([*GPOOL, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"port {port}" in done.stderr


def test_a_progress_bar_is_drawn_only_for_transfers() -> None:
    drawn = "from gpool.cli.printing import progress_bar\nwith progress_bar() as show:\n    "
    assert on_a_terminal(drawn + "pass") == b""
    assert b"weights" in on_a_terminal(drawn + "show('weights', 1, 2)")


def test_the_suggested_command_works_as_printed(tmp_path: Path) -> None:
    here, elsewhere = tmp_path / "clone", tmp_path / "elsewhere"
    this, other = here / ".venv" / "bin" / "gpool", elsewhere / "gpool"
    for file in (this, other):
        file.parent.mkdir(parents=True)
        file.touch()
    assert command_name(this, None, here) == ".venv/bin/gpool"
    assert command_name(this, str(other), here) == ".venv/bin/gpool"
    assert command_name(this, str(this), here) == "gpool"
    assert command_name(this, None, elsewhere) == str(this)
    assert command_name(this, str(other), this.parent) == "./gpool"
    assert command_name(tmp_path / "my gpus" / "gpool", None, tmp_path) == "'my gpus/gpool'"
    assert command_name(here / "__main__.py", None, here) == "gpool"


def test_a_loopback_join_link_has_a_note() -> None:
    for link in ("gpool://127.0.0.1:8642/join/x", "gpool://[::1]:8642/join/x"):
        assert "--host" in loopback_note(link)
    assert loopback_note("gpool://10.0.0.7:8642/join/x#sha256=00") == ""
    assert loopback_note("gpool://pool.example:443/join/x") == ""


def test_without_a_terminal_the_error_names_the_password_variable() -> None:
    """A script would else read of a prompt that was aborted."""
    ask = (
        "from gpool.cli.account import password_of\nfrom gpool.core.errors import Invalid\n"
        "try:\n    password_of('Password')\nexcept Invalid as error:\n    print(error)"
    )
    environment = {"PYTHONPATH": ":".join(sys.path), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", ask],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,  # without a terminal
    )
    assert "GPOOL_PASSWORD" in done.stdout, done.stderr


def test_aborting_the_password_prompt_prints_no_advice() -> None:
    """Standard input may be a file: the terminal is asked all the same."""
    ask = (
        "import fcntl, os, signal, termios\nfrom gpool.cli.account import password_of\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # we may be run without it
        "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\nos.dup2(os.open(os.devnull, os.O_RDONLY), 0)\n"
        "password_of('Password')"
    )
    terminal, end = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", ask],
        env={"PYTHONPATH": ":".join(sys.path), "PATH": ""},
        stdin=end,
        stdout=end,
        stderr=end,
        start_new_session=True,
    ):
        os.close(end)
        said = b""
        with contextlib.suppress(OSError):  # it has ended
            while piece := os.read(terminal, 1024):
                said += piece
                if said.endswith(b"Password: "):
                    os.write(terminal, b"\x03")
    os.close(terminal)
    assert b"Abort" in said
    assert b"GPOOL_PASSWORD" not in said


@pytest.mark.parametrize("mistaken", ["--policy", "--simulate-gpus"])
def test_an_invalid_lending_option_is_reported_before_anything_starts(
    tmp_path: Path, mistaken: str
) -> None:
    """Nothing was up, and no profile leads to what is gone again."""
    rules = tmp_path / "rules.toml"
    rules.write_text("[nonsense]\n")
    environment = {"PYTHONPATH": ":".join(sys.path), "PATH": os.environ["PATH"]}
    environment |= {"GPOOL_HOME": str(tmp_path / "home"), "HOME": str(tmp_path / "home")}
    given = str(rules) if mistaken == "--policy" else "nonsense"
    words = ["up", mistaken, given, "--data", str(tmp_path / "data")]
    done = subprocess.run(
        [*GPOOL, *words, "--port", str(free_port())],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "nonsense" in done.stderr
    assert not (tmp_path / "home").exists()


def test_up_with_a_site_on_a_machine_without_an_address_ends_with_the_reason(
    tmp_path: Path,
) -> None:
    """In a network namespace with no interface but loopback."""
    alone = ["unshare", "--map-root-user", "--net"]
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this host lets nobody make a network namespace")
    environment = {"PYTHONPATH": ":".join(sys.path), "PATH": os.environ["PATH"]}
    environment |= {"GPOOL_HOME": str(tmp_path / "home"), "HOME": str(tmp_path / "home")}
    words = ["up", "--site", "lab", "--data", str(tmp_path / "data"), "--port", str(free_port())]
    done = subprocess.run(
        [*alone, *GPOOL, *words], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "--address IP" in done.stderr
    assert not (tmp_path / "data").exists()


def test_the_first_start_of_a_server_names_key_address_and_next_command(tmp_path: Path) -> None:
    port, data = free_port(), tmp_path / "data"
    with (tmp_path / "said").open("wb") as said:
        server = subprocess.Popen(
            [*GPOOL, "server", "--port", str(port), "--data", str(data)],
            stdout=said,
            stderr=subprocess.STDOUT,
        )
    try:
        key = data / "operator.key"
        eventually("the operator's key is there", key.exists, PATIENCE_S)
    finally:
        server.terminate()
        server.wait()
    first = (tmp_path / "said").read_text().splitlines()[:3]
    assert str(key) in first[0]
    assert f"http://127.0.0.1:{port}" in first[1]
    assert "gpool node invite" in first[2]
