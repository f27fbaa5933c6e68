"""Ctrl-C while something is read for hours: a press is counted and wakes whoever waits, so that none can be lost.

As an exception it may land in a destructor, a callback or a library's clean-up, and be dropped there. So the reading
is done in a thread, where no signal comes, and the main thread only waits and prints. Refuses to hear Ctrl-C where
the process was started with it ignored (a script's `gpool run … &`): it is not meant for us then.
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
HELD = 64  # pieces read and not yet printed; then the reading waits
LONGEST_SLEEP_S = 0.5
"""A Ctrl-C in the moment before the wait begins does not end it, and on Windows none does: it is seen this late."""

TICK_S, TICKS = 0.1, 10
"""How long after a Ctrl-C what is being printed may be finished, so that a list of JSON is closed; then nobody reads it.

In ticks, because those that come while the whole process stands still are one.
"""


class _Note(Enum):
    WAKE = "wake"
    END = "end"


class Reading(Generic[T, R]):
    """`work` runs in a thread and says things; `said()` gives them to the main thread, until the end or a Ctrl-C.

    Enter it in the main thread: Ctrl-C is ours until it is left. Whoever leaves early leaves the thread to the
    process's end.
    """

    def __init__(self, work: Callable[[Callable[[T], None]], R]) -> None:
        self._work = work
        self._queue: SimpleQueue[T | _Note] = SimpleQueue()  # whose put may come from a signal
        self._room = threading.Semaphore(HELD)
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

    def show(self, shown: Callable[[Iterator[T]], None]) -> R | None:
        """`shown` prints what it is given; what the work returned, or None after a Ctrl-C."""
        try:
            self._shows = True
            shown(self._said())
            self._shows = False
        except KeyboardInterrupt:  # out of a write that nobody read; the press is counted
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

    def _said(self) -> Iterator[T]:
        """Work that failed before its first word raises here: whoever shows it has nothing to end."""
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
                    self._room.release()
                    yield piece

    def _next(self, within_s: float) -> T | _Note:
        try:
            return self._queue.get(timeout=min(within_s, LONGEST_SLEEP_S))
        except Empty:
            return _Note.WAKE

    def _press(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - Python's signature
        self._presses += 1
        self._queue.put(_Note.WAKE)
        if self._presses > 2:  # who presses on wants out
            raise KeyboardInterrupt
        if self._shows and self._presses == 1:  # perhaps in a write that never ends
            self._arm()

    def _arm(self) -> None:
        if not hasattr(signal, "setitimer"):
            return  # Windows, where no signal breaks off a write
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
        with _Carried(self._carry):
            self._result.append(self._work(self._say))
        self._queue.put(_Note.END)

    def _say(self, piece: T) -> None:
        self._room.acquire()
        self._queue.put(piece)

    def _carry(self, error: BaseException) -> None:
        self._error = error


def unless_interrupted(work: Callable[[], R]) -> R | None:
    """What `work` gives, which has nothing to say meanwhile; None after a Ctrl-C."""
    with Reading[None, R](lambda _: work()) as reading:
        return reading.show(lambda said: deque(said, 0).clear())


class _Carried:
    """What is raised within is told to `tell` instead: the thread that asked for the work raises it."""

    def __init__(self, tell: Callable[[BaseException], None]) -> None:
        self._tell = tell

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> bool:
        if error is not None:
            self._tell(error)
        return True
