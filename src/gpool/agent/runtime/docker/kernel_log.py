"""Whom the kernel killed for memory, by its own log. Refuses to guess: where the log may not be read it says nothing.

The kernel writes the line before the victim is gone, so whoever sees a container's end and looks then finds it. An
engine hears of it by a notice that it may have asked for too late, or that comes after the end.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator

KERNEL_LOG = "/dev/kmsg"
LONGEST_RECORD = 1 << 14
KERNELS_OWN = (
    8  # a record's number is 8 × facility + severity, and only the kernel writes facility 0
)
KILLED_FOR_A_LIMIT = re.compile(r"oom-kill:constraint=CONSTRAINT_MEMCG,.*?\boom_memcg=([^,]*),")


def records(path: str = KERNEL_LOG) -> Iterator[str]:
    """Every record that is still there, oldest first, as the kernel gives them: `number,…;text`."""
    try:
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:  # not root, or no such log here
        return
    try:
        while True:
            try:
                record = os.read(log, LONGEST_RECORD)
            except BrokenPipeError:  # overwritten while we read: the next one is given
                continue
            except OSError:  # EAGAIN: this was the last
                return
            if not record:
                return
            yield record.decode("utf-8", "replace")
    finally:
        os.close(log)


def exceeded_its_limit(container: str, found: Iterable[str]) -> bool:
    """Whether something in this container was killed because the container's own limit was reached.

    Not when the machine, or a group above the container's, had no memory left: then it may have used what it asked for.
    """
    for record in found:
        about, _, text = record.partition(";")
        number = about.partition(",")[0]
        if not number.isdecimal() or int(number) >= KERNELS_OWN:
            continue
        limited = KILLED_FOR_A_LIMIT.match(text)
        if limited is not None and container in limited[1]:
            return True
    return False
