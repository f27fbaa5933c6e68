"""Times and durations as `--by`, `--from`, `--to` and `by=` parse them."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest

from gpool.client.times import due, due_at, moment
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
def test_a_time_of_day_is_the_next_one_and_a_date_is_exact(text: str, meant: str) -> None:
    assert due_at(text, NOON).isoformat() == meant


@pytest.mark.parametrize("text", ["noon", "25:00", "", "2026-13-01T00:00"])
def test_a_malformed_time_is_refused(text: str) -> None:
    with pytest.raises(Invalid, match="not a time"):
        due_at(text, NOON)


def test_a_date_uses_the_utc_offset_of_that_day() -> None:
    """In Berlin summer is two hours ahead of UTC and winter one, whenever that is said."""
    said = "from gpool.client.times import moment\n"
    said += "for month in (1, 7): print(moment(f'2030-0{month}-01T09:00').isoformat())"
    zone = {"TZ": "CET-1CEST,M3.5.0,M10.5.0/3", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", said], env=zone, capture_output=True, check=True)
    assert done.stdout.split() == [b"2030-01-01T09:00:00+01:00", b"2030-07-01T09:00:00+02:00"]


def test_a_duration_ignores_changes_of_daylight_saving_time() -> None:
    """In Berlin at 01:00 UTC: in March two hours are two, in October too, and a time shown twice is the one to come."""
    said = "from datetime import datetime\nfrom gpool.client.times import moment\n"
    said += "for begins, text in (('2026-03-29T00:30', '2h'), ('2026-10-25T00:30', '2h'), ('2026-10-25T01:30', '10m'), "
    said += "('2026-10-25T01:30', '02:45')):\n"
    said += "    begins = datetime.fromisoformat(begins + '+00:00')\n"
    said += "    print(int((moment(text, begins) - begins).total_seconds()) // 60)"
    zone = {"TZ": "CET-1CEST,M3.5.0,M10.5.0/3", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", said], env=zone, capture_output=True, check=True)
    assert done.stdout.split() == [b"120", b"120", b"10", b"15"]


@pytest.mark.parametrize(
    ("text", "meant"),
    [("2h", "2026-11-15T14:00:00+00:00"), ("1d12h", "2026-11-17T00:00:00+00:00")],
)
def test_a_duration_counts_from_now(text: str, meant: str) -> None:
    assert due_at(text, NOON).isoformat() == meant


def test_an_end_time_of_day_is_the_first_one_after_the_start() -> None:
    begins = moment("2030-07-01T22:00")
    assert moment("18:00", begins) - begins == timedelta(hours=20)
    assert moment("90m", begins) - begins == timedelta(minutes=90)


def test_a_time_in_the_past_is_refused() -> None:
    with pytest.raises(Invalid, match="is in the past"):
        due("2001-01-01T00:00")
