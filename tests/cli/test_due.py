"""What `--by` understands."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from gpool.cli.due import due_at
from gpool.core.errors import Invalid

NOON = datetime(2026, 11, 15, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("18:00", "2026-11-15T18:00:00+00:00"),
        ("9:30", "2026-11-16T09:30:00+00:00"),
        ("2026-12-01T08:00", "2026-12-01T08:00:00+00:00"),
        ("2026-12-01T08:00+02:00", "2026-12-01T08:00:00+02:00"),
    ],
)
def test_a_time_of_day_is_the_next_and_a_date_is_itself(text: str, meant: str) -> None:
    assert due_at(text, NOON).isoformat() == meant


@pytest.mark.parametrize("text", ["noon", "25:00", "", "2026-13-01T00:00"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(Invalid, match="no time"):
        due_at(text, NOON)
