"""Output of the command line: tables, JSON, followed tasks, progress bars. Control sequences from tasks never reach a
terminal.
One file because every text of a task passes one filter on its way to the terminal.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from email.utils import parsedate_to_datetime
from itertools import zip_longest
from textwrap import indent
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO, TypeVar

import click

from gpool.core.errors import GpoolError
from gpool.core.specs import gpu
from gpool.core.terminal import TerminalText, plain

if TYPE_CHECKING:
    from gpool.client.artifacts import TransferProgress
    from gpool.client.runs import Printed, Run, TaskProgress
    from gpool.client.values import Result


_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d)")
_JSON_ESCAPED = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class LogPrinter:
    def __init__(self, *, all_to_stderr: bool = False) -> None:
        out = "stderr" if all_to_stderr else "stdout"
        self._writers: dict[str, Callable[[Printed | None], None]] = {
            "stdout": _writer(out),
            "stderr": _writer("stderr"),
        }

    def show(self, pieces: Iterable[Printed]) -> None:
        for piece in pieces:
            self._writers[piece.stream](piece)
        for write in self._writers.values():
            write(None)


def _writer(name: str) -> Callable[[Printed | None], None]:
    text: TextIO = sys.stdout if name == "stdout" else sys.stderr
    if text.isatty():
        filtered = TerminalText()

        def show(piece: Printed | None) -> None:
            text.write(filtered.flush() if piece is None else filtered.feed(piece.text))
            text.flush()

        return show
    raw: BinaryIO = text.buffer

    def pass_on(piece: Printed | None) -> None:
        if piece is not None:
            raw.write(piece.data)
        raw.flush()

    return pass_on


def emit_json(document: object) -> None:
    click.echo(_json(document))


def emit_json_list(documents: Iterable[object]) -> None:
    before = "["
    for document in documents:
        click.echo(f"{before}\n{indent(_json(document), '  ')}", nl=False)
        before = ","
    click.echo("\n]" if before == "," else "[]")


def _json(document: object) -> str:
    text = json.dumps(document, indent=2, ensure_ascii=False)
    return _JSON_ESCAPED.sub(lambda found: f"\\u{ord(found.group()):04x}", text)


COLOURS = {"failed": "red", "PROBLEM": "red", "flagged": "red", "cancelled": "yellow", "WARNING": "yellow"}  # fmt: skip
"""Colours of states, by their first word."""

NARROWEST = 15
"""Columns of a table keep this width, so that no id is folded."""


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    empty: str,
    width: int | None = None,
) -> None:
    """Print aligned columns. Cells wrap so that lines fit into `width` columns; default: the terminal's, if any."""
    cells = [[_cell(value) for value in row] for row in rows]
    if not cells:
        click.echo(empty, err=True)
        return
    if width is None and sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
    lines = [[name.upper() for name in columns], *cells]
    kept, below = _fitting(lines, width)
    widths = _narrowed(lines, kept, width)
    states = {at for at, place in enumerate(kept) if columns[place] in ("status", "")}
    for line in lines:
        shown = [line[place] for place in kept]
        wrapped = [_wrapped(value, size) for value, size in zip(shown, widths, strict=True)]
        for parts in zip_longest(*wrapped, fillvalue=""):
            text = "  ".join(
                _coloured(part, place in states and line is not lines[0])
                + " " * (widths[place] - _width(part))
                for place, part in enumerate(parts)
            ).rstrip()
            click.echo(styled(text, bold=True) if line is lines[0] else text)
        rest = [f"{columns[at]} {line[at]}" for at in below if line[at] not in ("", "-")]
        if rest and line is not lines[0]:
            for part in textwrap.wrap(" · ".join(rest), max(1, (width or 0) - 4)):
                click.echo(f"    {part}")


def _fitting(lines: list[list[str]], width: int | None) -> tuple[list[int], list[int]]:
    """Columns of the table, and those printed beneath each row since the narrowest table is still too wide.

    Columns without any value are left out first, then columns are taken from the right.
    """
    kept, below = list(range(len(lines[0]))), list[int]()

    def is_too_wide() -> bool:
        return width is not None and _total(_narrowed(lines, kept, width)) > width

    for place in reversed(kept.copy()):
        if is_too_wide() and place and all(line[place] in ("", "-") for line in lines[1:]):
            kept.remove(place)
    while is_too_wide() and len(kept) > 1:
        below.insert(0, kept.pop())
    return kept, below


def _narrowed(lines: list[list[str]], kept: list[int], width: int | None) -> list[int]:
    """Widths of columns, the widest narrowed first, none below `NARROWEST`."""
    widths = [max(_width(line[place]) for line in lines) for place in kept]
    while width is not None and _total(widths) > width:
        widest = max(range(len(widths)), key=lambda at: (widths[at], at))
        if widths[widest] <= NARROWEST:
            break
        widths[widest] -= 1
    return widths


