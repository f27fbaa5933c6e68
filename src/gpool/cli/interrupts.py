"""Ctrl-C during long reads: each press is counted and wakes the waiting thread, so that none is lost.

KeyboardInterrupt inside a destructor, a callback or a library's clean-up may be dropped there. So a thread, which gets
no signals, reads; the main thread waits and prints. Ctrl-C stays ignored in a process started with it ignored
(a script's `gpool run … &`).
"""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum
from queue import Empty, SimpleQueue
from types import FrameType, TracebackType
from typing import Any, Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")
HELD = 64  # pieces read but not yet printed; then the thread waits
LONGEST_SLEEP_S = 0.5
"""Longest wait in seconds: a Ctrl-C just before a wait, or on Windows, does not end the wait."""

TICK_S, TICKS = 0.1, 10
"""Time after a Ctrl-C to finish printing, e.g. to close a JSON list, before the write is interrupted.

Counted in ticks: ticks during a suspension of the process count as one.
"""


class _Note(Enum):
    WAKE = "wake"
    END = "end"


class Reading(Generic[T, R]):
    """Runs `work` in a thread and passes its pieces to the main thread, until the end or a Ctrl-C.

    Handles SIGINT, so it is entered in the main thread. Left early, the thread runs until the process ends.
    """

    def __init__(self, work: Callable[[Callable[[T], None]], R]) -> None:
        self._work = work
        self._queue: SimpleQueue[T | _Note] = (
            SimpleQueue()
        )  # put() may be called in a signal handler
        self._capacity = threading.Semaphore(HELD)
        self._presses = 0
        self._shows = False
        self._before: Any = None
        self._alarm: Any = None
        self._ticks = 0  # since the first press
        self._result: list[R] = []
        self._error: BaseException | None = None

    def __enter__(self) -> Reading[T, R]:
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, None):
            self._before = signal.signal(signal.SIGINT, self._press)
        threading.Thread(target=self._read, name="reading", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    @property
    def was_interrupted(self) -> bool:
        return self._presses > 0

    def show(self, show_pieces: Callable[[Iterator[T]], None]) -> R | None:
        """Return the result of `work`, or None after a Ctrl-C."""
        try:
            self._shows = True
            show_pieces(self._pieces())
            self._shows = False
        except KeyboardInterrupt:  # from a blocked write; the press is counted
            self._shows = False
        finally:
            self._disarm()
        if self.was_interrupted:
            return None
        if self._error is not None:
            raise self._error
        return self._result[0]

    def is_pressed_again(self, within_s: float) -> bool:
        ends = time.monotonic() + within_s
        while self._presses < 2 and (left := ends - time.monotonic()) > 0:
            self._next(left)
        return self._presses >= 2

    def _pieces(self) -> Iterator[T]:
        """Raises the error of work that failed before its first piece."""
        is_silent = True
        while not self.was_interrupted:
            match self._next(LONGEST_SLEEP_S):
                case _Note.END:
                    if is_silent and self._error is not None:
                        raise self._error
                    return
                case _Note.WAKE:
                    continue
                case piece:
                    is_silent = False
                    self._capacity.release()
                    yield piece

    def _next(self, within_s: float) -> T | _Note:
        try:
            return self._queue.get(timeout=min(within_s, LONGEST_SLEEP_S))
        except Empty:
            return _Note.WAKE

    def _press(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - Python's signature
        self._presses += 1
        self._queue.put(_Note.WAKE)
        if self._presses > 2:  # a third press ends the process
            raise KeyboardInterrupt
        if self._shows and self._presses == 1:  # perhaps in a blocked write
            self._arm()

    def _arm(self) -> None:
        if not hasattr(signal, "setitimer"):
            return  # Windows, where no signal interrupts a write
        self._alarm = signal.signal(signal.SIGALRM, self._tick)
        signal.setitimer(signal.ITIMER_REAL, TICK_S, TICK_S)

    def _tick(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - Python's signature
        self._ticks += 1
        if self._shows and self._ticks >= TICKS:
            raise KeyboardInterrupt

    def _disarm(self) -> None:
        if self._alarm is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._alarm)
            self._alarm = None

    # ---- in the thread

    def _read(self) -> None:
        with _PassErrors(self._carry):
            self._result.append(self._work(self._emit))
        self._queue.put(_Note.END)

    def _emit(self, piece: T) -> None:
        self._capacity.acquire()
        self._queue.put(piece)

    def _carry(self, error: BaseException) -> None:
        self._error = error


def unless_interrupted(work: Callable[[], R]) -> R | None:
    """Return the result of `work`, which has no pieces, or None after a Ctrl-C."""
    with Reading[None, R](lambda _: work()) as reading:
        return reading.show(lambda pieces: deque(pieces, 0).clear())


class _PassErrors:
    """Passes exceptions to `report`, to be raised in the main thread."""

    def __init__(self, report: Callable[[BaseException], None]) -> None:
        self._report = report

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> bool:
        if error is not None:
            self._report(error)
        return True
