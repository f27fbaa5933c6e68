"""RFC 3339 times with their original spelling. Leap seconds are rejected."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from gpool.core.model import Instant
from gpool.wallet.errors import BadMoment, shown

_DATE_TIME = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})[Tt]([0-9]{2}):([0-9]{2}):([0-9]{2})(?:\.([0-9]+))?"
    r"(?:[Zz]|([+-])([0-9]{2}):([0-9]{2}))"
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class Moment:
    """Time and its spelling: signed text must be reproduced exactly."""

    text: str
    at: Instant = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "at", _instant(self.text))

    @classmethod
    def of(cls, at: Instant) -> Moment:
        """Format in UTC with Z; to the millisecond, or microsecond if there is one."""
        try:
            when = _EPOCH + timedelta(microseconds=at)
        except OverflowError:
            raise BadMoment(f"{at} µs after 1970 is outside the years 1 to 9999") from None
        digits = "microseconds" if at % 1000 else "milliseconds"
        return cls(when.replace(tzinfo=None).isoformat(timespec=digits) + "Z")

    def __str__(self) -> str:
        return self.text


def _instant(text: str) -> Instant:
    found = _DATE_TIME.fullmatch(text)
    if found is None:
        raise BadMoment(
            f"{shown(text)} is not an RFC 3339 time; one looks like 2026-01-31T09:30:00Z"
        )
    year, month, day, hour, minute, second = map(int, found.groups()[:6])
    try:
        when = datetime(year, month, day, hour, minute, second, tzinfo=UTC)
    except ValueError as exc:
        raise BadMoment(f"{shown(text)} is not a valid time: {exc}") from exc
    ahead = 0
    if found[8]:
        hours, minutes = int(found[9]), int(found[10])
        if hours > 23 or minutes > 59:
            raise BadMoment(f"{shown(text)} has an offset past 23:59")
        ahead = (hours * 60 + minutes) * (-60 if found[8] == "-" else 60)
    # Digits past the microsecond are truncated, which only makes a time earlier.
    fraction = int((found[7] or "0")[:6].ljust(6, "0"))
    return Instant((when - _EPOCH) // _MICROSECOND - ahead * 1_000_000 + fraction)