def _total(widths: list[int]) -> int:
    return sum(widths) + 2 * (len(widths) - 1)


def _wrapped(text: str, width: int) -> list[str]:
    if _width(text) <= width:
        return [text]
    return textwrap.wrap(text, max(1, width), break_on_hyphens=False) or [""]


def _coloured(text: str, is_state: bool) -> str:
    colour = COLOURS.get(text.partition(" ")[0]) if is_state else None
    return text if colour is None else styled(text, colour=colour)


def _width(text: str) -> int:
    """Columns on a terminal: two for a wide character, none for a combining one."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)
    return len(text) + wide - sum(unicodedata.combining(letter) > 0 for letter in text)


def fields(document: Mapping[str, Any], names: Sequence[str]) -> None:
    shown = [(name, document.get(name)) for name in names]
    shown = [(name, value) for name, value in shown if value not in (None, "", [], {})]
    width = max((len(name) for name, _ in shown), default=0)
    for name, value in shown:
        click.echo(f"{name.ljust(width)}  {_coloured(_cell(value), name == 'status')}")


def show(document: Mapping[str, Any], as_json: bool, names: str) -> None:
    if as_json:
        emit_json(document)
    else:
        fields(document, names.split())


def _cell(value: object) -> str:
    text = (
        " ".join(map(str, value))
        if isinstance(value, list)
        else str("" if value is None else value)
    )
    if _TIME.fullmatch(text):
        return local_time(text)
    return plain(text.replace("\n", " "))


def styled(text: str, *, bold: bool = False, colour: str | None = None) -> str:
    import os

    if os.environ.get("NO_COLOR"):
        return text
    return click.style(text, bold=bold or None, fg=colour)


def age(created_at: str, server_date: str | None) -> str:
    if server_date is None:
        return created_at
    now = parsedate_to_datetime(server_date)
    passed = max(0, int((now - datetime.fromisoformat(created_at)).total_seconds()))
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if passed >= size:
            return f"{passed // size}{unit}"
    return f"{passed}s"


def duration(task: Mapping[str, Any], server_date: str | None) -> str:
    """Run time of a task so far, e.g. 35s or 1h02m; `-` before its start."""
    started, ended = task.get("started_at"), task.get("finished_at")
    if not started or (not ended and server_date is None):
        return "-"
    end = datetime.fromisoformat(ended) if ended else parsedate_to_datetime(server_date or "")
    return brief_time((end - datetime.fromisoformat(started)).total_seconds())


def brief_time(seconds: float) -> str:
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}m{rest:02}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m"


def local_time(at: str, server_date: str | None = None) -> str:
    """Omit today's date; show seconds within ten minutes of now."""
    then = datetime.fromisoformat(at).astimezone()
    if server_date is None:
        return then.strftime("%Y-%m-%d %H:%M:%S")
    now = parsedate_to_datetime(server_date).astimezone()
    if then.date() != now.date():
        return then.strftime("%Y-%m-%d %H:%M")
    soon = abs((then - now).total_seconds()) < 600
    return then.strftime("%H:%M:%S" if soon else "%H:%M")


def gib(size_bytes: int) -> str:
    return gpu.gib(size_bytes) if size_bytes else "-"


SHARE = "its GPUs' share of the node"


def cost_fields(task: dict[str, Any]) -> dict[str, str]:
    """Cap, cost and reservation of a task, as far as it has them."""
    from gpool.core.money.transfers import format_credits

    found = {}
    if (cap := task.get("max_cost_microcredits")) is not None:
        found["max_cost"] = format_credits(cap)
    if (cost := task.get("cost_microcredits")) is not None:
        found["cost"] = format_credits(cost)
        if reserved := task.get("reserved_microcredits"):
            found["cost"] += f" ({format_credits(reserved)} more set aside)"
    return found


def sibling_fields(task: dict[str, Any]) -> dict[str, str | None]:
    """Siblings of a verified task in words."""
    found = task.get("verification")
    if found is None:
        return {"verification": None}
    names = ("waiting", "running", "answered", "agreed", "differed", "no_answer")
    counts = [f"{found[name]} {name.replace('_', ' ')}" for name in names if found.get(name)]
    parts = [found["outcome"].replace("_", " "), *counts]
    if found.get("rerun"):
        parts.append(f"its node was caught; run again as {found['rerun']}")
    return {"verification": ", ".join(parts)}


