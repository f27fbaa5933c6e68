"""Times as people say them, like `--by`: a time of day means the next such time, a date with time itself; both in the caller's own time zone."""

from __future__ import annotations

import time
from datetime import datetime, timedelta

import click

from gpool.core.errors import Invalid


def due_at(text: str, now: datetime) -> datetime:
    """`now` with its time zone. `Invalid` for what is neither."""
    try:
        if len(text) <= 5:
            hour, _, minute = text.partition(":")
            today = now.replace(hour=int(hour), minute=int(minute), second=0, microsecond=0)
            return today if today > now else today + timedelta(days=1)
        said = datetime.fromisoformat(text)
    except ValueError as error:
        raise Invalid(f"{text!r} is no time; say 18:00 or 2026-11-15T18:00") from error
    return said if said.tzinfo is not None else said.replace(tzinfo=now.tzinfo)


def moment(text: str) -> str:
    """The same as it is sent."""
    local = time.localtime()
    zone = datetime(*local[:6]).astimezone().tzinfo
    return due_at(text, datetime(*local[:6], tzinfo=zone)).isoformat()


def due(context: click.Context, option: click.Parameter, text: str | None) -> str | None:  # noqa: ARG001 - a callback
    return None if text is None else moment(text)
