"""Key files: written atomically, readable by their owner only."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from gpool.core.errors import Invalid


def write_private(path: Path, data: bytes, *, replace: bool) -> None:
    """Write with mode 0600, flushed. Without `replace` an existing file is kept: of two writers one wins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if replace:
            draft.replace(path)
        else:
            with suppress(FileExistsError):
                os.link(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_private(path: Path) -> bytes:
    """`Invalid` if anybody but the owner could have read or written the file."""
    with path.open("rb") as file:
        facts = os.fstat(file.fileno())
        mode = stat.S_IMODE(facts.st_mode)
        if not stat.S_ISREG(facts.st_mode) or mode & 0o077:
            raise Invalid(f"{path} can be read by others (mode {mode:04o}); run `chmod 600 {path}`")
        return file.read()
