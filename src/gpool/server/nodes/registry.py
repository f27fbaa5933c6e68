"""Registry of nodes: connections, heartbeats, lease deadlines, losses, backoff. In memory; it writes and plans nothing.

**Lease expiry.** All leases of a node end at its deadline: the last heartbeat the server received plus `ttl_s`. The
agent's own deadline is earlier: the time it *sent* the last confirmed heartbeat plus `ttl_s` minus `margin_s`; then it
kills its tasks. So the agent stops before the server reassigns, whatever the network delay, if both clocks run at
about the same rate.

Example with the default `ttl_s` = 30, `margin_s` = 5 and `beat_s` = 8; the network breaks at 12:00:10:

    12:00:08   agent sends heartbeat 2; the server receives and confirms it at 12:00:09
               agent deadline 12:00:08 + 30 - 5 = 12:00:33, server deadline 12:00:09 + 30 = 12:00:39
    12:00:16   agent sends heartbeat 3; it is lost, and so are the next ones
    12:00:33   agent kills its tasks
    12:00:39   server expires the node: its tasks are queued again (`scheduling.loops.ExpireNodes`)

A heartbeat received after the expiry is answered with the leases the agent must drop. Three rules keep a lease from
ending early:

- Deadlines count elapsed time (`elapsed`), not the time of day: setting the clock forward expires nobody.
- A server that starts, or rebuilds its picture, gives each node that holds leases a full `ttl_s` from then.
- The deadline moves before the heartbeat is committed. If the commit fails, leases end late, not early.

**Blocked nodes.** A gang's slots are released together, by its last member. A member that has not released them 15
minutes after the gang's end (`scheduling.loops.BlockOverdueNodes`) would keep all of them. A member cannot be ended
alone, so the server blocks its node: closes the connection and refuses new ones until its deadline has passed as for
any silent node. Overdue leases of single-node tasks are ended one by one (`scheduling.overdue`).

**Connections.** A newer one replaces the older one. `boot` (one start of the agent) and the heartbeat's number order
the frames of a node, so that a delayed `Hello` never overrides a newer one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple, Protocol

from gpool.core.ids import NodeId, TaskId
from gpool.core.model import Instant, Merit, Node, Span, TaskSpec
from gpool.core.scheduler.state.waiting import HeldAllocation
from gpool.server.metrics import Metrics
from gpool.server.scheduling.backoff import FailedStarts, NodeBackoff
from gpool.server.store.values import Recording
from gpool.wire.frames import Hold, Line, Secret, StopReason, ToGpu

OpenSecrets = Mapping[int, tuple[Secret, ...]]
"""By spec: decrypted secrets on their way to a node; kept nowhere."""


class NodeConnection(Protocol):
    """A node's connection as scheduling uses it. Nothing is sent once it is closed.

    `is_behind`: reports were not recorded in the read-only mode; its agent sends them on its next connection.
    """

    node: NodeId
    is_behind: bool

    def grant(
        self, lines: Iterable[Line], spec_of: Callable[[int], TaskSpec | None], secrets: OpenSecrets
    ) -> None: ...

    def stop(self, holds: tuple[Hold, ...], reason: StopReason) -> None: ...

    def tell_gpu(self, frame: ToGpu) -> None: ...

    def refuse(self, code: str, detail: str, *, retry: bool, to: str = "") -> None: ...


class HeartbeatNumber(NamedTuple):
    boot: str
    number: int


class NodesElsewhere:
    """Nodes connected to other replicas, and the stored heartbeats that this one has seen. Empty without replicas."""

    def __init__(self) -> None:
        self._replicas: dict[NodeId, int] = {}
        self._seen: dict[NodeId, Instant] = {}

    def __contains__(self, node: NodeId) -> bool:
        return node in self._replicas

    @property
    def nodes(self) -> Collection[NodeId]:
        return self._replicas.keys()

    def counts(self) -> Mapping[int, int]:
        """Number of nodes by replica; replicas without nodes are absent."""
        return Counter(self._replicas.values())

    def place(self, node: NodeId, replica: int | None) -> bool:
        """Record the replica that has the node's connection, None: no other one has; whether that is a change."""
        was = node in self._replicas
        if replica is None:
            self._replicas.pop(node, None)
        else:
            self._replicas[node] = replica
        return was != (replica is not None)

    def is_new(self, node: NodeId, beat: Instant) -> bool:
        """Remember a stored heartbeat; whether it differs from the last one."""
        if self._seen.get(node) == beat:
            return False
        self._seen[node] = beat
        return True

    def heartbeat(self, node: NodeId) -> Instant | None:
        return self._seen.get(node)

    def forget_heartbeat(self, node: NodeId) -> None:
        """Called when a newer one was stored than seen here: the node has a lease time from then."""
        self._seen.pop(node, None)

    def forget_heartbeats(self) -> None:
        """Called when this replica begins to lead: each node gets a full lease time."""
        self._seen.clear()

    def forget(self, node: NodeId) -> None:
        self._replicas.pop(node, None)
        self._seen.pop(node, None)


