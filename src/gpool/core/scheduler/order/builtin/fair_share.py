"""Default order: tenants by share, then a team's users by theirs, then a user's own tasks.
Shares: `order.fair_share`; exchange between tenants: `passes.preemption`.
"""

from __future__ import annotations

from typing import NamedTuple

from gpool.core.ids import TaskId
from gpool.core.model import Instant
from gpool.core.scheduler.order.orders import (
    LEVEL_OF_PROMOTED,
    Candidate,
    Order,
    Policy,
    Promotion,
    level_of,
)


class FairShareKey(NamedTuple):
    tenant_share: int
    user_share: int
    is_due: int  # 0: due, 1: not
    level: int
    promotion: int
    since: int
    task: TaskId


def fair_share(candidate: Candidate, now: Instant, policy: Policy) -> FairShareKey:
    """A user's own tasks: near their deadline or starving first, then by level, then promoted ones, then by age.

    Priority is a head start in age among a user's own tasks and between equal shares; it takes nothing from other tenants.
    """
    shape, level = candidate.shape, level_of(candidate.attained)
    promotion = candidate.promotion
    is_due = promotion is Promotion.FIRST or (
        shape.by is not None and shape.by - now <= policy.urgency
    )
    if promotion is not Promotion.NONE:
        level = min(level, 0 if promotion is Promotion.FIRST else LEVEL_OF_PROMOTED)
    since = candidate.queued_at - shape.priority * policy.ageing
    return FairShareKey(
        *candidate.shares, 0 if is_due else 1, level, promotion, since, candidate.task
    )


FAIR_SHARE = Order(
    "fair_share",
    fair_share,
    uses_predictions=False,
    decisive=FairShareKey._fields,
    exchanges_by_share=True,
    classes=("is_due", "level", "promotion"),
)
