"""`.map`: many calls in one open batch, results yielded in input order while calls are still being submitted.

The caller's thread submits in growing chunks; a background thread reads the result stream and resumes after the last
sequence number. At most `WINDOW` calls are outstanding, so endless inputs take bounded memory. After a refusal by
quota, smaller chunks are submitted as results come in.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Protocol, TextIO
from urllib.parse import quote

import httpx2

from gpool.client.transport import ApiTransport
from gpool.client.values import Raised, Result, decode_lines
from gpool.core.errors import GpoolError, InternalFault, TooMany, Unreachable

log = logging.getLogger(__name__)

FIRST_CHUNK, LAST_CHUNK = 64, 4000
WINDOW = 50_000
CHUNK_BYTES = 8 * 1024 * 1024
"""A request is sent once its calls have this size."""

_CHUNK_S = 0.1
"""A chunk is submitted after this time even if it is small: inputs may be slow."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
"""Wait for results before a call that a quota refused is tried again."""

_SILENCE_S = 90.0
"""A stream silent for this long is reopened: the connection may be dead unnoticed."""


_ASKED_AGAIN_S = 5.0
"""Interval at which `ended` checks whether an open batch was closed."""


class Submit(Protocol):
    """Submit rendered calls to a batch (None: a new one); return its id."""

    def __call__(self, calls: list[bytes], batch: str | None, more: bool) -> str: ...


@dataclass(frozen=True, slots=True)
class ReaderFailure:
    error: GpoolError


ResultInbox = SimpleQueue[list[Result] | ReaderFailure | None]
"""Results of a batch as they come; None wakes the thread that reads it."""


