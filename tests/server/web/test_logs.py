"""Output as HTML: colours are spans, everything else of a terminal is gone, and no text becomes markup."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.server.web.logs import LogText

ESC = "\x1b"
_SPAN = re.compile(r'<span class="[a-z0-9 ]+">|</span>')


def html(*pieces: str) -> str:
    log = LogText()
    return "".join(log.feed(piece) for piece in pieces)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        (f"{ESC}[31mred{ESC}[0m", '<span class="c1">red</span>'),
        (f"{ESC}[1;32mgood{ESC}[m.", '<span class="b c2">good</span>.'),
        (f"{ESC}[38;5;196mmany{ESC}[39m", "many"),
        (f"{ESC}[38;2;1;2;31mrgb", "rgb"),
        (f"{ESC}]8;;https://evil.example{ESC}\\link{ESC}]8;;{ESC}\\", "link"),
        (f"{ESC}]52;c;ZXZpbA==\x07x", "x"),
        (f"{ESC}[2J{ESC}[Hx", "x"),
        (f"{ESC}(0x", "x"),
        ("10 %\r50 %\r100 %\ndone", "100 %\ndone"),
        ("a\r\nb", "a\nb"),
        ("<b>&", "&lt;b&gt;&amp;"),
        ("\u202eexe", "&lt;U+202E&gt;exe"),
        ("bell\x07", "bell\u2407"),
    ],
)
def test_output_is_shown_as_text_with_colours(text: str, shown: str) -> None:
    assert html(text) == shown


def test_a_sequence_may_be_split_anywhere() -> None:
    text = f"a{ESC}[31mred{ESC}[0m{ESC}]8;;https://evil.example\x07b"
    whole = _SPAN.sub("", html(text))
    for place in range(len(text)):
        assert _SPAN.sub("", html(text[:place], text[place:])) == whole == "aredb"


@given(st.lists(st.text(st.sampled_from("\x1b[]0;13mPX\\\x07<>&\"'\r\nab\u202e\x9b")), max_size=4))
def test_no_output_becomes_markup_or_a_control_sequence(pieces: list[str]) -> None:
    shown = _SPAN.sub("", html(*pieces))
    assert "<" not in shown
    assert not set(shown) & {"\x1b", "\x07", "\x9b", "\u202e", "\r", '"'}
