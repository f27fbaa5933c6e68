"""Standing of nodes: outcomes of comparisons, failed checks for their owners, bans, passed checks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from gpool.core.ids import NodeId, TaskId
from gpool.core.model import Instant
from gpool.core.trust.spot import DEFAULT_SPOT, ReliabilityKey, after_failure
from gpool.core.trust.standing import Standing, banned, checked, compared, owner_caught, started
from gpool.server.store.generated_rows import (
    CheckRecordsRecord,
    FailedChecksRecord,
    StandingsRecord,
)
from gpool.server.store.protocol import Operation, Relation, Row, Statement, operation
from gpool.server.store.rows import columns, of_ids, relation_columns, select, values

STANDING = columns(StandingsRecord, StandingsRecord, "s")
RECORD = columns(CheckRecordsRecord, CheckRecordsRecord, "r")
CHECK = columns(FailedChecksRecord, FailedChecksRecord, "f")


class ComparedSibling(NamedTuple):
    """`wanted`, `found`: the accepted answer and this node's, described for its owner."""

    task: TaskId
    node: NodeId
    is_passed: bool
    wanted: str
    found: str
    model: str
    environment: str
    is_own: bool  # it is the node's own result, which others checked


class NodeRecord(NamedTuple):
    """Standing of a node and its passed checks by GPU model and environment."""

    standing: Standing
    passed: dict[ReliabilityKey, int]


class _PassedCheck(NamedTuple):
    node_id: NodeId
    model: str
    environment: str
    passed: int


@operation
def standings(nodes: Collection[NodeId]) -> Operation[dict[NodeId, Standing]]:
    """Standing of each node; nodes without a row have none to their discredit."""
    rows = yield from select(
        StandingsRecord,
        f"SELECT {STANDING} FROM {{nodes}} AS i JOIN standings s ON s.node_id = i.id",  # noqa: S608
        {},
        {"nodes": of_ids(nodes)},
    )
    found = dict.fromkeys(nodes, Standing())
    for row in rows:
        found[row.node_id] = Standing(
            row.suspicion,
            row.as_sibling,
            row.offences,
            Instant(row.banned_until),
            None if row.last_start is None else Instant(row.last_start),
        )
    return found


@operation
def node_records(nodes: Collection[NodeId]) -> Operation[dict[NodeId, NodeRecord]]:
    known = yield from standings(nodes)
    rows = yield from select(
        CheckRecordsRecord,
        f"SELECT {RECORD} FROM {{nodes}} AS i JOIN check_records r ON r.node_id = i.id",  # noqa: S608
        {},
        {"nodes": of_ids(nodes)},
    )
    found = {node: NodeRecord(standing, {}) for node, standing in known.items()}
    for row in rows:
        key = ReliabilityKey(row.node_id, row.model, row.environment)
        found[row.node_id].passed[key] = row.passed
    return found


def start_spot(node: NodeId, at: Instant) -> Operation[None]:
    """Record the start of a spot-checked task: a node on probation waits before it gets the next one."""
    known = yield from standings([node])
    yield from _put({node: started(known[node], at)}, at)


@operation
def banned_nodes(now: Instant) -> Operation[frozenset[NodeId]]:
    rows = yield from select(
        StandingsRecord,
        f"SELECT {STANDING} FROM standings s WHERE s.banned_until > :now",  # noqa: S608
        {"now": now},
    )
    return frozenset(row.node_id for row in rows)


@operation
def failed_checks(node: NodeId, limit: int) -> Operation[list[FailedChecksRecord]]:
    """Failed checks of a node, newest first."""
    return (
        yield from select(
            FailedChecksRecord,
            f"SELECT {CHECK} FROM failed_checks f WHERE f.node_id = :node ORDER BY f.at DESC, f.task_id LIMIT :limit",  # noqa: S608
            {"node": node, "limit": limit},
        )
    )


