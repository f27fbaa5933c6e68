"""Quotas of a user or team. Pure: usage is an argument."""

from __future__ import annotations

from dataclasses import dataclass


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


@dataclass(frozen=True, slots=True)
class OwnerQuota:
    """Upper limits of an owner's nodes, and of the GPUs on all of them together; None: no limit."""

    nodes: int | None = None
    gpus: int | None = None


NO_OWNER_QUOTA = OwnerQuota()
