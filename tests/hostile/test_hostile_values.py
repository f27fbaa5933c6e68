"""A function that forges what its runner says: the value it promises is a link, a FIFO, a lease … of its own making."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from gpool.agent.runtime import runner_calls
from gpool.agent.runtime.protocol import CallAnswer
from tests.tools.runtimes import NEEDS, caller, using

cloudpickle.register_pickle_by_value(sys.modules[__name__])
ANSWER_FRAME = runner_calls.HEAD.pack(runner_calls.ANSWER_HEAD.size, runner_calls.ANSWER_FILE)
WITHIN_S = 44.0  # a lease on a file would hold us up for 45
KINDS = ["bubblewrap", "docker", "podman"]


def make(how: str, secret: str) -> None:
    """`/values/1`, in the place of what the runner would write there."""
    os.chdir("/values")
    if how == "link":
        os.symlink(secret, "1")
    elif how == "link to an endless device":
        os.symlink("/dev/zero", "1")
    elif how == "fifo":
        os.mkfifo("1")
    elif how == "folder":
        os.mkdir("1")
    elif how == "socket":
        socket.socket(socket.AF_UNIX).bind("1")
    elif how == "lease":
        held = os.open("1", os.O_RDWR | os.O_CREAT, 0o600)
        with contextlib.suppress(OSError):
            fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_WRLCK)


HOW = ("nothing", "link", "link to an endless device", "fifo", "folder", "socket", "lease")


def forge(how: str, secret: str, frame: bytes) -> None:
    """Says for the runner that call 1 was answered by a file, and stays."""
    make(how, secret)
    for number in range(3, 16):
        with contextlib.suppress(OSError):
            if os.fstat(number).st_mode & 0o170000 == 0o010000:
                os.write(number, frame)
    signal.pause()


@pytest.mark.parametrize("kind", KINDS)
def test_a_forged_value_is_refused_at_once(
    kind: str, tmp_path: Path, require: Callable[[str], None]
) -> None:
    if kind in NEEDS:
        require(NEEDS[kind])
    secret = tmp_path / "secret"
    secret.write_bytes(b"the host's own bytes" * 4000)
    frame = ANSWER_FRAME + runner_calls.ANSWER_HEAD.pack(1, 0, 0, 0)

    async def forged(runtime: Any, how: str) -> tuple[CallAnswer, float]:
        calling = await caller(runtime)
        try:
            loop = asyncio.get_running_loop()
            began = loop.time()
            answer = await calling.call(forge, how, str(secret), frame)
            return answer, loop.time() - began
        finally:
            await calling.runner.remove()

    async def work(runtime: Any) -> dict[str, tuple[CallAnswer, float]]:
        return {how: await forged(runtime, how) for how in HOW}

    for how, (answer, took_s) in using(kind, tmp_path / "data", work).items():
        assert took_s < WITHIN_S, how
        assert answer.raised, how
        assert "cannot be collected" in answer.error_text, how
        assert answer.error_text.isprintable(), how
        assert str(tmp_path) not in answer.error_text, how
        assert answer.value == b"", how  # the text is the agent's own
    assert list((tmp_path / "data").rglob("value-*")) == []
