"""Measurements and verification results of GPUs. A GPU with a text in `unproven` is not scheduled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpool.core.ids import NodeId, UserId
from gpool.core.model import Instant
from gpool.core.trust.gpu_verification import GpuVerdict
from gpool.server.store.operation import operation
from gpool.server.store.operations.nodes import nodes
from gpool.server.store.protocol import Operation, Statement
from gpool.server.store.queries import select
from gpool.server.store.rows import of_names
from gpool.server.store.values import NodeRow


@dataclass(frozen=True, slots=True)
class GpuVerificationRecord:
    node: NodeId
    owner: UserId
    uuid: str
    position: int
    joined_at: Instant  # of its node
    unproven: str | None
    verdict: GpuVerdict | None
    judged_at: Instant | None
    measured: str | None


class _VerifiedGpu(NamedTuple):
    node_id: NodeId
    owner_id: UserId
    uuid: str
    position: int
    created_at: Instant
    unproven: str | None
    verdict: str | None
    judged_at: Instant | None
    measured: str | None


@operation
def records(node: NodeId | None = None) -> Operation[tuple[GpuVerificationRecord, ...]]:
    rows = yield from select(
        _VerifiedGpu,
        "SELECT g.node_id, n.owner_id, g.uuid, g.position, n.created_at, g.unproven, g.verdict, g.judged_at, g.measured "
        "FROM gpus g JOIN nodes n ON n.id = g.node_id "
        "WHERE g.gone = 0 AND (CAST(:node AS BIGINT) IS NULL OR g.node_id = :node) ORDER BY g.node_id, g.position",
        {"node": node},
    )
    return tuple(
        GpuVerificationRecord(
            row.node_id,
            row.owner_id,
            row.uuid,
            row.position,
            row.created_at,
            row.unproven,
            None if row.verdict is None else GpuVerdict(row.verdict),
            row.judged_at,
            row.measured,
        )
        for row in rows
    )


@operation
def keep_back(node: NodeId, uuids: Sequence[str], why: str) -> Operation[NodeRow | None]:
    yield Statement(
        "UPDATE gpus SET unproven = :why, verdict = NULL WHERE node_id = :node "
        "AND uuid IN (SELECT name FROM {these} AS t)",
        {"why": why, "node": node},
        {"these": of_names(uuids)},
    )
    return (yield from nodes.node(node))


@operation
def judge(node: NodeId, uuid: str, verdict: GpuVerdict, at: Instant) -> Operation[NodeRow | None]:
    why = None if verdict is GpuVerdict.PASSED else f"proof of GPU: {verdict.text}"
    yield Statement(
        "UPDATE gpus SET unproven = :why, verdict = :verdict, judged_at = :at WHERE node_id = :node AND uuid = :uuid",
        {"why": why, "verdict": verdict.value, "at": at, "node": node, "uuid": uuid},
    )
    return (yield from nodes.node(node))


@operation
def note_measured(node: NodeId, uuid: str, measured: str) -> Operation[None]:
    yield Statement(
        "UPDATE gpus SET measured = :measured WHERE node_id = :node AND uuid = :uuid",
        {"measured": measured, "node": node, "uuid": uuid},
    )
