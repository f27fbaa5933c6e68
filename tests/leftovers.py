"""Pytest plug-in: fail a run that leaves control groups, mounts or processes on the host.

Attributed by path: groups are named by a hash of their runtime's directory, engines by the run. A network namespace
lives by a process or by a mount of its file, so both are looked for.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

RUN = "GPOOL_TEST_RUN"
"""Variable with the run's number, which the workers of pytest-xdist inherit."""

CGROUPS = Path("/sys/fs/cgroup")
RUNTIME_FOLDERS = {"sandboxes": "gpool-", "microvms": "gpool-vm-"}
"""Directory of a runtime, and the prefix of its control groups."""

GROUP = re.compile(r"(gpool-(?:vm-)?[0-9a-f]{12}-)\d+")
ENDED_WITHIN = 50
"""Tenths of a second that killed processes and their groups have to disappear."""


@dataclass(frozen=True, slots=True)
class RunPaths:
    """Directories of one run: the tests' temporary directory, and the prefix of its engines' directories."""

    base: Path
    engines: str = ""  # none

    def names(self, text: str) -> bool:
        return f"{self.base}/" in text or (self.engines != "" and self.engines in text)


def engine_prefix() -> str:
    return f"gpe-{os.environ.get(RUN) or os.getpid()}-"


def groups(paths: RunPaths) -> list[Path]:
    """Control groups of the runtimes below `paths.base` and of the run's engines, children first."""
    candidates = [Path(top) / name for top, names, _ in os.walk(CGROUPS) for name in names]
    found = []
    if paths.engines:
        engines = f"/gpool-{Path(paths.engines).name}"
        found = [group for group in candidates if engines in str(group)]
    hashed = [(group, match[1]) for group in candidates if (match := GROUP.fullmatch(group.name))]
    if hashed:  # only then the directories are walked
        ours = set(_prefixes(paths.base))
        found += [group for group, prefix in hashed if prefix in ours]
    return sorted(found, reverse=True)


def _prefixes(base: Path) -> Iterator[str]:
    for top, names, _ in os.walk(base):
        for name in RUNTIME_FOLDERS.keys() & set(names):
            directory = hashlib.sha256(os.fsencode(os.path.join(top, name))).hexdigest()[:12]
            yield f"{RUNTIME_FOLDERS[name]}{directory}-"
            names.remove(name)  # task data: large, and no runtime's


def mounts(paths: RunPaths) -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [place for line in lines if paths.names((place := line.split()[4]) + "/")]


def processes(paths: RunPaths) -> list[str]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended
            words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")  # fmt: skip
            if int(pid) != os.getpid() and paths.names(words):
                found.append(f"{pid} {words[:200]}")
    return found


def left(paths: RunPaths) -> list[str]:
    """One line for each thing left behind."""
    return [
        *(f"control group {group}" for group in groups(paths)),
        *(f"mount {mount}" for mount in mounts(paths)),
        *(f"process {process}" for process in processes(paths)),
    ]


def clear(paths: RunPaths) -> None:
    """Remove empty control groups of the run."""
    for group in groups(paths):
        with contextlib.suppress(OSError):  # a process is in it
            group.rmdir()


def left_at_the_end(paths: RunPaths) -> list[str]:
    waiting, found = threading.Event(), left(paths)
    for _ in range(ENDED_WITHIN):
        if not found:
            break
        waiting.wait(0.1)
        found = left(paths)
    return found


def run_paths(config: pytest.Config) -> RunPaths:
    base = config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    return RunPaths(base, os.path.join(tempfile.gettempdir(), engine_prefix()))


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        os.environ[RUN] = str(os.getpid())


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """After the engines have ended; in the controller of pytest-xdist only, whose workers have ended by then."""
    config = session.config
    if hasattr(config, "workerinput") or config.option.collectonly:
        return
    paths = run_paths(config)
    found = left_at_the_end(paths)
    if not found:
        return
    clear(paths)
    if terminal := config.pluginmanager.get_plugin("terminalreporter"):
        terminal.section("left on the host by this run")
        for line in found:
            terminal.write_line(line)
    if session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
