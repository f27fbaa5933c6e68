"""Invariants of money, checked at every commit with SQL of its own; shares no code with the charging it checks."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HOUR_US = 3_600_000_000
HELD = (
    "SELECT t.id, t.epoch, t.node_id FROM tasks t WHERE t.holding = 1 AND t.metered = 1 AND t.node_id IS NOT NULL "
    "UNION ALL SELECT m.task_id, m.epoch, m.node_id FROM members m JOIN tasks t ON t.id = m.task_id "
    "AND t.epoch = m.epoch JOIN meters r ON r.task_id = m.task_id AND r.epoch = m.epoch AND r.node_id = m.node_id "
    "WHERE t.holding = 1 AND t.metered = 1 AND t.node_id IS NULL"
)
METERS = "SELECT task_id, epoch, rank, rate, minimum, until, charged, posted, reserved, roll, closed_at FROM meters"
CHARGES = (
    "SELECT task_id, epoch, node_id, charged_us, microcredits, ended_at, reserve_id FROM charges"
)
SUMS = (
    ("all balances add up to", "SELECT SUM(balance) FROM ledger_accounts"),
    (
        "pending accounts differ from open pending transfers by",
        "SELECT (SELECT COALESCE(SUM(balance), 0) FROM ledger_accounts WHERE kind = 'pending') - "
        "(SELECT COALESCE(SUM(amount), 0) FROM pending_transfers WHERE resolved_by IS NULL)",
    ),
    (
        "tasks that cost more than their max_cost:",
        "SELECT COUNT(*) FROM (SELECT t.id FROM tasks t JOIN charges c ON c.task_id = t.id "
        "WHERE t.max_cost IS NOT NULL GROUP BY t.id, t.max_cost HAVING SUM(c.microcredits) > t.max_cost)",
    ),
    (
        "posted charges differ from their transfers:",
        "SELECT COUNT(*) FROM (SELECT c.transfer_id FROM charges c WHERE c.state = 'posted' GROUP BY c.transfer_id "
        "HAVING SUM(c.microcredits) <> (SELECT COALESCE(SUM(e.amount), 0) FROM ledger_entries e "
        "JOIN ledger_accounts a ON a.id = e.account_id WHERE e.transfer_id = c.transfer_id "
        "AND a.kind IN ('vesting', 'fee')))",
    ),
    (
        "open meters without the funds that they count on:",
        "SELECT COUNT(*) FROM meters m WHERE NOT EXISTS (SELECT 1 FROM pending_transfers p WHERE "
        "p.id = 'alloc:' || m.task_id || ':' || m.epoch || ':' || m.rank || ':' || m.roll "
        "AND p.resolved_by IS NULL AND p.amount = m.reserved - m.posted)",
    ),
    (
        "open meters whose charges are not those of their leases:",
        "SELECT COUNT(*) FROM meters m WHERE m.charged <> (SELECT COALESCE(SUM(c.microcredits), 0) FROM charges c "
        "WHERE c.reserve_id LIKE 'alloc:' || m.task_id || ':' || m.epoch || ':' || m.rank || ':%')",
    ),
    (
        "open meters that count other leases than those on them:",
        "SELECT COUNT(*) FROM meters m WHERE m.closed_at IS NULL AND m.leases <> (SELECT COUNT(*) FROM tasks t "
        "WHERE t.holding = 1 AND t.metered = 1 AND t.node_id = m.node_id AND t.allocation_number = m.number) + "
        "(SELECT COUNT(*) FROM members e JOIN tasks t ON t.id = e.task_id AND t.epoch = e.epoch WHERE t.holding = 1 "
        "AND t.metered = 1 AND t.node_id IS NULL AND e.node_id = m.node_id AND e.allocation_number = m.number)",
    ),
    (
        "reservations with charges beyond them:",
        "SELECT COUNT(*) FROM (SELECT c.reserve_id FROM charges c GROUP BY c.reserve_id HAVING SUM(c.microcredits) > "
        "(SELECT COALESCE(SUM(p.amount), 0) FROM pending_transfers p WHERE p.id = c.reserve_id))",
    ),
)
"""Queries that must answer 0."""


@dataclass(slots=True)
class _KnownMeter:
    rate: int
    minimum: int
    opened: int
    last: int  # end of its last lease, or when it was closed


class MoneyOracle:
    """`look` after each commit; the first violation ends the run."""

    def __init__(self, path: Path, fail: Callable[[str], None]) -> None:
        self._raw = sqlite3.connect(path, isolation_level=None)
        self._fail = fail
        self._held: set[tuple[int, int, int]] = set()  # leases on meters: task, epoch, node
        self._meters: dict[str, _KnownMeter] = {}  # all there ever were
        self._seen: set[tuple[int, int, int]] = set()  # leases with a charge

    def look(self) -> None:
        for what, sql in SUMS:
            ((found,),) = self._raw.execute(sql).fetchall()
            if found:
                self._fail(f"money: {what} {found}")
        self._look_at_meters()
        self._look_at_charges()

    def _look_at_meters(self) -> None:
        for row in self._raw.execute(METERS).fetchall():
            task, epoch, rank, rate, minimum, until, charged, _, reserved, _, closed_at = row
            key = f"alloc:{task}:{epoch}:{rank}"
            known = self._meters.setdefault(key, _KnownMeter(rate, minimum, until, until))
            if (rate, minimum) != (known.rate, known.minimum):
                self._fail(f"money: the price of {key} changed")
            known.last = max(known.last, until, closed_at or 0)
            if charged > reserved:
                self._fail(f"money: {key} has charged {charged} of {reserved}")

    def _look_at_charges(self) -> None:
        held = set(self._raw.execute(HELD).fetchall())
        charged = self._raw.execute(CHARGES).fetchall()
        there = {row[:3] for row in charged}
        for lease in there - self._seen:
            if lease not in self._held:
                self._fail(f"money: a lease that was not metered is charged: {lease}")
        self._seen, self._held = there, held
        sums: dict[str, list[int]] = {}
        for row in charged:
            total = sums.setdefault(row[6].rpartition(":")[0], [0, 0, 0])
            total[0] += row[3]
            total[1] += row[4]
            total[2] = max(total[2], row[5])
        for key, (time, amount, ended_at) in sums.items():
            known = self._meters.get(key)
            if known is None:
                self._fail(f"money: charges of an unknown meter {key}")
                continue
            wall = max(known.last, ended_at) - known.opened  # one commit may close and settle it
            most = max(known.minimum, known.rate * wall // HOUR_US)
            if time > wall or amount > most:
                self._fail(f"money: {key} charges {amount} for {time} of {wall} us")