class NodeRegistry:
    def __init__(
        self, metrics: Metrics, ttl: Span, elapsed: Callable[[], Instant] | None = None
    ) -> None:
        self.backoff = NodeBackoff()
        self.failed_starts = FailedStarts(self.backoff)
        self._metrics = metrics
        self._ttl = ttl
        self._elapsed = elapsed  # None: deadlines go by the time of day
        self._connections: dict[NodeId, NodeConnection] = {}
        self.elsewhere = NodesElsewhere()
        self._heartbeats: dict[NodeId, HeartbeatNumber] = {}
        self._deadlines: dict[NodeId, Instant] = {}  # in time of `lease_time`
        # time of day of the last heartbeat, or of `ensure_deadline`
        self.heard_at: dict[NodeId, Instant] = {}
        self._blocked: set[NodeId] = set()
        self._losses: dict[NodeId, int] = {}
        self._reliability: Mapping[NodeId, Merit] = {}

    # ---- connections

    def connection(self, node: NodeId) -> NodeConnection | None:
        return self._connections.get(node)

    @property
    def connections(self) -> tuple[NodeConnection, ...]:
        return tuple(self._connections.values())

    def is_connected(self, node: NodeId) -> bool:
        """Whether any replica has the node's connection."""
        return node in self._connections or node in self.elsewhere

    def attach(self, connection: NodeConnection) -> None:
        self._connections[connection.node] = connection
        self.elsewhere.forget(connection.node)
        self._metrics.nodes.set(len(self._connections))

    def detach(self, connection: NodeConnection) -> bool:
        if self._connections.get(connection.node) is not connection:
            return False
        del self._connections[connection.node]
        self._metrics.nodes.set(len(self._connections))
        return True

    def disconnect(self, node: NodeId, why: str, *, retry: bool = False) -> None:
        connection = self._connections.get(node)
        if connection is not None:
            connection.refuse("conflict", why, retry=retry)

    def stop(self, holds: Sequence[tuple[NodeId, Hold]], reason: StopReason) -> None:
        """Send `Stop` to connected nodes; the others receive it when they connect."""
        for node, pairs in groupby(sorted(holds, key=itemgetter(0)), key=itemgetter(0)):
            connection = self._connections.get(node)
            if connection is not None:
                connection.stop(tuple(hold for _, hold in pairs), reason)

    # ---- heartbeats and deadlines

    def newest_heartbeat(self, node: NodeId) -> HeartbeatNumber | None:
        return self._heartbeats.get(node)

    def set_newest_heartbeat(self, node: NodeId, boot: str, number: int) -> None:
        self._heartbeats[node] = HeartbeatNumber(boot, number)

    def extend_deadline(self, node: NodeId, now: Instant, heard_at: Instant | None = None) -> None:
        """`heard_at`: the stored heartbeat of a node that another replica hears; else it is heard `now`."""
        self._deadlines[node] = Instant(self.lease_time(now) + self._ttl)
        self.heard_at[node] = now if heard_at is None else heard_at

    def ensure_deadline(self, node: NodeId, now: Instant) -> None:
        if node not in self._deadlines:
            self.extend_deadline(node, now)

    def shorten_deadline(self, node: NodeId, now: Instant, left: Span) -> None:
        known = self._deadlines.get(node)
        if known is not None:
            self._deadlines[node] = min(known, Instant(self.lease_time(now) + left))

    def lease_time(self, now: Instant) -> Instant:
        return now if self._elapsed is None else self._elapsed()

    def expired(self, now: Instant) -> Sequence[NodeId]:
        at = self.lease_time(now)
        return [node for node, deadline in self._deadlines.items() if deadline < at]

    def is_expired(self, node: NodeId, now: Instant) -> bool:
        deadline = self._deadlines.get(node)
        return deadline is not None and deadline < self.lease_time(now)

    def drop_expired_deadline(self, node: NodeId, now: Instant) -> None:
        """Drop the deadline of a node whose leases were released, unless a heartbeat has moved it."""
        if self.is_expired(node, now):
            del self._deadlines[node]

    def block(self, node: NodeId) -> bool:
        is_new = node not in self._blocked
        self._blocked.add(node)
        return is_new

    def is_blocked(self, node: NodeId) -> bool:
        if node in self._blocked and node not in self._deadlines:
            self._blocked.discard(node)
        return node in self._blocked

    # ---- reliability and backoff

    def add_loss(self, node: NodeId) -> None:
        self._losses[node] = self._losses.get(node, 0) + 1

    def take_losses(self) -> Mapping[NodeId, int]:
        losses, self._losses = self._losses, {}
        return losses

    def set_reliability(self, reliability: Mapping[NodeId, Merit]) -> None:
        self._reliability = reliability

    def count(
        self, recording: Recording, held: Mapping[TaskId, HeldAllocation], now: Instant | None
    ) -> Iterable[NodeId]:
        """Count a recording for and against nodes, before it is folded; return nodes whose backoff begins (none without `now`)."""
        begins: list[NodeId] = []
        if now is not None and (recording.requeued or (recording.ended and self.backoff.is_any)):
            begins += self.backoff.count(recording, held, now)
        if self.failed_starts.is_any or recording.requeued:
            begins += self.failed_starts.count(recording, held, now)
        return begins

    def annotated(self, node: Node) -> Node:
        connected = self.is_connected(node.id)
        merit = self._reliability.get(node.id, node.merit)
        resting = self.backoff.reason(node.id)
        if (node.connected, node.merit, node.resting) == (connected, merit, resting):
            return node
        return replace(node, connected=connected, merit=merit, resting=resting)

    def forget(self, node: NodeId) -> None:
        self._deadlines.pop(node, None)
        self.heard_at.pop(node, None)
        self._heartbeats.pop(node, None)
        self.elsewhere.forget(node)
        self._blocked.discard(node)
        self.backoff.forget(node)
        self.failed_starts.forget_node(node)
