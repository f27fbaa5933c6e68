"""Outputs as a guest sends them: checked, bounded, hashed here. A guest may lie about all of it; nothing is believed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpool.agent.runtime.protocol import BadOutput
from gpool.agent.runtime.work_directory import MAX_NAMES_BYTES, MAX_OUTPUTS, NAME_COST_BYTES
from gpool.core.errors import Invalid
from gpool.core.model import OutputFile
from gpool.core.specs.paths import checked, folded

MOST_TEXT = 500


def printable(text: object) -> str:
    """What a guest says, fit for a message."""
    return str(text)[:MOST_TEXT].encode("unicode_escape").decode()


class OutputCollection:
    """What comes in answer to one request: announced by a word, then so many bytes, then the next."""

    def __init__(self, wanted: Sequence[str], into: Path, quota_bytes: int) -> None:
        try:
            self._wanted = [checked(path, directory=path.endswith("/")) for path in wanted]
        except Invalid as bad:
            raise BadOutput(bad.detail) from bad
        self._into = into
        self._quota_bytes = self._left_bytes = quota_bytes
        self._names_bytes = 0
        self._names: dict[str, str] = {}
        self.found: list[OutputFile] = []
        self._file: _IncomingFile | None = None

    def announce(self, word: Mapping[str, object]) -> None:
        path, size, executable = word.get("path"), word.get("size"), word.get("executable")
        if not isinstance(path, str) or type(size) is not int or not isinstance(executable, bool):
            raise BadOutput("the guest announced an output that is none")
        if self._file is not None:
            raise BadOutput("the guest announced an output before the last one had come")
        try:
            checked(path)
        except Invalid as bad:
            raise BadOutput(bad.detail) from bad
        if not any(
            path == one or (one.endswith("/") and path.startswith(one)) for one in self._wanted
        ):
            raise BadOutput(f"the guest sent '{printable(path)}', which nobody asked for")
        twin = self._names.setdefault(folded(path), path)
        if twin != path:
            told = (
                f"outputs '{printable(twin)}' and '{printable(path)}' are one name on some machines"
            )
            raise BadOutput(told)
        if len(self.found) >= MAX_OUTPUTS:
            raise BadOutput(f"more than {MAX_OUTPUTS} outputs; put them into one archive")
        self._names_bytes += len(path.encode()) + NAME_COST_BYTES
        if self._names_bytes > MAX_NAMES_BYTES:
            raise BadOutput("too many outputs with names this long; put them into one archive")
        if not 0 <= size <= self._left_bytes:
            raise BadOutput(
                f"output '{printable(path)}' of {size} bytes is over the disk limit of {self._quota_bytes}"
            )
        self._left_bytes -= size
        self._file = _IncomingFile(self._into, path, size, executable)
        self.take(b"")

    def take(self, data: bytes) -> None:
        file = self._file
        if file is None:
            raise BadOutput("the guest sent bytes of no output")
        if file.take(data):
            self._file = None
            made = file.finish()
            if all(other.path != made.path for other in self.found[-1:]):
                self.found.append(made)

    def finish(self) -> list[OutputFile]:
        if self._file is not None:
            raise BadOutput("the guest stopped in the middle of an output")
        names = {file.path for file in self.found}
        for path in self._wanted:
            if not path.endswith("/") and path not in names:
                raise BadOutput(f"output '{printable(path)}' was not sent by the guest")
        unique = {file.path: file for file in self.found}
        return list(unique.values())

    def drop(self) -> None:
        if self._file is not None:
            self._file.drop()
            self._file = None


class _IncomingFile:
    def __init__(self, into: Path, path: str, size: int, executable: bool) -> None:
        self._into = into
        self._path = path
        self._size = self._left = size
        self._executable = executable
        self._temporary = into / f"taking-{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor = os.open(self._temporary, flags, 0o600)
        self._digest = hashlib.sha256()

    def take(self, data: bytes) -> bool:
        """Whether it is whole."""
        if len(data) > self._left:
            raise BadOutput("the guest sent more of an output than it said")
        self._digest.update(data)
        view = memoryview(data)
        while view:
            view = view[os.write(self._descriptor, view) :]
        self._left -= len(data)
        return self._left == 0

    def finish(self) -> OutputFile:
        os.close(self._descriptor)
        sha256 = self._digest.hexdigest()
        self._temporary.rename(self._into / sha256)
        return OutputFile(self._path, sha256, self._size, self._executable)

    def drop(self) -> None:
        os.close(self._descriptor)
        with contextlib.suppress(FileNotFoundError):
            self._temporary.unlink()
