"""Processes the kernel killed for memory, from the kernel log; none without the right to read it.

The record precedes the container's end; the engine's notification may come later or be lost.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator

KERNEL_LOG = "/dev/kmsg"
LONGEST_RECORD = 1 << 14
USER_RECORDS_FROM = 8  # a record's number is 8 × facility + severity; facility 0 is the kernel's
KILLED_FOR_A_LIMIT = re.compile(r"oom-kill:constraint=CONSTRAINT_MEMCG,.*?\boom_memcg=([^,]*),")


def records(path: str = KERNEL_LOG) -> Iterator[str]:
    try:
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:  # not root, or no such log here
        return
    try:
        while True:
            try:
                record = os.read(log, LONGEST_RECORD)
            except BrokenPipeError:  # overwritten meanwhile: the next read gives the next one
                continue
            except OSError:  # EAGAIN: this was the last
                return
            if not record:
                return
            yield record.decode("utf-8", "replace")
    finally:
        os.close(log)


def exceeded_its_limit(container: str, found: Iterable[str]) -> bool:
    """False if the machine or a group above ran out of memory: the container may be within its limit."""
    for record in found:
        about, _, text = record.partition(";")
        number = about.partition(",")[0]
        if not number.isdecimal() or int(number) >= USER_RECORDS_FROM:
            continue
        limited = KILLED_FOR_A_LIMIT.match(text)
        if limited is not None and container in limited[1]:
            return True
    return False
