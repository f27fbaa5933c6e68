"""Durations as people write them: `90s`, `2h`, `1h30m`, or a number of seconds. What has no unit and is no number is refused."""

from __future__ import annotations

import math
import re

from gpool.core.errors import Invalid

_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?[smhd])+")
_PART = re.compile(r"(\d+(?:\.\d+)?)([smhd])")


def is_duration(text: str) -> bool:
    """Whether it is one with its units, like `2h`."""
    return _DURATION.fullmatch(text.strip().lower()) is not None


def seconds(duration: str | float, *, zero: bool = False) -> float:
    """`90`, `"90"`, `"90s"`, `"2h"`, `"1h30m"` in seconds. `zero`: none at all is one too."""
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
        raise Invalid("that is no duration: it has no end; write 90s, 45m, 2h, 1h30m or seconds")
    if found < 0 or (found == 0 and not zero):
        raise Invalid(f"the duration {duration!r} is not above zero")
    return found