def record_comparisons(outcomes: Sequence[ComparedSibling], at: Instant) -> Operation[set[NodeId]]:
    """Change the standing of nodes whose answers were compared; return the caught ones.

    A caught node is banned from verified tasks, and its owner's other nodes become suspect.
    """
    known = yield from standings({one.node for one in outcomes})
    passed: dict[tuple[NodeId, str, str], int] = {}
    failed: list[Row] = []
    changed: dict[NodeId, Standing] = {}
    caught: set[NodeId] = set()
    for one in outcomes:
        before = changed.get(one.node, known[one.node])
        change = checked if one.is_own else compared
        standing = change(before, is_passed=one.is_passed)
        if one.is_passed:
            key = (one.node, one.model, one.environment)
            passed[key] = passed.get(key, 0) + 1
        else:
            failed.append((one.task, one.node, at, one.wanted, one.found))
        if before.banned_until > at:
            standing = before  # an answer from before the ban
        elif standing.is_caught:
            standing = banned(standing, at)
            caught.add(one.node)
        if standing != before:
            changed[one.node] = standing
    yield from _put(changed, at)
    if caught:
        yield from _suspect_relatives(caught, at)
    if failed:
        yield from _lower_records({one.node for one in outcomes if not one.is_passed})
        yield Statement(
            "INSERT INTO failed_checks (task_id, node_id, at, wanted, found) "
            "SELECT f.task_id, f.node_id, f.at, f.wanted, f.found FROM {failed} AS f WHERE true "
            "ON CONFLICT (task_id) DO NOTHING",
            {},
            {"failed": Relation(relation_columns(FailedChecksRecord), failed)},
        )
    if passed:
        rows = [_PassedCheck(*key, count) for key, count in sorted(passed.items())]
        yield Statement(
            "INSERT INTO check_records (node_id, model, environment, passed) "
            "SELECT p.node_id, p.model, p.environment, p.passed FROM {passed} AS p WHERE true "
            "ON CONFLICT (node_id, model, environment) DO UPDATE SET passed = check_records.passed + excluded.passed",
            {},
            {"passed": Relation(relation_columns(_PassedCheck), rows)},
        )
    return caught


def _suspect_relatives(caught: Collection[NodeId], at: Instant) -> Operation[None]:
    others = yield from values(
        NodeId,
        "SELECT o.id FROM {caught} AS c JOIN nodes n ON n.id = c.id JOIN nodes o ON o.owner_id = n.owner_id",
        {},
        {"caught": of_ids(caught)},
    )
    known = yield from standings(set(others).difference(caught))
    yield from _put({node: owner_caught(standing) for node, standing in known.items()}, at)


def _lower_records(failed: Collection[NodeId]) -> Operation[None]:
    """Let the rate of checks rise again after a failed one."""
    most = after_failure(DEFAULT_SPOT, 1 << 30)
    yield Statement(
        "UPDATE check_records SET passed = :most WHERE passed > :most AND node_id IN (SELECT id FROM {nodes} AS i)",
        {"most": most},
        {"nodes": of_ids(failed)},
    )


def _put(changed: dict[NodeId, Standing], at: Instant) -> Operation[None]:
    if not changed:
        return
    rows = [
        StandingsRecord(
            node, s.suspicion, s.as_sibling, s.offences, s.banned_until, s.last_start, at
        )
        for node, s in sorted(changed.items())
    ]
    names = ", ".join(StandingsRecord._fields)
    picked = ", ".join(f"n.{name}" for name in StandingsRecord._fields)
    updated = ", ".join(f"{name} = excluded.{name}" for name in StandingsRecord._fields[1:])
    yield Statement(
        f"INSERT INTO standings ({names}) SELECT {picked} FROM {{new}} AS n WHERE true "  # noqa: S608
        f"ON CONFLICT (node_id) DO UPDATE SET {updated}",
        {},
        {"new": Relation(relation_columns(StandingsRecord), rows)},
    )


@operation
def forget_standings(before: Instant) -> Operation[None]:
    """Forget nodes that left the pool before then, unless they are still banned."""
    gone = "NOT EXISTS (SELECT 1 FROM nodes n WHERE n.id = {table}.node_id)"
    yield Statement(
        f"DELETE FROM check_records WHERE {gone.format(table='check_records')}"  # noqa: S608
    )
    yield Statement(
        f"DELETE FROM standings WHERE {gone.format(table='standings')} "  # noqa: S608
        "AND banned_until < :before AND changed_at < :before",
        {"before": before},
    )
