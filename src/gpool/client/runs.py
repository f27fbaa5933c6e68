"""`Run`: a submitted task to follow, wait for or cancel; and its output, by page or as a stream that resumes without
repetition.

Pickles are loaded only for functions this program submitted, from the caller's own nodes unless requested otherwise.
One file because a run's output, its display and its result come from one stream.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import html
import json
import logging
import sys
import threading
import time
from base64 import b64decode
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, cast, overload
from urllib.parse import quote

from gpool.client.transport import ApiTransport
from gpool.client.values import Raised, Result, decode_result, failure, outcome
from gpool.core.errors import GpoolError, Unreachable
from gpool.core.terminal import TerminalText, plain

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # a checker brings it; `default` is new in Python 3.13

    from gpool.client.client import Client

    V = TypeVar("V", default=Any)
else:
    from typing import TypeVar

    V = TypeVar("V")


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


def shown(pieces: Iterable[Printed]) -> Iterator[str]:
    """Text of the pieces without the control sequences by which a node could write to the caller's terminal."""
    filters = {"stdout": TerminalText(), "stderr": TerminalText()}
    for piece in pieces:
        if text := filters[piece.stream].feed(piece.text):
            yield text
    for rest in [held.flush() for held in filters.values()]:
        if rest:
            yield rest


def pages(api: ApiTransport, task: str, after: int = 0) -> Iterator[dict[str, Any]]:
    while True:
        page = api.get_json(f"/v1/tasks/{task}/logs?after={after}")
        for item in page["items"]:
            after = max(after, int(item["cursor"]))
            yield item
        if not page["items"] or page.get("next") is None:
            return
        after = max(after, int(page["next"]))


