"""Output of tasks as HTML: colours become spans with classes, all other control sequences are removed. Pure.

Text is escaped before anything is added to it, so that no output becomes markup. A sequence that is split between two
pieces of output is joined first.
"""

from __future__ import annotations

import re

from markupsafe import Markup, escape

from gpool.core.terminal import neutral

MAX_HELD = 4096
"""Longest unfinished sequence that is kept; a longer one is output like any other text."""

_SGR = re.compile(r"\x1b\[([0-9;]{0,32})m")
_OTHERS = re.compile(
    r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # OSC: titles, links (8), the clipboard (52)
    r"|\x1b[PX^_][^\x1b]*\x1b\\"  # DCS and other strings
    r"|\x1b\[[0-?]*[ -/]*[@-ln-~]"  # CSI but colours
    r"|\x1b\[[<-?][0-?]*[ -/]*m"  # private sequences that end like colours
    r"|\x1b[ -/]*[0-OQ-WYZ\\`-~]"  # others of two characters
    r"|\x9d[^\x07\x9c]*(?:\x07|\x9c)"
)
_UNFINISHED = re.compile(
    r"\x1b(?:\][^\x07\x1b]*\x1b?|[PX^_][^\x1b]*\x1b?|\[[0-?]*[ -/]*|[ -/]*)?\Z"
)
_STYLES = {1: "b", 2: "k", 3: "i", 4: "n"}


class LogText:
    """Renders the output of one stream, piece by piece."""

    def __init__(self) -> None:
        self._held = ""
        self._classes: tuple[str, ...] = ()

    def feed(self, text: str, *, is_error: bool = False) -> Markup:
        text = self._held + text
        cut = _UNFINISHED.search(text)
        is_held = cut is not None and len(cut.group()) <= MAX_HELD
        self._held = cut.group() if cut is not None and is_held else ""
        if cut is not None and is_held:
            text = text[: cut.start()]
        return self._rendered(_one_line_each(_OTHERS.sub("", text)), is_error)

    def _rendered(self, text: str, is_error: bool) -> Markup:
        found = []
        place = 0
        for match in _SGR.finditer(text):
            found.append(self._span(text[place : match.start()], is_error))
            self._classes = _after(self._classes, match[1])
            place = match.end()
        found.append(self._span(text[place:], is_error))
        return Markup("").join(found)

    def _span(self, text: str, is_error: bool) -> Markup:
        classes = (*self._classes, *(("err",) if is_error else ()))
        shown = escape(neutral(text))
        if not shown or not classes:
            return shown
        return Markup('<span class="{}">{}</span>').format(" ".join(classes), shown)


def _one_line_each(text: str) -> str:
    """Progress bars overwrite their line: its last state is kept."""
    if "\r" not in text:
        return text
    lines = text.replace("\r\n", "\n").split("\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)


def _after(classes: tuple[str, ...], codes: str) -> tuple[str, ...]:
    found = list(classes)
    numbers = [int(code) if code else 0 for code in codes.split(";")]
    place = 0
    while place < len(numbers):
        code = numbers[place]
        if code == 0:
            found = []
        elif code in _STYLES and _STYLES[code] not in found:
            found.append(_STYLES[code])
        elif code == 22:
            found = [name for name in found if name not in ("b", "k")]
        elif 30 <= code <= 37 or 90 <= code <= 97:
            found = [name for name in found if name[0] != "c"] + [f"c{code % 10}"]
        elif code == 39:
            found = [name for name in found if name[0] != "c"]
        elif code in (38, 48):  # 256 colours or RGB: its arguments are no codes of their own
            place += 2 if numbers[place + 1 : place + 2] == [5] else 4
        place += 1
    return tuple(found)
