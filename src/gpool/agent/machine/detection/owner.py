"""Facts for the owner's policy: battery, last input, load of other programs. Reads only."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path

from gpool.agent.machine.policy import MachineFacts

SUPPLIES = Path("/sys/class/power_supply")
DEV = Path("/dev")
PROC = Path("/proc")
ASK_S = 2.0
SHORTEST_S = 1.0  # processor time is counted in hundredths of a second: shorter is inexact


def power(supplies: Path = SUPPLIES) -> tuple[float | None, bool | None]:
    """Return (battery in percent, on mains); None for a missing or unreported value."""
    battery: float | None = None
    mains: bool | None = None
    discharging = False
    for supply in sorted(supplies.iterdir()) if supplies.is_dir() else ():
        kind = _word(supply / "type")
        if kind == "Mains" or kind.startswith("USB"):
            if (online := _word(supply / "online")) and (kind == "Mains" or online == "1"):
                mains = bool(mains) or online == "1"
        elif kind == "Battery" and _word(supply / "scope") != "Device":  # not a mouse's
            with contextlib.suppress(ValueError):
                level = float(_word(supply / "capacity"))
                battery = level if battery is None else min(battery, level)
            discharging = discharging or _word(supply / "status") == "Discharging"
    if mains is None and battery is not None:
        mains = not discharging
    return battery, mains


def idle_s(now_s: float, dev: Path = DEV, sessions: str | None = None) -> float | None:
    """Seconds since the last input at a terminal or graphical login; None if there is neither.

    `sessions`: logind's KEY=value blocks (`ask_logind`).
    """
    found: list[float] = []
    for terminal in (*dev.glob("pts/[0-9]*"), *dev.glob("tty[0-9]*")):
        with contextlib.suppress(OSError):
            facts = terminal.stat()
            if facts.st_uid != 0 or terminal.parent.name == "pts":  # an unused console is root's
                found.append(max(0.0, now_s - facts.st_atime))
    for block in (sessions or "").split("\n\n"):
        properties = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if properties.get("Class") != "user" or properties.get("Type") not in (
            "x11",
            "wayland",
            "mir",
        ):
            continue
        if properties.get("IdleHint") == "no":
            found.append(0.0)
        elif properties.get("IdleSinceHint", "").isdecimal():
            found.append(max(0.0, now_s - int(properties["IdleSinceHint"]) / 1_000_000))
    return min(found, default=None)


def ask_logind() -> str | None:
    asked = shutil.which("loginctl")
    if asked is None or not Path("/run/systemd/seats").is_dir():
        return None
    try:
        listed = _answer([asked, "list-sessions", "--no-legend", "--no-pager"])
        ids = [line.split()[0] for line in listed.splitlines() if line.split()]
        wanted = ["-p", "Class", "-p", "Type", "-p", "IdleHint", "-p", "IdleSinceHint"]
        return _answer([asked, "show-session", *ids, *wanted]) if ids else None
    except (OSError, subprocess.SubprocessError):
        return None


def _answer(argv: list[str]) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=ASK_S)
    return done.stdout


class LoadMeter:
    def __init__(self, own: int, proc: Path = PROC) -> None:
        self._own = own
        self._proc = proc
        self._before: tuple[float, Mapping[int, int]] | None = None

    def measure(self, now_s: float) -> float | None:
        """Return busy processors since the last call; None for the first call and within `SHORTEST_S`."""
        parents: dict[int, int] = {}
        spent: dict[int, int] = {}
        for name in os.listdir(self._proc):
            if name.isdecimal():
                with contextlib.suppress(OSError, ValueError, IndexError):
                    words = (self._proc / name / "stat").read_text().rpartition(")")[2].split()
                    parents[int(name)] = int(words[1])
                    spent[int(name)] = int(words[11]) + int(words[12])
        ours = _below(self._own, parents)
        others = {pid: ticks for pid, ticks in spent.items() if pid not in ours}
        before = self._before
        if before is None:
            self._before = (now_s, others)
            return None
        if now_s < before[0] + SHORTEST_S:
            return None
        self._before = (now_s, others)
        ticks = sum(max(0, now - before[1][pid]) for pid, now in others.items() if pid in before[1])
        return ticks / os.sysconf("SC_CLK_TCK") / (now_s - before[0])


def _below(top: int, parents: Mapping[int, int]) -> set[int]:
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found, wave = {top}, [top]
    while wave:
        wave = [child for pid in wave for child in children.get(pid, ()) if child not in found]
        found.update(wave)
    return found


def facts_now(
    now: datetime, meter: LoadMeter, logind: Callable[[], str | None] = ask_logind
) -> MachineFacts:
    battery, mains = power()
    idle = idle_s(now.timestamp(), sessions=logind())
    return MachineFacts(now, battery, mains, idle, meter.measure(now.timestamp()))


def _word(path: Path) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text().strip()
    return ""
