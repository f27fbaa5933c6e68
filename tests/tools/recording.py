"""Recording of a terminal session for README.md: `python -m tests.tools.recording FILE.svg`, as `make recording` calls it.

Types commands into a real shell under tmux, beside a pool with simulated GPUs in a temporary home, and captures the
screen ten times a second. The SVG repeats the captured screens with their timing (SMIL), without script or font files.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import click

COLUMNS, ROWS = 100, 24
FRAME_S = 0.1
KEYS = 4
"""Keys of one frame."""
READ_S = 2.2
"""Pause after each command, for the reader."""
END_S = 2.0
LIMIT_S = 60.0
PAUSE = threading.Event()
"""Never set: the screen is a program's, which signals nothing."""
PROMPT = "$ "
CELL_W, CELL_H, PAD = 8.4, 18, 14
COLOURS = ("#484f58", "#ff7b72", "#3fb950", "#d29922", "#58a6ff", "#bc8cff", "#39c5cf", "#e6edf3")

PROGRAM = """import gpool

@gpool.task(gpu="24GB")
def square(n):
    return n * n

print(sum(square.map(range(1000))))
"""
COMMANDS = (
    "gpool up --simulate-gpus H100:2,L4 > up.log 2>&1 &",
    "gpool gpus",
    "gpool run --gpu 24GB -- python3 -c 'print(6*7)'",
    "cat squares.py",
    "python squares.py",
    "gpool ps",
)

Line = tuple[tuple[str, str], ...]
"""Runs of one style: CSS of the run, text."""


@dataclass(slots=True)
class Recording:
    """Lines of the screen with the time at which each was shown, in seconds of the recording."""

    shown: list[tuple[int, Line, float, float]] = field(default_factory=list)
    length_s: float = 0.0
    _open: dict[int, tuple[Line, float]] = field(default_factory=dict)

    def add(self, screen: list[Line], at: float) -> None:
        rows = dict(enumerate(screen))
        for row, (line, since) in list(self._open.items()):
            if rows.get(row) != line:
                self.shown.append((row, line, since, at))
                del self._open[row]
        for row, line in rows.items():
            if line and row not in self._open:
                self._open[row] = (line, at)
        self.length_s = at

    def close(self) -> None:
        self.add([], self.length_s + END_S)


