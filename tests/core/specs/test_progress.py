"""Progress as tasks and nodes report it: whatever they send, a fraction from 0 to 1 and a short printable text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.core.model import Instant
from gpool.core.specs.progress import (
    WHOLE,
    StoredProgress,
    checked,
    from_stored,
    millionths,
    parsed,
    stored_text,
)


@given(st.binary(max_size=6000))
def test_any_file_is_no_progress_or_one_within_limits(data: bytes) -> None:
    found = parsed(data)
    if found is not None:
        value, text = found
        assert 0 <= value <= WHOLE
        assert len(text) <= 200
        assert text.isprintable()


@given(st.integers(), st.text(max_size=400), st.integers(0, 9), st.integers(0, 1 << 60))
def test_what_is_stored_is_read_back(value: int, text: str, epoch: int, at: int) -> None:
    progress = StoredProgress(
        epoch, *checked(value, text)[:1], Instant(at), checked(value, text)[1]
    )
    assert from_stored(stored_text(progress)) == progress


@given(st.floats())
def test_any_number_is_a_fraction(fraction: float) -> None:
    assert 0 <= millionths(fraction) <= WHOLE


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"0.4 epoch 4", (400_000, "epoch 4")),
        (b"0.1 one\n0.25 two\n\n", (250_000, "two")),
        (b"40% epoch 4\n", (400_000, "epoch 4")),
        (b"1", (WHOLE, "")),
        (b"7 past the end", (WHOLE, "past the end")),
        (b"-3", (0, "")),
        (b"0.5 \x1b[2J\xe2\x80\xaex", (500_000, "\ufffd[2J\ufffdx")),
        (b"", None),
        (b"nan", None),
        (b"inf", None),
        (b"epoch 4", None),
        (b"9" * 5000, (WHOLE, "")),
        (b'{"fraction": 0.4}', None),
    ],
)
def test_the_last_line_of_a_file_counts(data: bytes, found: tuple[int, str] | None) -> None:
    assert parsed(data) == found
