"""Tables, JSON and output of tasks; control sequences from tasks never reach a terminal."""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from email.utils import parsedate_to_datetime
from textwrap import indent
from typing import Any, BinaryIO, TextIO

import click

from gpool.client.logs import Printed
from gpool.core.specs import gpu

_ALLOWED = re.compile(r"\x1b\[[0-9;:]{0,32}m")
_UNFINISHED = re.compile(r"\x1b(?:\[[0-9;:]{0,32})?\Z")
_CONTROLS = re.compile(r"\x1b\[[0-9;:]{0,32}m|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_JSON_ESCAPED = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_DIRECTION = re.compile(
    "[\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"
)  # line separators and direction marks


class TerminalText:
    """Filters a task's output: colours, tabs and line ends pass, other control characters are shown.

    A sequence split by the stream is joined first.
    """

    def __init__(self) -> None:
        self._held = ""

    def feed(self, text: str) -> str:
        text = self._held + text
        cut = _UNFINISHED.search(text)
        self._held = cut.group() if cut else ""
        return neutral(text[: cut.start()] if cut else text)

    def flush(self) -> str:
        held, self._held = self._held, ""
        return neutral(held)


def neutral(text: str) -> str:
    return _CONTROLS.sub(_shown, text.encode("utf-8", "replace").decode())


def plain(text: str) -> str:
    """Make untrusted text safe in a message: no colours, no overwriting, no change of direction."""
    return neutral(_DIRECTION.sub("\ufffd", text.replace("\r", " ").replace("\x1b", "\u241b")))


def _shown(match: re.Match[str]) -> str:
    found = match.group()
    if _ALLOWED.fullmatch(found):
        return found
    code = ord(found)
    return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else "\ufffd"


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


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], empty: str) -> None:
    cells = [[_cell(value) for value in row] for row in rows]
    if not cells:
        click.echo(empty, err=True)
        return
    lines = [[name.upper() for name in columns], *cells]
    widths = [max(map(_width, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        padded = (
            value + " " * (width - _width(value)) for value, width in zip(line, widths, strict=True)
        )
        text = "  ".join(padded).rstrip()
        click.echo(styled(text, bold=True) if line is lines[0] else text)


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
        click.echo(f"{name.ljust(width)}  {_cell(value)}")


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
    return plain(text.replace("\n", " "))


def styled(text: str, *, bold: bool = False, colour: str | None = None) -> str:
    import os

    if os.environ.get("NO_COLOR"):
        return text
    return click.style(text, bold=bold, fg=colour)


def age(created_at: str, server_date: str | None) -> str:
    if server_date is None:
        return created_at
    now = parsedate_to_datetime(server_date)
    passed = max(0, int((now - datetime.fromisoformat(created_at)).total_seconds()))
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if passed >= size:
            return f"{passed // size}{unit}"
    return f"{passed}s"


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
