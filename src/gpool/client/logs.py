"""A task's output, page by page or as it comes. A broken stream goes on after the last cursor; nothing is shown twice."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from gpool.client.door import Door
from gpool.core.errors import Unreachable


@dataclass(frozen=True, slots=True)
class Printed:
    """A piece of output."""

    cursor: int
    stream: str  # "stdout" or "stderr"
    text: str

    @property
    def data(self) -> bytes:
        """The bytes as the task wrote them, as far as text can carry them."""
        return self.text.encode("utf-8", "surrogateescape")


def pages(door: Door, task: str, after: int = 0) -> Iterator[Printed]:
    """What is there now, then the end."""
    while True:
        page = door.get_json(f"/v1/tasks/{task}/logs?after={after}")
        for item in page["items"]:
            piece = _printed(item)
            after = max(after, piece.cursor)
            yield piece
        if not page["items"] or page.get("next") is None:
            return
        after = max(after, int(page["next"]))


def follow(door: Door, task: str, after: int = 0) -> Iterator[Printed]:
    """What is there and what comes, until the task has ended and all its output was given."""
    tries = door.pauses()
    while True:
        try:
            headers = {"accept": "text/event-stream"}
            with door.open(f"/v1/tasks/{task}/logs?after={after}", headers=headers) as response:
                tries = door.pauses()
                for event, data in _events(response.iter_bytes()):
                    if event == "end":
                        return
                    item = json.loads(data)
                    if isinstance(item, dict) and "cursor" in item and "text" in item:
                        piece = _printed(item)
                        after = max(after, piece.cursor)
                        yield piece
        except Unreachable:
            pause = next(tries, None)
            if pause is None or door.wait(pause):
                raise
            continue
        page = door.get_json(
            f"/v1/tasks/{task}/logs?after={after}"
        )  # the stream ended: did the task?
        if page.get("ended") and not page["items"]:
            return


def _printed(item: dict[str, Any]) -> Printed:
    return Printed(int(item["cursor"]), str(item["stream"]), str(item["text"]))


def _events(pieces: Iterable[bytes]) -> Iterator[tuple[str, str]]:
    """Server-sent events: (name, data), comments left out."""
    name, data = "message", list[str]()
    for line in _lines(pieces):
        if not line:
            if data:
                yield name, "\n".join(data)
            elif name != "message":
                yield name, ""
            name, data = "message", []
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
