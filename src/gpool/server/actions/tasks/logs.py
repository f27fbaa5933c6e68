"""Output of a task, from rows or the artifact they were sealed into; as pages or as a stream to the end."""

from __future__ import annotations

import codecs
from base64 import b64encode
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

import msgspec

from gpool.core.ids import TaskId
from gpool.server.actions.tasks import documents, query
from gpool.server.server import Server
from gpool.server.store.identity_values import Caller
from gpool.server.store.operations.tasks import logs as operations
from gpool.server.store.values import LogLine, TaskView
from gpool.wire.documents import LogDocument, ProgressDocument

LOG_ROWS = 500
SILENCE_S = 15.0
_line_decoder = msgspec.json.Decoder(LogLine)


@dataclass(frozen=True, slots=True)
class OutputPage:
    items: list[LogDocument]
    next: int | None
    ended: bool


class _ChunkDecoder:
    def __init__(self) -> None:
        self._decoders: dict[tuple[int, int], codecs.IncrementalDecoder] = {}

    def documents(self, lines: Iterable[LogLine]) -> list[LogDocument]:
        return [self._document(line) for line in lines]

    def _document(self, line: LogLine) -> LogDocument:
        key = (line.epoch, line.stream)
        decoder = self._decoders.get(key)
        if decoder is None:
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            self._decoders[key] = decoder
        text = decoder.decode(line.data)
        return LogDocument(
            cursor=line.cursor,
            epoch=line.epoch,
            stream="stderr" if line.stream == 2 else "stdout",
            text=text,
            data=None if text.encode() == line.data else b64encode(line.data).decode(),
        )


async def page(server: Server, who: Caller, id_: TaskId, after: int) -> OutputPage:
    view = await query.task(server, who, id_)
    lines = await _after(server, view, after)
    more = len(lines) >= LOG_ROWS
    return OutputPage(
        _ChunkDecoder().documents(lines),
        lines[-1].cursor if more else None,
        view.row.status.is_final and not more,
    )


async def follow(
    server: Server, who: Caller, id_: TaskId, after: int
) -> AsyncIterator[list[LogDocument] | ProgressDocument]:
    """Output as it comes until the task has ended, and a progress document whenever the phase changes.

    An empty list is a sign of life after `SILENCE_S` without output.
    """
    await query.task(server, who, id_)
    return _follow(server, id_, after)


async def _follow(
    server: Server, id_: TaskId, after: int
) -> AsyncIterator[list[LogDocument] | ProgressDocument]:
    chunks = _ChunkDecoder()
    last: ProgressDocument | None = None
    with server.hub.subscription(id_) as changed:
        while True:
            # The task is read before its output, so that all output of a finished task is seen.
            view = await query.task_again(server, id_)
            now = documents.progress(view)
            if now != last and not view.row.status.is_final:
                last = now
                yield now
            lines = await _after(server, view, after)
            if lines:
                after = lines[-1].cursor
                yield chunks.documents(lines)
            elif view.row.status.is_final:
                return
            else:
                while not await changed.wait(SILENCE_S):
                    yield []


async def _after(server: Server, view: TaskView, after: int) -> list[LogLine]:
    if not view.log_sha256:
        return list(await server.store.read(operations.logs(view.row.id, after, LOG_ROWS)))
    return await _sealed_after(server, view.log_sha256, after)


async def _sealed_after(server: Server, sha256: str, after: int) -> list[LogLine]:
    found: list[LogLine] = []
    rest = b""
    async for chunk in server.blobs.read(sha256, 0, 1 << 62):
        *whole, rest = (rest + chunk).split(b"\n")
        for text in whole:
            line = _line_decoder.decode(text)
            if line.cursor > after:
                found.append(line)
                if len(found) >= LOG_ROWS:
                    return found
    return found