def granted_fields(task: dict[str, Any]) -> dict[str, str]:
    """CPUs, memory and GPUs of a task in words: its GPUs' share of the node unless it asked for an amount."""
    shares, found = task.get("shares") or (), {}
    granted, size = task.get("granted_cpus"), task.get("granted_memory_bytes")
    if "cpus" in shares:
        found["cpus"] = SHARE if granted is None else f"{granted:g} ({SHARE})"
    if "memory" in shares:
        found["memory"] = SHARE if size is None else f"{gib(size)} ({SHARE})"
    if indexes := [str(part["index"]) for part in task.get("slices") or ()]:
        near = f" ({task['closeness']})" if task.get("closeness") else ""
        found["gpu_indexes"] = ", ".join(indexes) + near
    return found


T = TypeVar("T")

DOING = {
    "queued": "waiting for a node…",
    "fetch": "fetching the inputs…",
    "build": "building the environment…",
    "start": "starting the sandbox…",
    "collect": "collecting the outputs…",
}
"""Message for a phase or status; other phases and statuses have none."""


def on_stderr(line: str) -> None:
    click.echo(line, err=True)


HOME_AND_CLEAR = "\x1b[H\x1b[2J"


def watch(
    refresh: Callable[[], Callable[[], None]], every_s: float, pause: Callable[[float], object]
) -> None:
    """Print again and again until Ctrl-C: `refresh` fetches, what it returns prints. A terminal is cleared between."""
    on_terminal = sys.stdout.isatty()
    while True:
        show = refresh()
        if on_terminal:
            click.echo(HOME_AND_CLEAR, nl=False)
        show()
        if on_terminal:
            click.echo(styled(f"every {every_s:g}s; Ctrl-C ends", colour="cyan"), err=True)
        pause(every_s)


class ProgressLine:
    """Prints phases on a terminal (`phases`), and the reason for a long wait anywhere: the task may never start."""

    def __init__(
        self,
        print_line: Callable[[str], None] = on_stderr,
        run: Run | None = None,
        *,
        phases: bool = True,
    ) -> None:
        self._print, self._run, self._phases = print_line, run, phases
        self._seen: TaskProgress | None = None
        self._last = ""
        self._is_explained = False

    def __call__(self, progress: TaskProgress) -> None:
        if progress == self._seen:  # unchanged
            if progress.status == "queued":
                self._explain()
            return
        self._seen, self._is_explained = progress, False
        message = DOING.get(progress.phase or progress.status, "")
        if progress.status == "queued" and progress.epoch:
            message = "waiting for a node again…"
        if message and message != self._last and self._phases:
            self._print(styled(f"gpool: {message}", colour="cyan"))
        self._last = message

    def _explain(self) -> None:
        if self._run is None or self._is_explained:
            return
        try:
            sentence = self._run.explain()
        except GpoolError:  # not essential; the task is still followed
            return
        self._is_explained = True
        self._print(
            f"gpool: waiting. {plain(sentence)}\n"
            f"  For the expected start and alternatives: gpool explain {self._run.id}"
        )


def show_output(pieces: Iterator[Printed | str], *, quiet: bool) -> None:
    """Messages (`str`) go to standard error."""
    LogPrinter(all_to_stderr=quiet).show(_without_messages(pieces))


def show_documents(pieces: Iterator[dict[str, Any] | str]) -> None:
    """Print one JSON list as documents arrive, closed even after Ctrl-C."""
    emit_json_list(_without_messages(pieces))


def _without_messages(pieces: Iterator[T | str]) -> Iterator[T]:
    for one in pieces:
        if isinstance(one, str):
            on_stderr(one)
        else:
            yield one


def print_outcome(result: Result, *, code_too: bool = False, shown: str = "") -> None:
    """Print why a task did not succeed; an error text that ends the output `shown` is not repeated."""
    from gpool.client.values import failure

    text = result.error_text.strip()
    if text and text.splitlines()[-1] in shown:
        import msgspec

        result = msgspec.structs.replace(result, error_text="its output says why")
    if result.status != "succeeded" and (code_too or result.reason != "exited"):
        click.echo(f"gpool: {plain(failure(result).detail)}", err=True)


@contextmanager
def progress_bar() -> Iterator[TransferProgress | None]:
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TaskID,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    bars = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
        console=Console(stderr=True),
        transient=True,
    )
    known: dict[str, TaskID] = {}
    ended: dict[str, int] = {}

    def show(path: str, done: int, total: int) -> None:
        if not known:  # no bars if nothing is transferred
            bars.start()
            known[""] = bars.add_task("", total=None, visible=False)
        if done < total and path not in known:
            known[path] = bars.add_task(path, total=total)
        if done < total:
            bars.update(known[path], completed=done)
            return
        ended[path] = total
        if path in known:
            bars.remove_task(known.pop(path))
        summary = f"{len(ended)} files"
        bars.update(
            known[""], description=summary, completed=sum(ended.values()), visible=len(ended) > 1
        )

    try:
        yield show
    finally:
        bars.stop()