def follow_log(
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


def follow_events(api: ApiTransport, query: str, after: str = "") -> Iterator[dict[str, Any]]:
    """Events of an account, for ever: kept ones after a cursor, then new ones; resumed where a connection broke."""
    tries = api.pauses()
    while True:
        headers = {"accept": "text/event-stream"} | ({"last-event-id": after} if after else {})
        try:
            with api.open(f"/v1/events?{query}", headers=headers) as response:
                tries = api.pauses()
                for event, data in _events(response.iter_bytes()):
                    if event == KEEP_ALIVE:
                        continue
                    item = json.loads(data)
                    after = str(item["id"])
                    yield item
        except Unreachable:
            pause = next(tries, None)
            if pause is None or api.wait(pause):
                raise


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


log = logging.getLogger(__name__)

EXPLAINED_AFTER_S = 20.0
"""Waiting time for a task to start after which the reason is logged."""

ECHOED_AFTER_S = 1.0
"""A call that takes longer is followed: its output is shown as it comes, not at its end."""

MOST_FOLLOWED = 8
"""Calls of one process that are followed at once; output of others is shown at their end. Each holds a connection."""

_following = threading.BoundedSemaphore(MOST_FOLLOWED)

TEMPORARY = frozenset(
    [
        "closed",
        "cordoned",
        "flagged",
        "not_connected",
        "over_quota",
        "paused",
        "probation",
        "quota_used",
        "refused",
        "reserved",
        "resting",
        "verifying",
        "withheld",
    ]
)
"""Reasons without a position in the queue that end without a change of the request or of the pool's nodes."""

LONGEST_WAIT_S = 30
"""Longest wait of one request for a task's end; a longer wait repeats the request."""


AWAITED_S = 5.0
"""Longest wait of one request of an awaited run: a cancelled `await` leaves its thread busy for at most this time."""


class Run(Generic[V]):
    """A submitted task. Each property sends a request until the task's end is known. `await run` is its result."""

    def __init__(
        self,
        client: Client,
        task: str,
        *,
        function: bool,
        own: bool,
        pickle_requested: bool = False,
        on: str | None = None,
        echo: bool = False,
    ) -> None:
        """`echo`: `result` shows the function's output on standard error."""
        self._client, self.id, self._echo = client, task, echo
        self.on = on
        """Owners whose nodes may run it ("anyone", "me", "team:lab"), as the submission answered; None: not known."""
        self._function, self._own = function, own
        self._pickle_requested = pickle_requested
        self._known: Result | None = None

    def __repr__(self) -> str:
        return f"Run({self.id!r})"

    def _repr_html_(self) -> str:
        """Return a table for notebooks; sends one request. Texts of the task are escaped."""
        try:
            document = self.document()
        except GpoolError as error:
            document = {"status": f"not known: {error.detail}"}
        rows = {"task": self.id} | {
            name: plain(str(value))
            for name in ("name", "status", "phase", "node_name", "error_text")
            if (value := document.get(name))
        }
        cells = "".join(
            f"<tr><th>{html.escape(name.replace('_', ' '))}</th><td>{html.escape(value)}</td></tr>"
            for name, value in rows.items()
        )
        return f"<table>{cells}</table>"

    def __await__(self) -> Generator[Any, None, V]:
        """Wait for the result in a thread of the event loop's executor; see `result`."""
        return self._awaited().__await__()

    async def _awaited(self) -> V:
        while self._known is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.to_thread(self.wait, AWAITED_S)
        return await asyncio.to_thread(self.result)

    @property
    def status(self) -> str:
        """`queued`, `leased`, `running`, `succeeded`, `failed` or `cancelled`."""
        return str(self.document()["status"]) if self._known is None else self._known.status

    @property
    def cost(self) -> None:
        """None: this version charges nothing."""
        return

    def document(self) -> dict[str, Any]:
        found = self._client.api.get_json(f"/v1/tasks/{quote(self.id, safe='')}")
        assert isinstance(found, dict)
        return found

    @overload
    def logs(self, follow: Literal[False] = False) -> str: ...
    @overload
    def logs(self, follow: Literal[True]) -> Iterator[str]: ...
    def logs(self, follow: bool = False) -> str | Iterator[str]:
        """Output so far (stdout and stderr interleaved); with `follow`, an iterator until the end.

        Text for a terminal: colours pass, other control characters are replaced. `printed` has the bytes as printed.
        """
        pieces = shown(self.printed(follow=follow))
        return pieces if follow else "".join(pieces)

    def printed(
        self, *, follow: bool = False, on_progress: OnProgress | None = None
    ) -> Iterator[Printed]:
        """Output with the stream of each piece; `on_progress` is called for changes of status while following."""
        return printed(self.log_documents(follow=follow, on_progress=on_progress))

    def log_documents(
        self, *, follow: bool = False, on_progress: OnProgress | None = None
    ) -> Iterator[dict[str, Any]]:
        api, task = self._client.api, quote(self.id, safe="")
        if follow:
            return follow_log(api, task, on_progress=on_progress)
        return pages(api, task)

    def wait(self, timeout: float | None = None) -> Result:
        """Wait for the task's end; `TimeoutError` after `timeout` seconds."""
        if self._known is None:
            self._known = wait_for(self._client, self.id, timeout)
        return self._known

    def result(self, timeout: float | None = None) -> V:
        """Return a function's value or raise its exception with the remote traceback; None for a successful command.

        `UntrustedResult` if another account's node returned a pickle; see `Task.remote`.
        """
        if self._echo and self._known is None and timeout is None:
            self._known = echoed_result(self._client, self.id)
        result = self.wait(timeout)
        if not self._function:
            if result.status != "succeeded":
                raise failure(result)
            return cast(V, None)
        value = outcome(
            result,
            self._client.artifacts.get,
            pickle_requested=self._pickle_requested,
            is_own_task=self._own,
            rules=self._client.rules,
        )
        if type(value) is Raised:
            raise value.exception
        return cast(V, value)

    def fetch(self, into: str | Path = ".") -> list[Path]:
        """Wait for the end and write the outputs beneath `into`."""
        return self._client.artifacts.fetch(self.wait().outputs, Path(into))

    def cancel(self) -> None:
        """Cancel the task; no effect after its end."""
        self._client.cancel(self.id)

    def explain(self) -> str:
        """One sentence on why the task waits or what it does."""
        return plain(str(self._client.explain(self.id)["sentence"]))

    def misfit(self) -> str:
        """Why no node of the pool could ever run the waiting task; empty if one could."""
        found = self._client.explain(self.id)
        can_run = found["status"] != "queued" or found.get("position") is not None
        return "" if can_run or found.get("code") in TEMPORARY else plain(str(found["sentence"]))


class OutputEcho:
    """Writes a function's output to standard error, each line behind the task's id.

    Standard output stays the program's own. Control characters are replaced: the text comes from a node.
    """

    def __init__(self, task: str) -> None:
        self._task, self._rest, self._phase = task, "", ""

    def feed(self, text: str) -> None:
        *whole, self._rest = (self._rest + text.replace("\r\n", "\n")).split("\n")
        for line in whole:
            self.line(line)

    def line(self, text: str) -> None:
        sys.stderr.write(f"[{self._task}] {plain(text)}\n")
        sys.stderr.flush()

    def progress(self, now: TaskProgress) -> None:
        """Name the phases that may take minutes."""
        phase = now.phase or ""
        if phase != self._phase and phase == "build":
            self.line("building the environment…")
        self._phase = phase

    def close(self) -> None:
        if self._rest:
            self.line(self._rest)
        self._rest = ""


def echo_log(client: Client, task: str) -> None:
    """Show the output of an ended task; nothing if the caller may not read it."""
    echo = OutputEcho(task)
    with contextlib.suppress(GpoolError):
        for piece in printed(pages(client.api, quote(task, safe=""))):
            echo.feed(piece.text)
    echo.close()


def echoed_result(client: Client, task: str, waited_s: float = 0.0) -> Result:
    """Result of a call; its output is shown, as it comes after `ECHOED_AFTER_S`. `waited_s`: time already waited."""
    try:
        result = wait_for(client, task, max(0.0, ECHOED_AFTER_S - waited_s))
    except TimeoutError:
        pass
    else:
        if result.printed:
            echo_log(client, task)
        return result
    if not _following.acquire(blocking=False):
        result = wait_for(client, task, None)
        if result.printed:
            echo_log(client, task)
        return result
    try:
        _follow(client, task)
    finally:
        _following.release()
    return wait_for(client, task, None)


def _follow(client: Client, task: str) -> None:
    echo, is_explained, last = OutputEcho(task), False, None

    def on_progress(now: TaskProgress) -> None:
        nonlocal is_explained, last
        if now == last and now.status == "queued" and not is_explained:
            is_explained = _explained(client, task, {"status": now.status})
        last = now
        echo.progress(now)

    with contextlib.suppress(GpoolError):  # `wait_for` reports what matters
        for piece in printed(follow_log(client.api, quote(task, safe=""), on_progress=on_progress)):
            echo.feed(piece.text)
    echo.close()


def wait_for(
    client: Client,
    task: str,
    timeout: float | None,
    monotonic: Callable[[], float] = time.monotonic,
) -> Result:
    """After `EXPLAINED_AFTER_S`, log why the task waits: it may never start."""
    path = f"/v1/tasks/{quote(task, safe='')}/result"
    began, is_explained = monotonic(), False
    ends = None if timeout is None else began + timeout
    while True:
        left = LONGEST_WAIT_S if ends is None else min(LONGEST_WAIT_S, ends - monotonic())
        wait = max(0.0, left)
        reply = client.api.send("GET", f"{path}?wait={wait:.6g}", read_s=wait + 30)
        if reply.status == 200:
            return decode_result(reply.body)
        now = monotonic()
        if not is_explained and now - began >= EXPLAINED_AFTER_S:
            is_explained = _explained(client, task, reply.json())
        if ends is not None and now >= ends:
            raise TimeoutError(f"task {task} has not ended within {timeout} s; it continues")


def _explained(client: Client, task: str, document: dict[str, Any]) -> bool:
    if document.get("status") != "queued":
        return False
    try:
        sentence = client.explain(task)["sentence"]
    except GpoolError:  # the explanation is optional
        return False
    log.warning("task %s waits: %s", task, plain(sentence))  # it may hold names others chose
    return True
