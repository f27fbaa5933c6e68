"""A task's output, by page or as a stream that resumes after the last cursor without repetition."""

from __future__ import annotations

import codecs
import json
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from gpool.client.connection.transport import ApiTransport
from gpool.core.errors import Unreachable


@dataclass(frozen=True, slots=True)
class Printed:
    """Bytes and their text. A character split between two pieces is in the `text` of the second."""

    cursor: int
    stream: str  # "stdout" or "stderr"
    data: bytes
    text: str


@dataclass(frozen=True, slots=True)
class TaskProgress:
    """`epoch` of the lease; 0: none yet."""

    epoch: int
    status: str
    phase: str | None

    @classmethod
    def of(cls, document: dict[str, Any]) -> TaskProgress:
        phase = document.get("phase")
        return cls(
            int(document.get("epoch", 0)),
            str(document.get("status", "")),
            None if phase is None else str(phase),
        )


OnProgress = Callable[[TaskProgress], None]

KEEP_ALIVE = ":"
"""Event name that stands for a comment (keep-alive); real names never start with a colon."""


def printed(items: Iterable[dict[str, Any]]) -> Iterator[Printed]:
    """One more piece at the end if a stream broke off inside a character."""
    decoders: dict[tuple[int, str], codecs.IncrementalDecoder] = {}
    cursor = 0
    for item in items:
        cursor, stream, encoded = int(item["cursor"]), str(item["stream"]), item.get("data")
        data = str(item["text"]).encode() if encoded is None else b64decode(encoded)
        key = (int(item["epoch"]), stream)
        decoder = decoders.get(key)
        if decoder is None:
            decoder = decoders[key] = codecs.getincrementaldecoder("utf-8")("replace")
        yield Printed(cursor, stream, data, decoder.decode(data))
    for (_, stream), decoder in decoders.items():
        if rest := decoder.decode(b"", final=True):
            yield Printed(cursor, stream, b"", rest)


def pages(api: ApiTransport, task: str, after: int = 0) -> Iterator[dict[str, Any]]:
    while True:
        page = api.get_json(f"/v1/tasks/{task}/logs?after={after}")
        for item in page["items"]:
            after = max(after, int(item["cursor"]))
            yield item
        if not page["items"] or page.get("next") is None:
            return
        after = max(after, int(page["next"]))


def follow(
    api: ApiTransport, task: str, after: int = 0, on_progress: OnProgress | None = None
) -> Iterator[dict[str, Any]]:
    """Log documents until the task has ended.

    `on_progress` is called for each change, and again with the same value on keep-alives.
    """
    tries, last = api.pauses(), None
    while True:
        try:
            headers = {"accept": "text/event-stream"}
            with api.open(f"/v1/tasks/{task}/logs?after={after}", headers=headers) as response:
                tries = api.pauses()
                for event, data in _events(response.iter_bytes()):
                    if event == "end":
                        return
                    if event == KEEP_ALIVE:
                        if on_progress is not None and last is not None:
                            on_progress(last)
                        continue
                    item = json.loads(data)
                    if event == "progress" and on_progress is not None and isinstance(item, dict):
                        last = TaskProgress.of(item)
                        on_progress(last)
                    if isinstance(item, dict) and "cursor" in item and "text" in item:
                        after = max(after, int(item["cursor"]))
                        yield item
        except Unreachable:
            pause = next(tries, None)
            if pause is None or api.wait(pause):
                raise
            continue
        page = api.get_json(
            f"/v1/tasks/{task}/logs?after={after}"
        )  # the stream ended; has the task?
        if page.get("ended") and not page["items"]:
            return


def _events(pieces: Iterable[bytes]) -> Iterator[tuple[str, str]]:
    name, data = "message", list[str]()
    for line in _lines(pieces):
        if not line:
            if data:
                yield name, "\n".join(data)
            elif name != "message":
                yield name, ""
            name, data = "message", []
        elif line.startswith(":"):
            yield KEEP_ALIVE, ""
        elif line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
        elif line.startswith("event:"):
            name = line[6:].strip()


def _lines(pieces: Iterable[bytes]) -> Iterator[str]:
    decoder, rest = codecs.getincrementaldecoder("utf-8")("replace"), ""
    for piece in pieces:
        *whole, rest = (rest + decoder.decode(piece)).split("\n")
        for line in whole:
            yield line.removesuffix("\r")
