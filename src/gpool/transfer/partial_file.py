"""File being downloaded: hashed as it grows, so that it can be resumed and verified."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import BinaryIO

from gpool.core.model import MIB


class Landing:
    """Writes to an open, seekable file; bytes of an earlier try are hashed first. `told` receives the size."""

    def __init__(self, file: BinaryIO, told: Callable[[int], None] = lambda _: None) -> None:
        self._file, self._told = file, told
        self._digest = hashlib.sha256()
        self.size = 0
        while piece := file.read(MIB):
            self._digest.update(piece)
            self.size += len(piece)

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def write(self, piece: bytes) -> None:
        self._file.write(piece)
        self._digest.update(piece)
        self.size += len(piece)
        self._told(self.size)

    def begin_again(self) -> None:
        """Discard the bytes received so far."""
        self._file.seek(0)
        self._file.truncate()
        self._digest, self.size = hashlib.sha256(), 0
