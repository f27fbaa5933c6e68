"""Keeps the guard standing: the process that clears away what an agent made in an engine when the agent is killed. See `guard.py`."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

from gpool.agent.runtime.protocol import SandboxFailed

GUARD = Path(__file__).with_name("guard.py")


class ContainerGuard:
    """Every method blocks; from any thread."""

    def __init__(self, socket: str, label: str) -> None:
        # -I -S: nothing but the standard library
        self._words = [sys.executable, "-I", "-S", "-B", str(GUARD), socket, label]
        self._one_at_a_time = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None

    def stand(self) -> None:
        """Before anything is made; a new one when it fell. Raises `SandboxFailed`."""
        with self._one_at_a_time:
            if self.process is not None and self.process.poll() is None:
                return
            if self.process is not None:
                self.process.communicate()  # it fell: only its pipes are left
            self.process = guard = subprocess.Popen(
                self._words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={},
                cwd="/",
                start_new_session=True,
            )
            assert guard.stdout is not None
            if guard.stdout.readline() != b"ready\n":
                raise SandboxFailed("the containers' guard did not start")

    def dismiss(self) -> None:
        """Nothing is left to guard."""
        with self._one_at_a_time:
            if self.process is not None:
                self.process.communicate(b"done")
                self.process = None
