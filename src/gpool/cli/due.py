"""Times as people say them, like `--by`: a time of day means the next such time, a date with time itself; both in the caller's own time zone."""

from __future__ import annotations

import time
from datetime import datetime, timedelta

import click

from gpool.core.errors import Invalid


def due_at(text: str, now: datetime) -> datetime:
    """`now` with its time zone, or without: then a time without one stays so. `Invalid` for what is no time."""
    try:
        if len(text) <= 5:
            hour, _, minute = text.partition(":")
            today = now.replace(hour=int(hour), minute=int(minute), second=0, microsecond=0)
            return today if today > now else today + timedelta(days=1)
        said = datetime.fromisoformat(text)
    except ValueError as error:
        raise Invalid(f"{text!r} is no time; say 18:00 or 2026-11-15T18:00") from error
    return said if said.tzinfo is not None else said.replace(tzinfo=now.tzinfo)


def moment(text: str) -> datetime:
    """With its time zone: here, and as it is on that day."""
    said = due_at(text, _now().replace(tzinfo=None))
    try:
        return said if said.tzinfo is not None else said.astimezone()
    except (ValueError, OverflowError) as error:
        raise Invalid(f"{text!r} is too far away; say 18:00 or 2026-11-15T18:00") from error


def due(context: click.Context, option: click.Parameter, text: str | None) -> str | None:  # noqa: ARG001 - a callback
    if text is None:
        return None
    said = moment(text)
    if said < _now():
        raise Invalid(f"{text!r} is over; say a time to come, like 18:00")
    return said.isoformat()


def _now() -> datetime:
    return datetime(*time.localtime()[:6]).astimezone()
