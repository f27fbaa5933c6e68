"""Filters for text that reaches a terminal and was written by others: output of tasks, errors of nodes, names.

Depends on nothing. Values that a function returns are data and are not filtered.
"""

from __future__ import annotations

import re

_ALLOWED = re.compile(r"\x1b\[[0-9;:]{0,32}m")
_UNFINISHED = re.compile(r"\x1b(?:\[[0-9;:]{0,32})?\Z")
_CONTROLS = re.compile(
    r"\x1b\[[0-9;:]{0,32}m|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f"
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"
)  # the last line: separators and marks that change the direction of what follows
_DIRECTION = (0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))


class TerminalText:
    """Filters a task's output: colours, tabs and line ends pass, other control and direction characters are shown.

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
    """Keep colours, tabs, carriage returns and line ends; show other control characters."""
    return _CONTROLS.sub(_shown, text.encode("utf-8", "replace").decode())


def plain(text: str) -> str:
    """Make untrusted text safe in a message: no colours, no overwriting, no change of direction.

    Line ends and tabs stay. The result has as many characters as the text, so its memory is bounded.
    """
    return text if text.isprintable() else text.translate(_PLAIN_FORMS)


def printable(text: str) -> str:
    """First 200 letters of a name that others chose; no line end, no control character."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text[:200])


def _shown(match: re.Match[str]) -> str:
    found = match.group()
    if _ALLOWED.fullmatch(found):
        return found
    code = ord(found)
    return f"<U+{code:04X}>" if code > 0x9F else chr(_control_picture(code))


def _control_picture(code: int) -> int:
    if code > 0x7F:
        return 0xFFFD
    return 0x2421 if code == 0x7F else 0x2400 + code


_PLAIN_FORMS: dict[int, int] = {
    **dict.fromkeys(range(0xD800, 0xE000), ord("?")),  # no terminal can show a lone surrogate
    **dict.fromkeys(_DIRECTION, 0xFFFD),
    **{code: _control_picture(code) for code in (*range(0x20), *range(0x7F, 0xA0))},
    ord("\r"): ord(" "),
}
del _PLAIN_FORMS[ord("\n")], _PLAIN_FORMS[ord("\t")]
