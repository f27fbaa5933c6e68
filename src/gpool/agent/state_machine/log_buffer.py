"""Output of one attempt on its way to the server: coalesced into chunks, sent in a rhythm, capped. Refuses to grow past the cap."""

from __future__ import annotations

from gpool.core.model import KIB, MIB
from gpool.wire.frames import LogChunk

CHUNK_BYTES = 64 * KIB
CAP_BYTES = 16 * MIB
RHYTHM_US = 100_000
"""A task's output leaves at most this often, however it dribbles."""


class LogBuffer:
    """What an attempt printed and was not yet put into a report. `due_at` is when it should be."""

    __slots__ = ("_epoch", "_full", "_parts", "_sequence", "_taken", "_task", "due_at")

    def __init__(self, task: int, epoch: int) -> None:
        self._task = task
        self._epoch = epoch
        self._parts: list[tuple[int, bytearray]] = []
        self._sequence = 0
        self._taken = 0
        self._full = False
        self.due_at: int | None = None

    def append(self, now: int, stream: int, data: bytes) -> None:
        if self._full or not data:
            return
        left = CAP_BYTES - self._taken
        if len(data) > left:
            data = data[:left]
            self._full = True
        self._taken += len(data)
        parts = self._parts
        if parts and parts[-1][0] == stream:
            parts[-1][1].extend(data)
        elif data:
            parts.append((stream, bytearray(data)))
        if self._full:
            note = f"\n[gpool: output past {CAP_BYTES // MIB} MiB is not kept]\n"
            parts.append((2, bytearray(note.encode())))
        if self.due_at is None:
            self.due_at = now + RHYTHM_US

    def take(self) -> list[LogChunk]:
        """Everything so far as chunks, numbered on from the last ones."""
        chunks = []
        for stream, data in self._parts:
            for start in range(0, len(data), CHUNK_BYTES):
                piece = bytes(data[start : start + CHUNK_BYTES])
                chunks.append(LogChunk(self._task, self._epoch, self._sequence, stream, piece))
                self._sequence += 1
        self._parts = []
        self.due_at = None
        return chunks
