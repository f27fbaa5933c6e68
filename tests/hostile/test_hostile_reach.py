"""What a task must not reach, tried inside; and the same tried without the sandbox, where it must succeed."""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpool.agent.runtime.protocol import Staged
from gpool.testing.runtimes import command, using

SCRIPT = Path(__file__).with_name("attacks.py")
NAMES = re.findall(r'^ {4,8}"([^"]+)": (?!\{)', SCRIPT.read_text(), re.MULTILINE)
# The kernel may be built without these: then the control cannot show what the defence is worth.
MAY_BE_ABSENT = {
    "open a crypto socket",
    "open a vsock",
    "keyring",
    "add a key",
    "userfaultfd",
    "perf events",
    "load a module",
    "kexec",
    "swap",
    "x32 call",
    "i386 call",
    "io_uring",
    "bpf",
    "modify_ldt",
    "open kernel memory",
    "write modprobe",
    "write sysrq-trigger",
    "take another's descriptor",
    "become real-time",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, str], ...]]:
    """(inside, without the defence)."""
    base = tmp_path_factory.mktemp("hostile")
    secret, word, abstract = (secrets.token_hex(12) for _ in range(3))
    planted_file = base / f"planted-{secret}"
    planted_file.write_text(secret)
    planted_file.chmod(0o600)
    leaked = os.open(planted_file, os.O_RDONLY)
    os.set_inheritable(leaked, True)
    with (
        socket.create_server(("127.0.0.1", 0)) as service,
        socket.socket(socket.AF_UNIX) as hidden,
        subprocess.Popen(
            [sys.executable, "-c", "input()", word],
            env={"PLANTED": secret},
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as holder,
    ):
        hidden.bind("\0" + abstract)
        hidden.listen()
        planted = json.dumps(
            {
                "secret": secret,
                "word": word,
                "file": str(planted_file),
                "pid": holder.pid,
                "port": service.getsockname()[1],
                "abstract": abstract,
            }
        )
        control = subprocess.run(
            [sys.executable, str(SCRIPT), planted],
            capture_output=True,
            close_fds=False,
            cwd=base,
            check=True,
        )
        ran = using(
            "bubblewrap",
            base / "data",
            lambda runtime: command(
                runtime,
                "python",
                "attacks.py",
                planted,
                inputs=[Staged("attacks.py", SCRIPT, False)],
            ),
        )
        assert ran.ended.exit_code == 0, ran.err
        yield json.loads(ran.out), json.loads(control.stdout)
        holder.kill()
    os.close(leaked)


def test_every_attack_was_tried(results: tuple[dict[str, str], ...]) -> None:
    inside, control = results
    assert set(inside) == set(control)
    assert set(inside) <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_task_never_reaches(name: str, results: tuple[dict[str, str], ...]) -> None:
    inside, control = results
    if name not in inside:
        pytest.skip(f"not written for {os.uname().machine}")
    assert inside[name].startswith("refused"), f"a task could {name}"
    if control[name] != "reached":
        if os.geteuid() == 0 and name not in MAY_BE_ABSENT:
            pytest.fail(f"the control did not reach it, so this proves nothing: {control[name]}")
        pytest.skip(
            f"refused, but unproved here: the control did not reach it either ({control[name]})"
        )
