"""Quotas: whether an ask fits what a user or a team may have at once. Counts nothing itself; usage is given."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Usage:
    """What is in use, and likewise what is asked for on top. GPUs in thousandths, as slices are."""

    running_gpu_milli: int = 0
    queued_tasks: int = 0
    storage_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Quota:
    """The most one may have at once; None: no limit."""

    running_gpu_milli: int | None = None
    queued_tasks: int | None = None
    storage_bytes: int | None = None


_WORDS = {
    "running_gpu_milli": "thousandths of a GPU running",
    "queued_tasks": "tasks waiting",
    "storage_bytes": "bytes stored",
}


@dataclass(frozen=True, slots=True)
class Over:
    """The first limit an ask would pass."""

    what: str
    used: int
    asked: int
    limit: int

    @property
    def sentence(self) -> str:
        return f"{self.used} of {self.limit} {_WORDS[self.what]}; {self.asked} more do not fit"


def within_quota(usage: Usage, quota: Quota, ask: Usage) -> Over | None:
    """None when it fits. What is not asked for is not judged: a lowered limit stops nothing but more of the same."""
    for each in fields(Usage):
        used, asked = int(getattr(usage, each.name)), int(getattr(ask, each.name))
        limit: int | None = getattr(quota, each.name)
        if limit is not None and asked > 0 and used + asked > limit:
            return Over(each.name, used, asked, limit)
    return None


def within_quotas(pairs: Iterable[tuple[Usage, Quota]], ask: Usage) -> Over | None:
    """The user's own, then the team's: the first that is passed."""
    for usage, quota in pairs:
        over = within_quota(usage, quota, ask)
        if over is not None:
            return over
    return None
