"""Tasks on a node, for its owner: whose, since when, with which resources. Names, commands and files stay private."""

from __future__ import annotations

from datetime import datetime

from gpool.core.ids import NodeId, TaskId, encode
from gpool.core.model import Instant, Network
from gpool.core.permissions import Action
from gpool.core.specs import gpu as gpuspec
from gpool.server.actions.audit import note_read
from gpool.server.identity.authorization import node_thing, permit
from gpool.server.server import Server
from gpool.server.store.generated_rows import FailedChecksRecord
from gpool.server.store.identity_values import Caller
from gpool.server.store.operations import nodes
from gpool.server.store.operations.tasks import node_history
from gpool.server.store.operations.verification import standings
from gpool.server.store.rows import allocation_from, spec_from
from gpool.wire.documents import instant_to_datetime
from gpool.wire.nodes import FailedCheckDocument, NodeTaskDocument, NodeTasksDocument

MOST_PAGES = 50
"""Pages of 20,000 tasks each that are searched for a node's ended tasks."""


async def node_tasks(server: Server, who: Caller, id_: NodeId, limit: int) -> NodeTasksDocument:
    """Held leases and the newest `limit` ended tasks; `NotFound` or `Forbidden` unless owner or operator."""
    found = await server.store.read(nodes.node(id_))
    permit(who, Action.NODE_TASKS, node_thing(found), f"node {encode('node', id_)}")
    await note_read(server, who, Action.NODE_TASKS, node_thing(found), encode("node", id_))
    held = await server.store.read(node_history.held_by(id_))
    ended: list[node_history.NodeTask] = []
    before: TaskId | None = None
    for _ in range(MOST_PAGES):  # one read each, so that other requests are served between
        left = limit - len(ended)
        page = await server.store.read(node_history.ended_on(id_, left, before))
        ended += page.tasks
        before = page.last
        if before is None or len(ended) >= limit:
            break
    checks = await server.store.read(standings.failed_checks(id_, limit))
    standing = (await server.store.read(standings.standings([id_])))[id_]
    is_banned = standing.banned_until > server.now
    return NodeTasksDocument(
        running=[_document(row) for row in held],
        ended=[_document(row) for row in ended],
        failed_checks=[_check(row) for row in checks],
        banned_until=_maybe(standing.banned_until) if is_banned else None,
    )


def _check(row: FailedChecksRecord) -> FailedCheckDocument:
    return FailedCheckDocument(
        task=encode("task", row.task_id),
        at=instant_to_datetime(row.at),
        wanted=row.wanted,
        found=row.found,
    )


def _document(row: node_history.NodeTask) -> NodeTaskDocument:
    spec = spec_from(row.body)
    needs = spec.requirements
    has = None if row.allocation is None else allocation_from(0, row.allocation)
    return NodeTaskDocument(
        id=encode("task", row.id),
        user=encode("user", row.user_id),
        user_name=row.user_name,
        team=None if row.team_id is None else encode("team", row.team_id),
        kind=spec.kind.value,
        status=row.status,
        leased_at=_maybe(row.leased_at),
        started_at=_maybe(row.started_at),
        finished_at=_maybe(row.finished_at),
        reason=row.reason,
        gpu=gpuspec.format(needs.gpu) if needs.gpu else None,
        cpus=(needs.cpu_milli if has is None else has.cpu_milli) / 1000,
        memory_bytes=needs.memory_bytes if has is None else has.memory_bytes,
        tier=needs.tier.value,
        network=needs.network is Network.EGRESS,
        image=(spec.recipe.image or None) if spec.recipe is not None else None,
    )


def _maybe(at: Instant | None) -> datetime | None:
    return None if at is None else instant_to_datetime(at)
