"""Times as people say them: `18:00` is the next such time, `2h` so long from now, a date with time itself. No zone means the caller's own."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone

from gpool.client.durations import is_duration, seconds
from gpool.core.errors import Invalid

_SAY = "say 18:00, 2026-11-15T18:00, or 2h for in two hours"


def due_at(text: str, now: datetime) -> datetime:
    """`now` with its time zone, or without: then a time without one stays so. `Invalid` for what is no time."""
    try:
        if is_duration(text):
            return now + timedelta(seconds=seconds(text))
        if len(text) <= 5:
            hour, _, minute = text.partition(":")
            today = now.replace(hour=int(hour), minute=int(minute), second=0, microsecond=0)
            return today if today > now else today + timedelta(days=1)
        said = datetime.fromisoformat(text)
    except (ValueError, OverflowError) as error:
        raise Invalid(f"{text!r} is no time; {_SAY}") from error
    return said if said.tzinfo is not None else said.replace(tzinfo=now.tzinfo)


def moment(text: str, after: datetime | None = None) -> datetime:
    """With its time zone: here, and as it is on that day. `after`: what a time of day is the next from, and a duration counts from."""
    start = (after or now()).astimezone()
    # so long from now is no matter of clocks, which may be put forward or back meanwhile
    said = due_at(text, start if is_duration(text) else start.replace(tzinfo=None))
    try:
        if said.tzinfo is not None:
            return said
        found = said.astimezone()
        return found if found > start else said.replace(fold=1).astimezone()  # shown twice that day
    except (ValueError, OverflowError) as error:
        raise Invalid(f"{text!r} is too far away; {_SAY}") from error


def due(said: str | datetime) -> str:
    """A time to come, as the server wants it."""
    found = said.astimezone() if isinstance(said, datetime) else moment(said)
    if found < now():
        raise Invalid(f"{str(said)!r} is over; say a time to come, like 18:00")
    return found.isoformat()


def now() -> datetime:
    here = time.localtime()
    return datetime(*here[:6], tzinfo=timezone(timedelta(seconds=here.tm_gmtoff)))