class Terminal:
    """Shell in tmux, on a socket of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._socket = str(folder / "tmux")
        (folder / "squares.py").write_text(PROGRAM)
        home = folder / "home"
        home.mkdir()
        programs = Path(sys.executable).parent
        start = folder / "bashrc"  # bash takes no PS1 from the environment of root
        start.write_text(f"PS1='{PROMPT}'\nexport HOME='{home}' PATH='{programs}':$PATH\n")
        shell = f"exec bash --noprofile --rcfile '{start}'"
        size = ["-x", str(COLUMNS), "-y", str(ROWS)]
        self._tmux("-f", os.devnull, "new-session", "-d", *size, "-c", str(folder), shell)

    def _tmux(self, *words: str) -> str:
        done = subprocess.run(
            ["tmux", "-S", self._socket, *words], check=True, capture_output=True, text=True
        )
        return done.stdout

    def press(self, keys: str) -> None:
        self._tmux("send-keys", "-l", "--", keys)

    def enter(self) -> None:
        self._tmux("send-keys", "Enter")

    def screen(self) -> list[Line]:
        captured = self._tmux("capture-pane", "-p", "-e")
        return [tuple(_runs(line)) for line in captured.splitlines()]

    def is_waiting(self) -> bool:
        """Whether the last line is an empty prompt."""
        lines = self._tmux("capture-pane", "-p").rstrip().splitlines()
        return bool(lines) and lines[-1] == PROMPT.rstrip()

    def close(self) -> None:
        """End the pool, then the shell."""
        self._tmux("send-keys", "C-c", "")
        self._tmux("send-keys", "-l", "--", "kill %1; wait; exit")
        self.enter()
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            found = subprocess.run(
                ["tmux", "-S", self._socket, "has-session"], capture_output=True, check=False
            )
            if found.returncode:
                return
            PAUSE.wait(FRAME_S)
        raise TimeoutError("the shell of the recording did not end")


def _runs(line: str) -> Iterator[tuple[str, str]]:
    """Runs of a line captured with SGR sequences."""
    style: dict[str, str] = {}
    for part in re.split(r"(\x1b\[[\d;]*m)", line.rstrip()):
        if not part.startswith("\x1b"):
            if part:
                yield ";".join(f"{name}:{value}" for name, value in style.items()), part
            continue
        for code in (int(word or 0) for word in part[2:-1].split(";")):
            if code == 0:
                style.clear()
            elif code == 1:
                style["font-weight"] = "bold"
            elif code == 2:
                style["opacity"] = ".6"
            elif 30 <= code <= 37:
                style["fill"] = COLOURS[code - 30]
            elif 90 <= code <= 97:
                style["fill"] = COLOURS[code - 90]
            elif code == 39:
                style.pop("fill", None)


def recorded(folder: Path) -> Recording:
    """Play the commands and record the screen."""
    terminal, recording = Terminal(folder), Recording()
    began = time.monotonic()

    def watch(seconds: float) -> None:
        until = time.monotonic() + seconds
        while True:
            recording.add(terminal.screen(), time.monotonic() - began)
            if time.monotonic() >= until:
                return
            PAUSE.wait(FRAME_S)

    try:
        while not terminal.is_waiting():
            PAUSE.wait(FRAME_S)
        began = time.monotonic()
        watch(0.3)
        for command in COMMANDS:
            for at in range(0, len(command), KEYS):
                terminal.press(command[at : at + KEYS])
                watch(0)
            terminal.enter()
            deadline = time.monotonic() + LIMIT_S
            watch(FRAME_S)
            while not terminal.is_waiting() or not _is_up(folder):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"'{command}' did not end")
                watch(FRAME_S)
            watch(READ_S)
    finally:
        terminal.close()
    recording.close()
    return recording


def _is_up(folder: Path) -> bool:
    log = folder / "up.log"
    return log.exists() and "gpool is up" in log.read_text()


def svg(recording: Recording) -> str:
    """Draw a picture that plays the recording again and again."""
    width, height = COLUMNS * CELL_W + 2 * PAD, ROWS * CELL_H + 2 * PAD
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" '
        f'font-family="ui-monospace,SFMono-Regular,Menlo,Consolas,monospace" font-size="14" fill="#c9d1d9">',
        "<title>A terminal: a pool starts, runs a command on a GPU and maps a Python function</title>",
        f'<rect width="100%" height="100%" rx="8" fill="#0d1117"><animate id="t" attributeName="y" '
        f'from="0" to="0" begin="0s;t.end" dur="{recording.length_s:.2f}s"/></rect>',
    ]
    for row, line, since, until in recording.shown:
        y, x = PAD + (row + 0.75) * CELL_H, PAD
        runs = "".join(
            f'<tspan style="{style}">{escape(text)}</tspan>' if style else escape(text)
            for style, text in line
        )
        columns = sum(len(text) for _, text in line)
        parts.append(
            f'<text x="{x}" y="{y:.1f}" textLength="{columns * CELL_W:.1f}" xml:space="preserve" visibility="hidden">'
            f'<set attributeName="visibility" to="visible" begin="t.begin+{since:.2f}s" '
            f'dur="{max(until - since, 0.01):.2f}s"/>{runs}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    if shutil.which("tmux") is None:
        raise SystemExit("the recording needs tmux: apt-get install tmux")
    with tempfile.TemporaryDirectory(prefix="gpool-recording-") as folder:
        recording = recorded(Path(folder))
    file = Path(sys.argv[1])
    file.write_text(svg(recording), encoding="utf-8")
    click.echo(f"{file}: {recording.length_s:.1f} s, {file.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
