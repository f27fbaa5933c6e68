"""Durations (`90s`, `2h`, `1h30m`, seconds) and due times (`18:00`, `2h` from now, an ISO date) as users write them.

A time without a zone is in the caller's own.
"""

from __future__ import annotations

import math
import re
import time
from datetime import datetime, timedelta, timezone

from gpool.core.errors import Invalid

_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?[smhd])+")
_PART = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_FORMS = "write 18:00, 2026-11-15T18:00, or 2h for in two hours"


def is_duration(text: str) -> bool:
    """False for a bare number."""
    return _DURATION.fullmatch(text.strip().lower()) is not None


def seconds(duration: str | float, *, zero: bool = False) -> float:
    """Parse `90`, `"90"`, `"90s"`, `"2h"` or `"1h30m"`; `Invalid` otherwise, and for 0 unless `zero`."""
    if isinstance(duration, int | float):
        found = float(duration)
    else:
        text = duration.strip().lower()
        if text.replace(".", "", 1).isdecimal():
            found = float(text)
        elif _DURATION.fullmatch(text):
            found = sum(float(count) * _UNIT_S[unit] for count, unit in _PART.findall(text))
        else:
            raise Invalid(
                f"{duration!r} is not a duration; write 90s, 45m, 2h, 1h30m, 30d or seconds"
            )
    if not math.isfinite(found):
        raise Invalid("the duration is infinite; write 90s, 45m, 2h, 1h30m or seconds")
    if found < 0 or (found == 0 and not zero):
        raise Invalid(f"the duration {duration!r} is not above zero")
    return found


def due_at(text: str, now: datetime) -> datetime:
    """`Invalid` if malformed. If `now` has no zone, a time without one gets none."""
    try:
        if is_duration(text):
            return now + timedelta(seconds=seconds(text))
        if len(text) <= 5:
            hour, _, minute = text.partition(":")
            today = now.replace(hour=int(hour), minute=int(minute), second=0, microsecond=0)
            return today if today > now else today + timedelta(days=1)
        given = datetime.fromisoformat(text)
    except (ValueError, OverflowError) as error:
        raise Invalid(f"{text!r} is not a time; {_FORMS}") from error
    return given if given.tzinfo is not None else given.replace(tzinfo=now.tzinfo)


def moment(text: str, after: datetime | None = None) -> datetime:
    """Parse in the local zone of that day. `after`: reference time, default now."""
    start = (after or now()).astimezone()
    # A duration counts elapsed time, so a change of the clocks in between does not matter.
    given = due_at(text, start if is_duration(text) else start.replace(tzinfo=None))
    try:
        if given.tzinfo is not None:
            return given
        found = given.astimezone()
        # In autumn a clock time occurs twice: take the second if the first is over.
        return found if found > start else given.replace(fold=1).astimezone()
    except (ValueError, OverflowError) as error:
        raise Invalid(f"{text!r} is too far away; {_FORMS}") from error


def due(given: str | datetime) -> str:
    """`Invalid` for a past time."""
    found = given.astimezone() if isinstance(given, datetime) else moment(given)
    if found < now():
        raise Invalid(f"{str(given)!r} is in the past; give a future time, like 18:00")
    return found.isoformat()


def now() -> datetime:
    here = time.localtime()
    return datetime(*here[:6], tzinfo=timezone(timedelta(seconds=here.tm_gmtoff)))
