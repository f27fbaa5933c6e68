"""Trace of a run: messages and decisions with their virtual time, hashed as written."""

from __future__ import annotations

import hashlib

from msgspec.structs import replace

from gpool.testing.loop import VirtualLoop
from gpool.wire.frames import Grants, Line, encode


class Trace:
    """`keep` also keeps the lines; the hash is the same."""

    def __init__(self, loop: VirtualLoop, *, keep: bool = False) -> None:
        self._loop = loop
        self._keep = keep
        self._hash = hashlib.sha256()
        self._pending: list[str] = []
        self.lines: list[str] = []
        self.count = 0

    def say(self, who: str, what: str, *details: object) -> None:
        line = f"{self._loop.us} {who} {what} {' '.join(map(str, details))}"
        self.count += 1
        self._pending.append(line)
        if self._keep:
            self.lines.append(
                f"{self._loop.us / 1e6:10.6f}  {who:<12} {what} {' '.join(map(str, details))}"
            )
        if len(self._pending) >= 256:
            self._flush()

    def frame(self, who: str, way: str, data: bytes, frame: object) -> None:
        """Hash a frame without gang secrets: they do not come from the seed."""
        self.count += 1
        if isinstance(frame, Grants) and any(line.gang is not None for line in frame.lines):
            data = encode(replace(frame, lines=tuple(map(_without_secret, frame.lines))))
        self._pending.append(f"{self._loop.us} {who} {way} {data.hex()}")
        if self._keep:
            self.lines.append(f"{self._loop.us / 1e6:10.6f}  {who:<12} {way} {frame}")

    def _flush(self) -> None:
        self._hash.update("\n".join(self._pending).encode() + b"\n")
        self._pending.clear()

    def digest(self) -> str:
        self._flush()
        return self._hash.hexdigest()


def _without_secret(line: Line) -> Line:
    return line if line.gang is None else replace(line, gang=replace(line.gang, secret=b""))
