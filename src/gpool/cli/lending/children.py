"""Server and agent as child processes: start, restart after a crash, stop in order.

The kernel sends a child SIGTERM when the parent dies.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpool.cli.main import USAGE
from gpool.core.errors import Invalid

SERVER_MODULE = "gpool.server"
AGENT_MODULE = "gpool.agent"

_STOP_S = 15.0
_BRIEF_S = 2.0
"""A child that ran for less is restarted with growing pauses."""

_FIRST_STEPS_S = 60.0
"""A usage error within this time of the first start is reported instead of retried."""

_LONGEST_PAUSE_S = 5.0
_ERROR_PREFIX = "gpool: "

_KEPT_LOG_BYTES = 16 * 1024 * 1024
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Program:
    name: str
    module: str
    env: Mapping[str, str]
    log: Path

    def environment(self) -> dict[str, str]:
        return {**os.environ, **self.env}


def exec_module(module: str, env: Mapping[str, str]) -> None:
    argv = [sys.executable, "-m", module]
    os.execve(argv[0], argv, {**os.environ, **env})


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


class ChildProcess:
    def __init__(self, program: Program) -> None:
        self.program = program
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._pause_s = 0.0
        self._next_at = 0.0
        self._starts = 0
        self._log_start = 0  # bytes of the log written by earlier starts

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        log = self.program.log
        log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if log.exists() and log.stat().st_size > _KEPT_LOG_BYTES:
            log.replace(log.with_suffix(".old.log"))
        self._starts += 1
        with open(log, "ab", opener=_private) as output:
            os.fchmod(output.fileno(), 0o600)  # an earlier version's was readable by others
            self._log_start = output.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-m", self.program.module],
                env=self.program.environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # we pass Ctrl-C on, in order
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )
        self._started_at = time.monotonic()

    def exit_code(self) -> int | None:
        return self._process.poll() if self._process is not None else None

    def keep_alive(self) -> str | None:
        """Restart the program if it ended and its pause is over; return a message or None.

        `Invalid` if its first start ended at once with a usage error.
        """
        code = self.exit_code()
        if code is None:
            return None
        now = time.monotonic()
        if self._next_at == 0.0:
            lived_s = now - self._started_at
            brief = lived_s < _BRIEF_S
            self._pause_s = min(max(0.2, self._pause_s * 2), _LONGEST_PAUSE_S) if brief else 0.0
            self._next_at = now + self._pause_s
            words = self._reason()
            if code == USAGE and self._starts == 1 and lived_s < _FIRST_STEPS_S:
                raise Invalid(f"the {self.program.name} does not start: {words}")
            how = f"signal {-code}" if code < 0 else f"code {code}"
            error = f": {words}" if code > 0 and words else ""
            message = f"The {self.program.name} ended ({how}){error}. Restarting it. Log: {self.program.log}"
        else:
            message = None
        if now >= self._next_at:
            self._next_at = 0.0
            self.start()
        return message

    def stop(self) -> None:
        """Terminate; kill after 15 seconds."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _reason(self) -> str:
        lines = [_plain(line) for line in self.last_words().splitlines()]
        errors = [line for line in lines if line.startswith(_ERROR_PREFIX)]
        return (errors or lines or [""])[-1].removeprefix(_ERROR_PREFIX)

    def last_words(self, lines: int = 5) -> str:
        try:
            text = self.program.log.read_bytes()[self._log_start :].decode(errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(text.strip().splitlines()[-lines:])


def _plain(line: str) -> str:
    """Line of a log as text; the error that ended the process begins with `gpool: ` in both formats."""
    try:
        event = json.loads(line)
    except ValueError:
        return line
    if not isinstance(event, dict):
        return line
    is_last = event.get("log.level") == "critical" and event.get("log.logger") == "gpool"
    return f"{_ERROR_PREFIX if is_last else ''}{event.get('message', line)}"


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def stop_signals() -> threading.Event:
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: stop.set())
    return stop
