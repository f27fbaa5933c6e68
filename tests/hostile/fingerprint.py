"""What a host looks like, so that two looks can be compared: settings, mounts, processes, files, sockets, keys."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Iterable
from pathlib import Path

KEY_PLACES = (
    "/etc",
    "/boot",
    "/srv",
    "/root",
    "/usr/bin",
    "/usr/sbin",
    "/usr/local/bin",
    "/var/spool",
    "/lib/modules",
)
DEEP = ("/etc", "/srv", "/var/spool")
RESTLESS = re.compile(
    r"kernel/(random/|ns_last_pid|pty/nr|sched_domain|perf_event_max_sample_rate)|fs/(\w+-nr|\w+-state|quota/|aio-nr)"
    r"|fs/file-nr|vm/stat_refresh|net/netfilter/nf_conntrack_count|net/.*/(lan0|lo|all|default)/stable_secret"
)
LISTS = (
    "modules",
    "swaps",
    "net/tcp",
    "net/tcp6",
    "net/udp",
    "net/udp6",
    "net/unix",
    "net/packet",
    "net/raw",
    "net/netlink",
)
LISTS += (
    "net/route",
    "net/dev_mcast",
    "net/if_inet6",
    "sysvipc/shm",
    "sysvipc/msg",
    "sysvipc/sem",
    "keys",
    "filesystems",
)
MOST_LOOKS = 100
CLOCK, CLOCK_S, CLOCK_LOOKS = "clock", 5.0, 5
ENDED = "06"  # a connection that is over, and remembered for a minute


def settings() -> dict[str, str]:
    found = {}
    for folder, _, names in os.walk("/proc/sys"):
        for name in names:
            path = f"{folder}/{name}"
            if not RESTLESS.search(path.removeprefix("/proc/sys/")):
                with contextlib.suppress(OSError):
                    found[f"setting {path}"] = Path(path).read_text(errors="replace")
    return found


def mounts() -> dict[str, str]:
    found = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        found[f"mount {fields[4]}"] = " ".join(fields[5:])
    return found


def above(pid: str) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]


def processes(ours: int) -> dict[str, str]:
    """All below the given one; with that as the reaper, an orphan is among them."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError):
                parents[name] = above(name)
    found = {}
    for pid in parents:
        at = pid
        while at in parents and at != str(ours):
            at = parents[at]
        if at == str(ours) and pid != str(ours):
            with contextlib.suppress(OSError):
                found[f"process {pid}"] = (
                    Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace")
                )
    return found


def files(places: Iterable[str] = KEY_PLACES) -> dict[str, str]:
    found = {}
    for place in places:
        for folder, folders, names in os.walk(place):
            if place not in DEEP:
                folders.clear()
            for name in names:
                with contextlib.suppress(OSError):
                    facts = os.lstat(f"{folder}/{name}")
                    told = (facts.st_mode, facts.st_uid, facts.st_size, facts.st_mtime_ns)
                    found[f"file {folder}/{name}"] = " ".join(map(str, told))
    for name in os.listdir("/dev"):
        with contextlib.suppress(OSError):
            facts = os.lstat(f"/dev/{name}")
            if stat.S_ISBLK(facts.st_mode) or stat.S_ISCHR(facts.st_mode):
                found[f"device {name}"] = f"{facts.st_mode} {facts.st_rdev}"
    return found


def lists() -> dict[str, str]:
    """Lines of what the kernel lists, without addresses, counters and times that change by themselves."""
    found: dict[str, str] = {}
    for name in LISTS:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{name}").read_text(errors="replace").splitlines()[1:]:
                if told := steady(name, line):
                    found[f"{name} {told}"] = ""
    return found


def steady(name: str, line: str) -> str:
    fields = line.split()
    if name == "net/unix":
        return " ".join(fields[2:6] + fields[7:])
    if name in ("net/tcp", "net/tcp6", "net/udp", "net/udp6", "net/raw"):
        return " ".join(fields[1:4]) if fields[3] != ENDED else ""
    if name == "net/netlink":
        return " ".join(fields[1:3])
    if name == "net/packet":
        return " ".join(fields[2:6])
    if name == "keys":
        return " ".join(fields[4:7] + fields[7:8])
    if name.startswith("sysvipc"):
        return " ".join(fields[:3])
    return " ".join(fields[:2])


def booted_at() -> float:
    """By both clocks, which tells whether somebody set one. A stop between the two looks makes it earlier."""
    looks = (
        time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)  # noqa: TID251
        for _ in range(CLOCK_LOOKS)
    )
    return max(looks)


def is_the_same(name: str, before: str, after: str) -> bool:
    if name == CLOCK:
        return abs(float(after) - float(before)) < CLOCK_S
    return before == after


def fingerprint(ours: int) -> dict[str, str]:
    """One look; `ours` is the process below which everything must be gone again."""
    others = {"host name": os.uname().nodename, CLOCK: str(booted_at())}
    return settings() | mounts() | processes(ours) | files() | lists() | others


def steady_look(ours: int) -> dict[str, str]:
    """One look at a host that has come to rest: what ended before us may still be going."""
    before = fingerprint(ours)
    for _ in range(MOST_LOOKS):
        again = fingerprint(ours)
        if not changes(before, again):
            break
        before = again
    return before


def changes(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """What is new, gone or different, one line each."""
    told = [f"new: {name} {after[name]}"[:300] for name in after.keys() - before.keys()]
    told += [f"gone: {name}"[:300] for name in before.keys() - after.keys()]
    both = before.keys() & after.keys()
    told += [
        f"changed: {name}: {before[name]!r} to {after[name]!r}"[:300]
        for name in both
        if not is_the_same(name, before[name], after[name])
    ]
    return sorted(told)
