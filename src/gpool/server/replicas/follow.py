"""The loop `follow` of a replica: heartbeat, change feed, delivery to own nodes, burial of dead replicas.

What a read of the feed names is read again through the writer, compared with the state (`following`) and absorbed
before the next await, as an own commit would be. Deliveries depend on rows alone, so a rebuild loses none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from time import monotonic

from gpool.core.ids import NodeId, SpecId, TaskId
from gpool.core.model import EndReason, Instant, Shape, Span, TaskStatus
from gpool.core.scheduler.state.events import TasksPreempted
from gpool.observability.logs import get_logger
from gpool.server.actions import policy, quotas
from gpool.server.nodes import reconciliation
from gpool.server.nodes.connection import NodeChannel
from gpool.server.replicas.following import Difference, UnknownSpec, difference
from gpool.server.replicas.membership import KEEP_CHANGES, Membership
from gpool.server.replicas.sent_frames import SentFrames
from gpool.server.scheduling import delivery
from gpool.server.server import Server
from gpool.server.store.operations import nodes, replicas
from gpool.server.store.operations.leases import leases
from gpool.server.store.operations.replicas import ChangedRows, ChangedTask, FollowedIds
from gpool.server.store.read_cache import ROW_TABLES, Touch
from gpool.server.store.rows import allocation_from
from gpool.server.store.values import HeldLease
from gpool.wire.frames import StopReason

log = get_logger(__name__)

EVERY_S = 1.0
HEARTBEAT_EVERY = Span(900_000)
PRUNE_EVERY = Span(60_000_000)
DOUBT = Span(60_000_000)
"""Time after a commit without an answer within which the database may still carry it out."""

AT_ONCE = 5_000
"""Ids read in one operation of the writer, so that other writes are not delayed."""

BUSY_IDS = 64
PACE_S = 0.05
"""Pause after a read that named `BUSY_IDS` or more: a task that starts and ends meanwhile is read once."""

RULES, QUOTAS, ACCOUNTS, SUBSCRIBERS = 1, 2, 3, 4
WHOLE = 16
"""Ids below name tables, as in migrations 0013 and 0023."""

ACCOUNT_TABLES = frozenset({"users", "memberships", "teams"})
TASK_TABLES = ROW_TABLES - {"nodes"} | {"batches"}


def leadership_changed(server: Server, membership: Membership) -> None:
    """Called when this replica begins or ceases to lead: its state is rebuilt, under a new term if it leads."""
    server.nodes.elsewhere.forget_heartbeats()
    server.picture.invalidate()
    membership.wake.call()


class FollowChanges:
    name = "follow"

    def __init__(self, server: Server, membership: Membership) -> None:
        self.wake = membership.wake
        self.every_s = EVERY_S
        self._server, self._membership = server, membership
        self._cursor: int | None = None  # None: start anew
        self._applied: set[int] = set()  # transactions at or above the cursor
        self._left_out: set[int] = (
            set()
        )  # leases of slots that the state has not free yet: read again
        self._unknown = 0  # own commits without an answer that were dealt with
        self._doubt_until = Instant(0)  # until then own changes are applied like those of others
        self._beat_at = self._read_at = self._pruned_at = self._seen_at = Instant(0)
        """Times of the last heartbeat, read, deletion and view of others' nodes, by `lease_time`."""
        self._sent = SentFrames(server)

    async def run_once(self, now: Instant) -> None:
        server, passed = self._server, self._server.nodes.lease_time(now)
        if passed - self._beat_at >= HEARTBEAT_EVERY or not self._beat_at:
            self._beat_at = passed
            await self._heartbeat(now)
        if passed - self._read_at > KEEP_CHANGES // 2:
            self._cursor = None  # changes may have been deleted unread
        began_s = monotonic()
        if self._unknown != server.picture.validity.unknown_commits:
            # The feed skips own changes, and these were not delivered; a commit may even arrive later.
            self._cursor, self._doubt_until = None, Instant(passed + DOUBT)
        read = 0
        if self._cursor is None:
            await self._start_anew()
        else:
            read = await self._read(now)
        self._read_at = passed
        self._membership.caught_up(passed)
        server.reads.confirmed_s = began_s + EVERY_S
        if self._membership.leads and passed - self._seen_at >= server.settings.beat_every // 2:
            self._seen_at = passed
            await self._see_others(server.now)
        if not self._membership.leads:
            await self._follow_time(now)
        if passed - self._pruned_at >= PRUNE_EVERY:
            self._pruned_at = passed
            server.picture.drop_unused_specs()
            if self._membership.leads:
                await self._membership.prune_feed()
                await server.write(replicas.forget_proofs(now))
        if read >= BUSY_IDS:
            await asyncio.sleep(PACE_S)

    async def _follow_time(self, now: Instant) -> None:
        """Do for a follower's state what the leader's passes do: rebuild it, end backoffs, apply rules that are due."""
        picture = self._server.picture
        if picture.is_stale:
            await picture.rebuild(now)
        picture.advance(now)

    async def _heartbeat(self, now: Instant) -> None:
        server, membership = self._server, self._membership
        if not await membership.heartbeat(server.picture.term):
            log.warning("this replica was taken for dead; its nodes connect again")
            for connection in server.nodes.connections:
                connection.refuse("unreachable", "the server was silent; connect again", retry=True)
        dead = membership.dead
        if dead and membership.leads and server.picture.term:
            await self._bury(dead, now)

    async def _bury(self, dead: Collection[int], now: Instant) -> None:
        """Remove dead replicas. Their nodes have a full lease time from now to connect elsewhere."""
        server = self._server
        left = await server.write(replicas.bury(dead, server.picture.term))
        if left is None:
            server.picture.invalidate()
            return
        log.warning("replicas are dead", replicas=dead, nodes=len(left))
        for node in left:
            server.nodes.extend_deadline(node, now, server.nodes.heard_at.get(node))
            if server.nodes.elsewhere.place(node, None):
                server.picture.refresh_node(node)

    # ---- the feed

    async def _start_anew(self) -> None:
        """Read everything again: the state, and the leases of the own nodes. A failure is followed by another attempt."""
        server = self._server
        unknown, cursor = server.picture.validity.unknown_commits, await self._membership.horizon()
        server.picture.invalidate()
        server.reads.clear()
        server.credentials.forget()
        server.gate.forget()
        await policy.refresh(server)
        await quotas.refresh(server)
        await server.events.subscribers.refresh(server.store, server.now)
        await self._see_others(server.now)
        for node in await server.store.read(replicas.holders(self._nodes_here())):
            await self._send_again(node)
        self._unknown, self._cursor, self._applied = unknown, cursor, set()
        self._left_out.clear()

    async def _see_others(self, now: Instant) -> None:
        """Read which nodes other replicas have, and their stored heartbeats: a new one begins a lease time."""
        server, elsewhere = self._server, self._server.nodes.elsewhere
        seen: set[NodeId] = set()
        for heard in await server.store.read(replicas.connected_elsewhere(self._membership.id)):
            node, beat = heard.node_id, heard.last_beat_at or Instant(0)
            if server.nodes.connection(node) is not None:
                continue  # it has just connected here
            seen.add(node)
            if elsewhere.is_new(node, beat):
                server.nodes.extend_deadline(node, now, beat)
            if elsewhere.place(node, heard.replica_id):
                server.picture.refresh_node(node)
        for node in set(elsewhere.nodes) - seen:
            if elsewhere.place(node, None):
                server.picture.refresh_node(node)

    async def _read(self, now: Instant) -> int:
        """Apply the changes of the others; return the number of rows that they name."""
        assert self._cursor is not None
        in_doubt = self._server.nodes.lease_time(now) < self._doubt_until
        page = await self._membership.read(self._cursor, with_own=in_doubt)
        named: dict[int, None] = dict.fromkeys(sorted(self._left_out))
        for change in page.changes:
            if change.xid not in self._applied:
                named.update(dict.fromkeys(change.ids))
        if named:
            try:
                await self._apply(list(named), now)
            except BaseException:
                self._sent.forget()  # the same changes are read again
                raise
        self._applied = {each.xid for each in page.changes if each.xid >= page.horizon}
        self._cursor = page.horizon
        return len(named)

    async def _apply(self, named: Sequence[int], now: Instant) -> None:
        server = self._server
        if RULES in named:
            await policy.refresh(server)
        if QUOTAS in named:
            await quotas.refresh(server)
        if SUBSCRIBERS in named:
            await server.events.subscribers.refresh(server.store, server.now)
        self._touch(named)
        if ACCOUNTS in named:
            server.credentials.forget()
            server.gate.forget()
            await self._disconnect_suspended()
        ids = [id_ for id_ in named if id_ >= WHOLE]
        for first in range(0, len(ids), AT_ONCE):
            some = ids[first : first + AT_ONCE]
            specs, here = server.picture.specs, self._nodes_here()
            wanted = FollowedIds(
                some, here, specs.known, specs.with_secrets, specs.with_checkpoints
            )
            rows = await server.picture.write(replicas.changed_rows(wanted))
            if rows.nodes or any(NodeId(id_) in server.picture.state.nodes for id_ in some):
                server.reads.touch(Touch({"nodes", "gpus"}))
            self._absorb(rows, some, now)
            await self._deliver(rows, here)

    def _touch(self, named: Sequence[int]) -> None:
        """Drop cached rows that another replica changed; pages of nodes follow when the rows are known."""
        ids = {id_ for id_ in named if id_ >= WHOLE}
        tables = set(ACCOUNT_TABLES) if ACCOUNTS in named else set()
        self._server.reads.touch(Touch(tables | TASK_TABLES if ids else tables, ids))

    def _nodes_here(self) -> set[NodeId]:
        return {connection.node for connection in self._server.nodes.connections}

    async def _disconnect_suspended(self) -> None:
        """Close connections of nodes whose owner was suspended at another replica, which ends their leases."""
        server = self._server
        for node in await server.store.read(replicas.not_lending(self._nodes_here())):
            server.nodes.disconnect(node, nodes.MAY_NOT_LEND)

    def _absorb(self, rows: ChangedRows, named: Iterable[int], now: Instant) -> None:
        """Fold the rows, before the next await."""
        server, picture = self._server, self._server.picture
        teams = {row.spec_id: row.team_id for row in rows.tasks}
        for id_, (user, spec) in rows.specs.items():
            picture.specs.add_stored(id_, user, spec, teams.get(id_))
        self._place_nodes(rows, named, now)
        if not picture.is_stale:
            try:
                found = difference(picture.state, rows, self._shape_of, picture.rejected)
            except UnknownSpec as error:
                log.warning("a spec is not known; rebuilding the state", spec=str(error))
                picture.invalidate()
            else:
                self._left_out -= set(named)
                self._left_out |= set(found.left_out)
                self._fold(found, now)
        server.hub.publish({*named, *(row.batch_id for row in rows.tasks)})
        picture.changed.call()

    def _fold(self, found: Difference, now: Instant) -> None:
        picture = self._server.picture
        lost = [each.node for each in found.requeued if each.reason is EndReason.LOST]
        for node in dict.fromkeys(lost):
            picture.add_loss(node)
        picture.absorb(found.recording(), is_own=False)
        for leased in found.leased:
            picture.forecasts.started(leased.tasks, now)
            picture.fold(leased)
            if picture.term:
                self._server.nodes.ensure_deadline(leased.node, now)
        for queued in found.queued:
            picture.fold(queued)
            if not queued.tasks[0].epoch:
                picture.forecasts.arrived(queued.shape, queued.tasks[0].queued_at)
        if found.preempted:
            picture.fold(TasksPreempted(tuple(found.preempted)))

    def _shape_of(self, task: TaskId, spec: SpecId) -> Shape | None:
        picture = self._server.picture
        shape = picture.specs.shape(spec)
        return None if shape is None else picture.nodes.failed_starts.shape_for(task, shape)

    def _place_nodes(self, rows: ChangedRows, named: Iterable[int], now: Instant) -> None:
        server, registry = self._server, self._server.nodes
        for row in rows.nodes:
            node = row.node.id
            replica = rows.places.get(node)
            if replica == self._membership.id:
                replica = None  # the connection itself counts
            else:
                registry.disconnect(node, "this node connected to another server", retry=True)
            if registry.elsewhere.place(node, replica) and replica is not None:
                registry.ensure_deadline(node, now)
            server.picture.node_changed(row.node)
        present = {row.node.id for row in rows.nodes}
        for id_ in named:
            if id_ not in present and NodeId(id_) in server.picture.state.nodes:
                server.gate.forget()
                server.picture.node_removed(NodeId(id_))

    # ---- delivery

    async def _deliver(self, rows: ChangedRows, here: Collection[NodeId]) -> None:
        """Send leases and stops of nodes that were connected here when the rows were read; later ones were reconciled."""
        server = self._server
        held = [row for row in rows.tasks if row.holding and row.node_id in here]
        await self._grant(self._sent.unsent_grants(held), rows)
        server.nodes.stop(self._sent.unsent_cancels(held), StopReason.CANCELLED)
        server.nodes.stop(self._sent.unsent_preemptions(held), StopReason.PREEMPTED)
        for node in {node for gang in rows.gangs for node in gang.nodes}.intersection(here):
            await self._send_again(node)

    async def _grant(self, granted: Sequence[ChangedTask], rows: ChangedRows) -> None:
        server = self._server
        secrets, undecryptable = server.sealer.opened(rows.secrets)
        by_node: dict[NodeId, list[HeldLease]] = {}
        ended = []
        for row in granted:
            assert row.node_id is not None
            if row.spec_id in undecryptable:
                failed = delivery.undecryptable_secret(row.id, row.epoch)
                ended.append((row.node_id, [failed]))
            else:
                by_node.setdefault(row.node_id, []).append(_lease(row))
        for node, held in by_node.items():
            connection = server.nodes.connection(node)
            entry = server.picture.state.nodes.get(node)
            if connection is None or entry is None or entry.node is None:
                continue  # it receives them when it connects
            lines = reconciliation.wire_lines(held, entry.node.owner, rows.checkpoints, {})
            connection.grant(lines, server.picture.specs.spec, secrets)
        if ended:
            server.picture.absorb(await server.write(leases.record(ended, server.now)))

    async def _send_again(self, node: NodeId) -> None:
        """Send all leases and stops of one own node, as if it had just connected; it ignores what it has."""
        server = self._server
        stored = await server.write(reconciliation.stored_leases(node))
        connection = server.nodes.connection(node)
        if stored is not None and isinstance(connection, NodeChannel):
            await connection.send_leases(stored)


def _lease(row: ChangedTask) -> HeldLease:
    assert row.allocation_number is not None
    assert row.allocation is not None
    return HeldLease(
        task=row.id,
        epoch=row.epoch,
        user=row.user_id,
        status=TaskStatus.LEASED,
        spec=row.spec_id,
        allocation=allocation_from(row.allocation_number, row.allocation),
        payload=row.payload or b"",
        payload_sha256=row.payload_sha256,
    )
