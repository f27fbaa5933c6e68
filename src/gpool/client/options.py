"""What a task may ask for, checked for form before anything is sent; the server decides what is possible."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from gpool.core.errors import Invalid

_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?[smhd])+")
_PART = re.compile(r"(\d+(?:\.\d+)?)([smhd])")


def seconds(duration: str | float) -> float:
    """`90`, `"90"`, `"90s"`, `"2h"`, `"1h30m"` in seconds."""
    if isinstance(duration, int | float):
        found = float(duration)
    else:
        text = duration.strip().lower()
        if text.replace(".", "", 1).isdigit():
            found = float(text)
        elif _DURATION.fullmatch(text):
            found = sum(float(count) * _UNIT_S[unit] for count, unit in _PART.findall(text))
        else:
            raise Invalid(f"{duration!r} is not a duration; write 90s, 45m, 2h, 1h30m or seconds")
    if found <= 0:
        raise Invalid(f"the duration {duration!r} is not above zero")
    return found


@dataclass(frozen=True, slots=True)
class Options:
    """Requirements and manners of a task, under the names `@gpool.task` and `gpool run` give them."""

    gpu: str | int | float | None = None
    vram: str | None = None
    cpus: float | None = None
    memory: str | None = None
    disk: str | None = None
    tier: str | None = None
    timeout: str | float | None = None
    retries: int | None = None
    priority: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    name: str | None = None
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)  # variables never shown

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """From keyword arguments, with the known names listed when one is unknown."""
        known = [one.name for one in fields(cls)]
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise TypeError(f"gpool knows no option {unknown[0]!r}; it knows {', '.join(known)}")
        return cls(**given)

    def members(self) -> dict[str, object]:
        """The members of a `TaskRequest` that were asked for; the server's defaults stand for the rest."""
        said: dict[str, object] = {
            "name": self.name,
            "gpu": self.gpu,
            "vram": self.vram,
            "cpus": self.cpus,
            "memory": self.memory,
            "disk": self.disk,
            "tier": self.tier,
            "timeout_s": None if self.timeout is None else seconds(self.timeout),
            "retries": self.retries,
            "priority": self.priority,
            "env": {str(name): str(value) for name, value in self.env.items()} or None,
            "secrets": {str(name): str(value) for name, value in self.secrets.items()} or None,
        }
        return {name: value for name, value in said.items() if value is not None}
