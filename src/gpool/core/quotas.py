"""Quotas of a user or team. Pure: usage is an argument."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class QuotaUsage:
    """Amounts in use, or requested. GPUs in thousandths."""

    running_gpu_milli: int = 0
    queued_tasks: int = 0
    storage_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Quota:
    """Upper limits; None: no limit."""

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
    what: str
    used: int
    asked: int
    limit: int

    @property
    def sentence(self) -> str:
        return f"{self.used} of {self.limit} {_WORDS[self.what]}; {self.asked} more do not fit"


def within_quota(usage: QuotaUsage, quota: Quota, ask: QuotaUsage) -> Over | None:
    """Return the first exceeded limit. Amounts not requested are not checked: a limit lowered below the usage only
    refuses more.
    """
    for each in fields(QuotaUsage):
        used, asked = int(getattr(usage, each.name)), int(getattr(ask, each.name))
        limit: int | None = getattr(quota, each.name)
        if limit is not None and asked > 0 and used + asked > limit:
            return Over(each.name, used, asked, limit)
    return None


def within_quotas(pairs: Iterable[tuple[QuotaUsage, Quota]], ask: QuotaUsage) -> Over | None:
    for usage, quota in pairs:
        over = within_quota(usage, quota, ask)
        if over is not None:
            return over
    return None


@dataclass(frozen=True, slots=True)
class OwnerQuota:
    """Upper limits of an owner's nodes, and of the GPUs on all of them together; None: no limit."""

    nodes: int | None = None
    gpus: int | None = None


NO_OWNER_QUOTA = OwnerQuota()
