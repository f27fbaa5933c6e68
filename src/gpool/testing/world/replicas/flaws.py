"""Known bugs of replicas, planted by replacing a component of each replica; the World must find each."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from gpool.core.ids import NodeId
from gpool.core.model import Instant, Span
from gpool.core.scheduler.state.events import Placement
from gpool.server.identity.node_proofs import NodeAuthenticator
from gpool.server.nodes.registry import NodeRegistry
from gpool.server.replicas.follow import AT_ONCE, WHOLE, FollowChanges
from gpool.server.scheduling.picture import StatePicture
from gpool.server.scheduling.scheduler import Scheduler
from gpool.server.store.drivers.replica_sessions import FeedPage
from gpool.server.store.operations import replicas
from gpool.server.store.operations.leases.connections import CURRENT_LINK
from gpool.server.store.operations.replicas import ChangedRows, ChangedTask, FollowedIds
from gpool.server.store.protocol import Operation, operation
from gpool.server.store.rows import values
from gpool.testing.world.faults import FaultKind
from gpool.testing.world.flaws import DeafChannel, rewritten
from gpool.testing.world.host import Parts
from gpool.testing.world.replicas.faults import ReplicaFault
from gpool.testing.world.replicas.host import ReplicaParts
from gpool.testing.world.replicas.sessions import ReplicaStore, SimulatedFeedLink

T = TypeVar("T")


class ReplicaFlaw(StrEnum):
    PLAN_NOT_FENCED = "plan_not_fenced"
    HELLO_NOT_FENCED = "hello_not_fenced"
    REPORTS_NOT_FENCED = "reports_not_fenced"
    CURSOR_PAST_HORIZON = "cursor_past_horizon"
    UNKNOWN_COMMIT_SKIPPED = "unknown_commit_skipped"
    ROWS_READ_BESIDE_THE_WRITER = "rows_read_beside_the_writer"
    LEASES_NOT_RESENT = "leases_not_resent"
    NEW_LEADER_GIVES_NO_LEASE_TIME = "new_leader_gives_no_lease_time"
    DEAD_REPLICA_GIVES_NO_LEASE_TIME = "dead_replica_gives_no_lease_time"
    STOP_NOT_DELIVERED = "stop_not_delivered"
    GRANT_NOT_DELIVERED = "grant_not_delivered"
    PROOF_USED_TWICE = "proof_used_twice"


# ---- the store


@operation
def _newest_term() -> Operation[int]:
    [term] = yield from values(int, "SELECT term FROM scheduler_term WHERE id = 1")
    return term


class UnfencedScheduler(Scheduler):
    """Writes a plan under the newest term, whoever took it."""

    async def _start(self, places: Sequence[Placement], term: int, now: Instant) -> int:
        term = await self._picture.write(_newest_term())
        return await super()._start(places, term, now)


class UnfencedHello(ReplicaStore):
    """Accepts a delayed `Hello` that another replica has seen a newer one of."""

    async def write(self, operation: Operation[T]) -> T:
        return await super().write(rewritten(operation, _any_hello))


def _any_hello(sql: str) -> str:
    order = "WHERE (node_connections.boot, node_connections.beat) < (excluded.boot, excluded.beat) "
    return sql.replace(order, "")


class UnfencedReports(ReplicaStore):
    """Records reports that came by an older connection of their node."""

    async def write(self, operation: Operation[T]) -> T:
        return await super().write(rewritten(operation, _any_link))


def _any_link(sql: str) -> str:
    return sql.replace(CURRENT_LINK, "JOIN node_connections c ON c.node_id = l.node ")


# ---- the feed


class EagerLink(SimulatedFeedLink):
    """Moves the cursor past transactions that are still open."""

    async def read(self, cursor: int, without: int | None = None) -> FeedPage:
        page = await super().read(cursor, without)
        newest = max((each.xid + 1 for each in page.changes), default=page.horizon)
        return FeedPage(max(page.horizon, newest), page.changes)


class CarefreePicture(StatePicture):
    """Stays valid after a commit whose answer was lost; the feed skips own changes."""

    @contextmanager
    def commit(self) -> Iterator[None]:
        yield


class BesideTheWriter(FollowChanges):
    """Reads the named rows by a reader, so that they may be older than commits folded before."""

    async def _apply(self, named: Sequence[int], now: Instant) -> None:
        server = self._server
        ids = [id_ for id_ in named if id_ >= WHOLE][:AT_ONCE]
        specs, here = server.picture.specs, self._nodes_here()
        wanted = FollowedIds(ids, here, specs.known, specs.with_secrets, specs.with_checkpoints)
        rows = await server.store.read(replicas.changed_rows(wanted))
        self._absorb(rows, ids, now)
        await self._deliver(rows, here)


class StoplessFollow(FollowChanges):
    async def _deliver(self, rows: ChangedRows, here: Collection[NodeId]) -> None:
        held = [row for row in rows.tasks if row.holding and row.node_id in here]
        await self._grant(self._sent.unsent_grants(held), rows)


class GrantlessFollow(FollowChanges):
    async def _grant(self, granted: Sequence[ChangedTask], rows: ChangedRows) -> None: ...


# ---- lease times


class NoLeaseTime(NodeRegistry):
    def ensure_deadline(self, node: NodeId, now: Instant) -> None:
        self._deadlines[node] = Instant(self.lease_time(now) - 1)
        self.heard_at[node] = now


class ImpatientFollow(FollowChanges):
    """Expires the nodes of a dead replica at once."""

    async def _bury(self, dead: Collection[int], now: Instant) -> None:
        registry = self._server.nodes
        await super()._bury(dead, now)
        for node in list(registry._deadlines):
            if not registry.is_connected(node):
                registry.shorten_deadline(node, now, Span(0))
                registry.heard_at[node] = now


# ---- proofs


def _forgetful_gate(*arguments: Any, **options: Any) -> NodeAuthenticator:
    """Remembers used proofs in its process only."""
    return NodeAuthenticator(*arguments, **{**options, "is_shared": False})


@dataclass(frozen=True, slots=True)
class Planted:
    """Components with a bug, and the faults (of replicas, of nodes) that show it."""

    own: ReplicaParts = field(default_factory=ReplicaParts)
    common: Parts = field(default_factory=Parts)
    only: tuple[str, ...] = ()
    of_nodes: tuple[FaultKind, ...] = ()

    def repaired(self) -> Planted:
        """The same faults without the bug."""
        return Planted(only=self.only, of_nodes=self.of_nodes)


SOUND = Planted()
R = ReplicaFault
PLANTED: dict[ReplicaFlaw, Planted] = {
    ReplicaFlaw.PLAN_NOT_FENCED: Planted(
        common=Parts(scheduler=UnfencedScheduler), only=(R.PAUSE_LEADER, R.LOSE_LOCK)
    ),
    ReplicaFlaw.HELLO_NOT_FENCED: Planted(
        ReplicaParts(store=UnfencedHello), only=(R.DRAIN,), of_nodes=(FaultKind.STALL,)
    ),
    ReplicaFlaw.REPORTS_NOT_FENCED: Planted(ReplicaParts(store=UnfencedReports)),
    ReplicaFlaw.CURSOR_PAST_HORIZON: Planted(
        ReplicaParts(link=EagerLink), only=("late_commits", "lost_notify")
    ),
    ReplicaFlaw.UNKNOWN_COMMIT_SKIPPED: Planted(
        common=Parts(picture=CarefreePicture), only=("lost_answers",)
    ),
    ReplicaFlaw.ROWS_READ_BESIDE_THE_WRITER: Planted(
        ReplicaParts(follow=BesideTheWriter), only=(R.SLOW_FEED, "late_commits")
    ),
    ReplicaFlaw.LEASES_NOT_RESENT: Planted(
        common=Parts(channel=DeafChannel), only=(R.KILL, R.DRAIN)
    ),
    ReplicaFlaw.NEW_LEADER_GIVES_NO_LEASE_TIME: Planted(
        common=Parts(registry=NoLeaseTime), only=(R.KILL_LEADER, R.DRAIN)
    ),
    ReplicaFlaw.DEAD_REPLICA_GIVES_NO_LEASE_TIME: Planted(
        ReplicaParts(follow=ImpatientFollow), only=(R.PAUSE, R.PAUSE_LEADER)
    ),
    ReplicaFlaw.STOP_NOT_DELIVERED: Planted(ReplicaParts(follow=StoplessFollow), only=(R.DRAIN,)),
    ReplicaFlaw.GRANT_NOT_DELIVERED: Planted(ReplicaParts(follow=GrantlessFollow), only=(R.DRAIN,)),
    ReplicaFlaw.PROOF_USED_TWICE: Planted(
        common=Parts(gate=_forgetful_gate), only=(R.DRAIN, "replays")
    ),
}
