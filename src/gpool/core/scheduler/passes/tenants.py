"""Allocations, GPUs, shares and limits of users and teams, with the starts and stops of this pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gpool.core.ids import UserId
from gpool.core.model import Allocation, Shape
from gpool.core.scheduler.order.exchange import Pair
from gpool.core.scheduler.order.fair_share import (
    Amounts,
    amounts_of,
    compared,
    plus,
    tenant_of,
    total,
)
from gpool.core.scheduler.order.limits import Holder, band, holders_of, least_gpus
from gpool.core.scheduler.order.orders import Policy
from gpool.core.scheduler.state.state import State

_NOTHING: Amounts = (0, 0, 0)


class Holding(Protocol):
    """Includes the allocations of its gang."""

    @property
    def shape(self) -> Shape: ...
    @property
    def amounts(self) -> Amounts: ...


class TenantLedger:
    def __init__(self, state: State, policy: Policy, *, uses_shares: bool) -> None:
        self._state, self._policy, self._uses_shares = state, policy, uses_shares
        self._running: dict[UserId, int] = {}
        self._gpus: dict[Holder, int] = {}
        self._taken: dict[Holder, Amounts] = {}
        self._shares: dict[Holder, int] = {}
        self._recent: dict[Holder, int] = {}
        self._saved: set[Holder] = set()  # whose limit is kept for a task that has waited long
        self._changed: dict[Holder, int] = {}  # number of the holder's last change
        self.changes = 0

    def count(self, shape: Shape, allocations: Sequence[Allocation], sign: int = 1) -> None:
        self.changes += 1
        self._running[shape.user] = self._running.get(shape.user, 0) + sign * len(allocations)
        amounts = total([amounts_of(allocation) for allocation in allocations])
        for holder in holders_of(shape):
            self._changed[holder] = self.changes
            if amounts[0]:
                self._gpus[holder] = self._gpus.get(holder, 0) + sign * amounts[0]
            self._taken[holder] = plus(self._taken.get(holder, _NOTHING), amounts, sign)
            self._shares.pop(holder, None)

    def has_changed(self, shape: Shape, since: int) -> bool:
        """Whether user or team changed after change `since`; nothing else changes a rank in a pass."""
        if since == self.changes:
            return False
        return any(self._changed.get(holder, 0) > since for holder in holders_of(shape))

    def running(self, user: UserId) -> int:
        return self._state.running.get(user, 0) + self._running.get(user, 0)

    def gpus_held(self, holder: Holder) -> int:
        return self._state.gpus.get(holder, 0) + self._gpus.get(holder, 0)

    def band(self, shape: Shape, without: Holding | None = None, taken: int | None = None) -> int:
        """Whether the next start is within a guarantee. `without`: not counted; `taken`: thousandths of GPUs, if known."""
        less = 0 if without is None else without.amounts[0]
        others = frozenset[Holder]() if without is None else frozenset(holders_of(without.shape))
        if taken is None:
            taken = least_gpus(shape) * shape.requirements.nodes

        def held(holder: Holder) -> int:
            return self.gpus_held(holder) - (less if holder in others else 0)

        return band(self._policy.limits, shape, held, taken)

    def shares(
        self, shape: Shape, without: Holding | None = None, gain: Amounts = _NOTHING
    ) -> Pair:
        """Zeros if the order ignores shares."""
        if not self._uses_shares:
            return 0, 0
        tenant: Holder = tenant_of(shape)
        user: Holder = ("user", shape.user)
        first = self.share(tenant, without, gain)
        if tenant == user:
            return first, first
        return compared(shape, first, self.share(user, without, gain), self._policy.weights)

    def share(
        self, holder: Holder, without: Holding | None = None, gain: Amounts = _NOTHING
    ) -> int:
        if without is None and gain == _NOTHING:
            known = self._shares.get(holder)
            if known is None:
                known = self._shares[holder] = self._share(holder, self._taken.get(holder))
            return known
        more = self._taken.get(holder)
        if gain != _NOTHING:
            more = plus(more or _NOTHING, gain)
        if without is not None and holder in (
            tenant_of(without.shape),
            ("user", without.shape.user),
        ):
            more = plus(more or _NOTHING, without.amounts, -1)
        return self._share(holder, more)

    def _share(self, holder: Holder, more: Amounts | None) -> int:
        return self._state.shares.of(holder, self._policy.weights.get(holder, 1000), more)

    def recent(self, holder: Holder) -> int:
        known = self._recent.get(holder)
        if known is None:
            weight = self._policy.weights.get(holder, 1000)
            known = self._recent[holder] = self._state.shares.recent(holder, weight)
        return known

    def recent_pair(self, shape: Shape) -> Pair:
        if not self._uses_shares:
            return 0, 0
        own = self.recent(("user", shape.user))
        if shape.team is None:
            return own, own
        return compared(shape, self.recent(tenant_of(shape)), own, self._policy.weights)

    def held_pair(self, shape: Shape, more: Amounts = _NOTHING, sign: int = 1) -> Pair:
        """`sign` -1: less `more`."""
        if not self._uses_shares:
            return 0, 0
        own = self._held(("user", shape.user), more, sign)
        if shape.team is None:
            return own, own
        return compared(shape, self._held(tenant_of(shape), more, sign), own, self._policy.weights)

    def _held(self, holder: Holder, more: Amounts, sign: int) -> int:
        taken = plus(self._taken.get(holder, _NOTHING), more, sign)
        return self._state.shares.now(holder, self._policy.weights.get(holder, 1000), taken)

    def limit_exceeded(self, shape: Shape, gpus: int) -> Holder | None:
        """`gpus` in thousandths."""
        if not gpus or not self._policy.limits.is_any:
            return None
        for holder in holders_of(shape):
            limit = self._policy.limits.of(holder)
            if limit is not None and (
                self.gpus_held(holder) + gpus > limit or holder in self._saved
            ):
                return holder
        return None

    def save_limit(self, holder: Holder) -> None:
        """Keeps the holder's smaller tasks from overtaking a large one in this pass."""
        self._saved.add(holder)
