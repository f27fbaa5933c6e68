"""Progress of the running task: `gpool.progress` and `gpool.tqdm`, for code that runs inside a task. Stdlib only.

A function reports through its runner (the module `gpool_runner`, which exists only there), a command through the file
that GPOOL_PROGRESS_FILE names. Outside a task both report nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Sized
from time import monotonic
from typing import Generic, TypeVar

T = TypeVar("T")
EVERY_S = 1.0
MAX_LETTERS = 200


def progress(fraction: float, text: str = "") -> None:
    """Report how far the task is, from 0 to 1, and what it does; the newest report is shown.

    Costs microseconds in a function and a small file in a command. Never fails for reasons outside the call: progress
    that cannot be reported is dropped. Outside a task nothing happens.
    """
    value, said = float(fraction), " ".join(str(text)[:MAX_LETTERS].split())
    runner = sys.modules.get("gpool_runner")
    if runner is not None:
        runner.progress(value, said)
        return
    path = os.environ.get("GPOOL_PROGRESS_FILE")
    if path:
        with contextlib.suppress(OSError):
            _replace(path, f"{value:.6f} {said}\n")


def _replace(path: str, line: str) -> None:
    """Write beside the file and rename: the agent never reads half a line."""
    unfinished = f"{path}.{os.getpid()}.tmp"
    with open(unfinished, "w", encoding="utf-8", errors="replace") as file:
        file.write(line)
    os.replace(unfinished, path)


class tqdm(Generic[T]):
    """Iterate and report progress at most once a second, with tqdm's interface: iteration, `update`, `set_description`.

    The length is `total` or that of the iterable; without one nothing is reported. Prints no bar.
    """

    def __init__(
        self,
        iterable: Iterable[T] | None = None,
        desc: str | None = None,
        total: float | None = None,
    ) -> None:
        self.iterable = iterable
        self.desc = desc or ""
        self.total = total
        if total is None and isinstance(iterable, Sized):
            self.total = len(iterable)
        self.n = 0.0
        self._reported_at = monotonic() - EVERY_S

    def __iter__(self) -> Iterator[T]:
        for item in self.iterable or ():
            yield item
            self.update(1)
        self.close()

    def __enter__(self) -> tqdm[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, n: float = 1) -> None:
        self.n += n
        if monotonic() - self._reported_at >= EVERY_S:
            self._report()

    def set_description(self, desc: str | None = None) -> None:
        self.desc = desc or ""

    def close(self) -> None:
        """Report the last state."""
        self._report()

    def _report(self) -> None:
        self._reported_at = monotonic()
        if self.total:
            counted = f"{self.n:g}/{self.total:g}"
            progress(self.n / self.total, f"{self.desc}: {counted}" if self.desc else counted)
