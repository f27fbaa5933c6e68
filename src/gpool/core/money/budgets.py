"""Monthly budgets of a user or team: how much may be spent in a calendar month (UTC). Pure.

What counts is set aside in the month, less what returned later. So a reservation beyond the cap is refused before
anything runs, and the sum of charges never exceeds the cap.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from gpool.core.money.transfers import LedgerAccountId

WARN_PERCENT = 80


class BudgetLevel(StrEnum):
    WITHIN = "within"
    WARNING = "warning"  # 80 % or more
    REACHED = "reached"  # nothing more can be set aside


def budget_level(cap: int, spent: int) -> BudgetLevel:
    if spent >= cap:
        return BudgetLevel.REACHED
    return BudgetLevel.WARNING if spent * 100 >= cap * WARN_PERCENT else BudgetLevel.WITHIN


@dataclass(frozen=True, slots=True)
class BudgetWarning:
    """A payer that reached 80 % of its cap, or the cap, by this write."""

    account: LedgerAccountId
    month: int
    level: BudgetLevel
    spent: int
    cap: int


def crossed(before: int, after: int, cap: int) -> BudgetLevel | None:
    """The level that the spending has just reached; None: the same as before, or a lower one."""
    order = list(BudgetLevel)
    old, new = budget_level(cap, before), budget_level(cap, after)
    return new if order.index(new) > order.index(old) else None