class ResultReader:
    """Puts lists of results into `inbox`, each result once."""

    def __init__(self, api: ApiTransport, batch: str, inbox: ResultInbox | None = None) -> None:
        """`inbox`: default one of its own."""
        self._api, self._batch = api, batch
        self._stopped = threading.Event()
        self.inbox: ResultInbox = SimpleQueue() if inbox is None else inbox
        self._thread = threading.Thread(target=self._read, name=f"gpool {batch}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _read(self) -> None:
        after, tries = 0, self._api.pauses()
        while not self._stopped.is_set():
            try:
                path = f"/v1/batches/{self._batch}/results?after={after}"
                with self._api.open(path, read_s=_SILENCE_S) as response:
                    for results in _batches(response):
                        if results[0].sequence != after + 1:
                            self.inbox.put(
                                ReaderFailure(_gap(self._batch, after, results[0].sequence))
                            )
                            return
                        after = results[-1].sequence
                        tries = self._api.pauses()
                        self.inbox.put(results)
                        if self._stopped.is_set():
                            return
                    # Regular end: the batch is complete, or the server stops. The owner knows which and stops
                    # this reader; until then it reconnects, no faster than a retry.
                pause = next(tries, None)
            except Unreachable as exc:
                pause = next(tries, None)
                if pause is None:
                    self.inbox.put(ReaderFailure(exc))
                    return
            except GpoolError as exc:
                self.inbox.put(ReaderFailure(exc))
                return
            if self._stopped.wait(pause or 1.0):
                return


def _gap(batch: str, after: int, found: int) -> InternalFault:
    return InternalFault(f"the results of {batch} skip from sequence {after} to {found}")


def _batches(response: httpx2.Response) -> Iterator[list[Result]]:
    rest = b""
    for piece in response.iter_bytes():
        end = piece.rfind(b"\n") + 1
        if not end:
            rest += piece
            continue
        results = decode_lines(rest + piece[:end])
        rest = piece[end:]
        if results:
            yield results


MAP_ECHOES = 20
"""Calls of one map whose output is shown; each takes a request."""


class MapEcho:
    """Shows the output of the first calls of a map that have some."""

    def __init__(self, show: Callable[[str], None], wanted: bool) -> None:
        self._show, self._left = show, MAP_ECHOES if wanted else 0

    def show(self, result: Result) -> None:
        if not (result.printed and self._left):
            return
        self._left -= 1
        self._show(result.id)
        if not self._left:
            log.warning("more calls have output, which is not shown; read it with: gpool logs ID")


class BatchLine:
    """One line on a terminal that counts a map's calls. It is shown while the caller waits, and gone before a value
    is yielded, so that it never mixes with the caller's own output.
    """

    def __init__(
        self,
        name: str,
        out: TextIO | None = None,
        phase: Callable[[], str] = lambda: "",
        *,
        is_wanted: bool = True,
    ) -> None:
        """`phase`: that of the first call; asked while no call has ended. `is_wanted`: show the bar on a terminal."""
        self._phase, self._last = phase, ""
        self._name = "".join(letter for letter in name[:40] if letter.isprintable())
        self._out = sys.stderr if out is None else out
        self._is_tty = is_wanted and self._out.isatty()
        self._is_shown = False
        self.failed = 0

    def show(self, batch: str, done: int, total: int, *, more: bool) -> None:
        if not self._is_tty:
            return
        part = BAR * done // max(1, total)
        bar = "#" * part + "-" * (BAR - part)
        failed = f", {self.failed} failed" if self.failed else ""
        count = f"{done:,} of {total:,}{'+' if more else ''}"
        self._out.write(f"\r\x1b[K{self._name} {batch} [{bar}] {count} done{failed}")
        self._out.flush()
        self._is_shown = True

    def idle(self) -> None:
        """Tell a terminal or not that the environment is being built: that may take minutes."""
        phase = self._phase()
        if phase != self._last and phase == "build":
            self.clear()
            self._out.write(f"{self._name}: building the environment…\n")
            self._out.flush()
        self._last = phase

    def clear(self) -> None:
        if self._is_shown:
            self._out.write("\r\x1b[K")
            self._out.flush()
            self._is_shown = False


IDLE_S = 2.0
"""Interval at which the first call's phase is asked for while no call has ended, and a stopped map is noticed."""

BAR = 20
"""Width of the bar in characters."""


def stream(
    api: ApiTransport,
    calls: Iterator[bytes],
    submit: Submit,
    outcome: Callable[[Result], object],
    abandon: Callable[[str], None],
    *,
    window: int = WINDOW,
    line: BatchLine | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Iterator[object]:
    """Values (or `Raised`) in order; `abandon(batch)` if the caller stops early. `line` shows the progress.

    `is_stopped` is asked every `IDLE_S` while no result comes: another thread may end the map.
    """
    line = BatchLine("map") if line is None else line
    batch: str | None = None
    reader: ResultReader | None = None
    early: dict[int, Result] = {}
    size, exhausted, complete = FIRST_CHUNK, False, False
    again_at = 0.0  # after a refusal: no submission before, while results are ready
    closed = refused = False  # the batch; its closing
    submitted = received = given = 0
    held: list[bytes] = []  # calls taken from the inputs, not submitted yet
    pause = _FIRST_PAUSE_S
    try:
        while True:
            if reader is not None:
                while not reader.inbox.empty():
                    received += _take(reader, early, line=line)
            ready = given in early
            room = min(size, window - (submitted - given))
            enough = time.monotonic() < again_at or submitted - received > size // 2
            if not closed and room > 0 and not (ready and enough):
                if not held:
                    held, exhausted = _chunk(calls, room)
                chunk, later = held[:room], held[room:]
                try:
                    if chunk or batch is not None:
                        batch = submit(chunk, batch, bool(later) or not exhausted)
                except TooMany as error:  # a quota: smaller chunks, then one call as capacity frees
                    if (
                        not chunk
                    ):  # nothing left to submit: the batch is cancelled after the last result
                        closed = refused = True
                    elif len(chunk) > 1:
                        size = len(chunk) // 2
                    elif reader is None:
                        raise
                    else:
                        if pause < _LONGEST_PAUSE_S <= 2 * pause:
                            log.warning("map is waiting for a quota: %s", error.detail)
                        again_at = time.monotonic() + pause
                        received += 0 if ready else _take(reader, early, pause, line)
                        pause = min(2 * pause, _LONGEST_PAUSE_S)
                    continue
                held, pause, again_at = later, _FIRST_PAUSE_S, 0.0
                closed = exhausted and not held
                submitted += len(chunk)
                size = min(size * 2, LAST_CHUNK)
                if reader is None and batch is not None:
                    reader = ResultReader(api, batch)
            elif ready:
                result = early.pop(given)
                given += 1
                line.clear()
                yield outcome(result)
            elif closed and given == submitted:
                complete = not refused
                return
            else:
                assert reader is not None
                assert batch is not None
                line.show(batch, received, submitted, more=not closed)
                got = _take(reader, early, IDLE_S, line)
                received += got
                if is_stopped():
                    return
                if not received:
                    line.idle()
    finally:
        line.clear()
        if reader is not None:
            reader.stop()
        if batch is not None and not complete:
            with contextlib.suppress(GpoolError):
                abandon(batch)


def ended(
    api: ApiTransport,
    batch: str,
    within_s: float | None = None,
    monotonic: Callable[[], float] = time.monotonic,
) -> Iterator[Result]:
    """Yield results in order of completion until the batch is closed and complete.

    `TimeoutError` after `within_s` seconds; `NotFound` at once.
    """
    path = f"/v1/batches/{quote(batch, safe='')}"
    ends = None if within_s is None else monotonic() + within_s
    about, reader, received = api.get_json(path), ResultReader(api, batch), 0
    try:
        while not (about["closed"] and received >= about["total"]):
            left = _ASKED_AGAIN_S if ends is None else max(0.0, ends - monotonic())
            try:
                got = reader.inbox.get(timeout=min(left, _ASKED_AGAIN_S))
            except Empty:
                if ends is not None and monotonic() >= ends:
                    about, ends = api.get_json(path), None  # a long list takes time to arrive
                    if not (about["closed"] and about["done"] >= about["total"]):
                        raise TimeoutError(
                            f"batch {batch} has not ended within {within_s} s and continues"
                        ) from None
                got = []
            if isinstance(got, ReaderFailure):
                raise got.error
            got = got or []
            received += len(got)
            yield from got
            if not about["closed"]:
                about = api.get_json(path)
    finally:
        reader.stop()


def _take(
    reader: ResultReader,
    early: dict[int, Result],
    within_s: float | None = None,
    line: BatchLine | None = None,
) -> int:
    """Add one list of results to `early`; return its length, 0 after the timeout."""
    try:
        got = reader.inbox.get(timeout=within_s)
    except Empty:
        return 0
    if isinstance(got, ReaderFailure):
        raise got.error
    got = got or []
    for result in got:
        early[result.position] = result
    if line is not None:
        line.failed += sum(result.status == "failed" for result in got)
    return len(got)


def _chunk(calls: Iterator[bytes], room: int) -> tuple[list[bytes], bool]:
    """Up to `room` calls, fewer if large or slow; also whether the inputs are exhausted."""
    chunk: list[bytes] = []
    began, size_bytes = time.monotonic(), 0
    for call in islice(calls, room):
        chunk.append(call)
        size_bytes += len(call)
        if size_bytes > CHUNK_BYTES or time.monotonic() - began > _CHUNK_S:
            return chunk, False
    return chunk, len(chunk) < room


def raise_first(outcomes: Iterator[object]) -> Generator[object, None, None]:
    try:
        for value in outcomes:
            if type(value) is Raised:
                raise value.exception
            yield value
    finally:
        close = getattr(outcomes, "close", None)
        if close is not None:
            close()


def exceptions_as_values(outcomes: Iterator[object]) -> Generator[object, None, None]:
    try:
        for value in outcomes:
            yield value.exception if type(value) is Raised else value
    finally:
        close = getattr(outcomes, "close", None)
        if close is not None:
            close()
