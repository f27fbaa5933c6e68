"""One agent's connection, without a transport: frames in by `receive`, one at a time in order, frames out by `send`.

At `Hello` the agent's leases are reconciled with the store (`reconciliation`). An answer follows the commit that
covers it. A newer connection of the node replaces the older one. The transport closes after `Refused`.
One file because each frame changes the same few facts about one connection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import msgspec

from gpool.core.errors import Forbidden, GpoolError, NotFound
from gpool.core.ids import NodeId, SpecId, TaskId
from gpool.core.model import SECOND, EndReason, Instant, Offer, TaskSpec, TaskStatus
from gpool.core.money.prices import is_priced
from gpool.server.nodes import reconciliation
from gpool.server.nodes.reconciliation import NotRegistered, StoredLeases
from gpool.server.nodes.registry import HeartbeatNumber, OpenSecrets
from gpool.server.nodes.reports import (
    MAX_ITEMS,
    checked_report,
    offer_problem,
    offer_without_ids,
    report_without_ids,
)
from gpool.server.scheduling import delivery
from gpool.server.scheduling.picture import StatePicture
from gpool.server.server import Server
from gpool.server.settings import Settings
from gpool.server.store.operations import nodes, replicas
from gpool.server.store.operations.leases import leases
from gpool.server.store.operations.leases.connections import NodeLink
from gpool.server.store.protocol import Operation
from gpool.server.store.values import HeldLease, NodeCredentials, NodeRow, Recording
from gpool.wire.frames import (
    OLDEST_PROTOCOL,
    PROTOCOL,
    AgentFrame,
    Beat,
    BeatSeen,
    Finished,
    FromAgent,
    Grants,
    Hello,
    Hold,
    Line,
    OfferChanged,
    Recorded,
    Refused,
    Reports,
    Secret,
    ServerFrame,
    Stop,
    StopReason,
    ToGpu,
    Welcome,
    common_protocol,
    weight_of,
)

MAX_HOLDS = 200_000
MAX_BOOT_LETTERS = 200  # kept in memory
REPLACED = "replaced by a newer connection of this node"


class NodeChannel:
    def __init__(
        self, server: Server, credentials: NodeCredentials, send: Callable[[ServerFrame], None]
    ) -> None:
        self.node: NodeId = credentials.node
        self.closed = False
        self._server = server
        self._owner = credentials.owner
        self._send = send
        self._greeted = False
        self._boot = ""
        self._beat = 0
        self._specs_sent: set[SpecId] = set()
        self._unstated: set[TaskId] = set()
        self._leaving = False  # its agent stops
        self.is_behind = (
            False  # reports were not recorded: its agent sends them on its next connection
        )
        self._compared_at = Instant(0)  # last comparison of a heartbeat with the picture
        self.link: NodeLink | None = None  # its row, where replicas exist

    async def receive(self, frame: AgentFrame) -> None:
        if self.closed:
            return
        self._server.metrics.signals.agents.count_frame(frame)
        if isinstance(frame, Hello):
            await self.greet(frame)
        elif not self._greeted:
            self.refuse("invalid", "the first frame must be Hello", retry=False)
        elif isinstance(frame, Reports):
            await self._record(frame)
        elif isinstance(frame, Beat):
            await self._take_beat(frame)
        elif isinstance(frame, OfferChanged):
            await self._change_offer(frame)
        elif self._server.examiner is not None:
            await self._server.examiner.take(self.node, frame)

    async def greet(self, hello: Hello) -> None:
        server, registry = self._server, self._server.nodes
        wrong = _hello_problem(hello, server.settings, greeted=self._greeted)
        if wrong is not None:
            self.refuse("invalid", wrong, retry=False)
            return
        now = server.now
        if self._is_overtaken(hello) or self._is_blocked():
            return
        registry.disconnect(self.node, REPLACED, retry=True)
        registry.extend_deadline(self.node, now)
        # Before the write: an older Hello that arrives during it must not overwrite this one's offer.
        registry.set_newest_heartbeat(self.node, hello.boot, hello.beat)
        gpu_ids = server.ids.take(len(hello.offer.gpus))
        offer = self._kept(hello.offer)
        if server.replica.id:
            self.link = NodeLink(server.replica.id, hello.boot, hello.beat)
        try:
            registered = await server.write(
                reconciliation.register(
                    self.node, offer, gpu_ids, now, server.offer_terms, self.link
                )
            )
        except Forbidden as error:
            self.refuse(error.code, error.detail, retry=error.detail != nodes.MAY_NOT_LEND)
            return
        if isinstance(registered, StoredLeases):  # even if this connection is closed by now
            server.picture.node_changed(registered.row.node)
            if not self.closed:
                registered = await self._connected(registered)
        if self.closed:
            return
        if registered is NotRegistered.OVERTAKEN:
            self._refuse_overtaken()
            return
        if registered is NotRegistered.REMOVED:
            self.refuse("not_found", "this node was removed; join again", retry=False)
            return
        if registry.newest_heartbeat(self.node) != (hello.boot, hello.beat):
            self._refuse_overtaken()
            return
        registry.disconnect(self.node, REPLACED, retry=True)
        self._greeted = True
        self._boot, self._beat = hello.boot, hello.beat
        await self._reconcile(hello, registered)

    async def _connected(self, registered: StoredLeases) -> StoredLeases | NotRegistered:
        """Open the connection; return the leases as they are stored then: more may have been granted meanwhile."""
        server = self._server
        took_time = await _took_time(server, registered.row)
        if self.link is not None and not self.closed:
            return await server.write(reconciliation.connect(self.node, self.link))
        if not took_time:
            return registered
        stored = await server.write(reconciliation.stored_leases(self.node))
        return NotRegistered.REMOVED if stored is None else stored

    async def _reconcile(self, hello: Hello, stored: StoredLeases) -> None:
        """Send the leases the agent must drop, stop and start; end leases it cannot run.

        All frames are sent before the first await: a cancellation must not overtake the grant it stops.
        """
        server = self._server
        stated = set(hello.holds)
        open_leases = {Hold(lease.task, lease.epoch): lease for lease in stored.held}
        settings = server.settings
        self._send(
            Welcome(
                node=self.node,
                beat=hello.beat,
                ttl_us=settings.ttl,
                margin_us=settings.margin,
                beat_every_us=settings.beat_every,
                drop=tuple(hold for hold in hello.holds if hold not in open_leases),
                protocol=common_protocol(hello.protocol, hello.oldest_protocol) or PROTOCOL,
                joint_signatures=True,
            )
        )
        server.nodes.attach(self)
        server.picture.node_changed(stored.row.node)
        # Unstated leases too: only the agent can confirm that it has nothing of them.
        stop = tuple(
            hold for hold, lease in open_leases.items() if lease.status is TaskStatus.CANCELLED
        )
        if stop:
            self._send(Stop(stop, StopReason.CANCELLED))
        missing = [lease for hold, lease in open_leases.items() if hold not in stated]
        undecryptable = self._grant_again(missing, stored)
        if stored.preempting:  # after the grants: the agent returns what it was just granted again
            self._send(Stop(stored.preempting, StopReason.PREEMPTED))
        # An agent that restarted: an attempt runs once under its epoch, so the lease is lost.
        lost = [lease for lease in missing if lease.status is TaskStatus.RUNNING]
        ended = [delivery.undecryptable_secret(each.task, each.epoch) for each in undecryptable]
        ended += [Finished(lease.task, lease.epoch, EndReason.LOST) for lease in lost]
        if (
            ended and not server.read_only.is_on
        ):  # else after the mode: heartbeats lack these leases
            recording = await server.write(self._recording(ended))
            if lost:
                server.picture.add_loss(self.node)
            server.picture.absorb(recording)

    def _recording(self, ended: Sequence[Finished]) -> Operation[Recording]:
        """Ends that the server decides, fenced by this connection's row, or by the term of the only server."""
        server, frames = self._server, [(self.node, ended)]
        if self.link is None:
            return leases.record_if_current(frames, server.picture.term, server.now)
        return leases.record(frames, server.now, links={self.node: self.link})

    async def send_leases(self, stored: StoredLeases) -> None:
        """Send stored leases that have not started, and stops; the agent ignores those it has."""
        if self.closed:
            return
        stop = [each for each in stored.held if each.status is TaskStatus.CANCELLED]
        if stop:
            holds = tuple(Hold(each.task, each.epoch) for each in stop)
            self._send(Stop(holds, StopReason.CANCELLED))
        undecryptable = self._grant_again(stored.held, stored)
        if stored.preempting:
            self._send(Stop(stored.preempting, StopReason.PREEMPTED))
        ended = [delivery.undecryptable_secret(each.task, each.epoch) for each in undecryptable]
        if ended:
            server = self._server
            server.picture.absorb(await server.write(self._recording(ended)))

    def _grant_again(
        self, missing: Sequence[HeldLease], stored: StoredLeases
    ) -> Sequence[HeldLease]:
        sealer = self._server.sealer
        unstarted = [lease for lease in missing if lease.status is TaskStatus.LEASED]
        secrets, bad_specs = sealer.opened(stored.secrets)
        meeting, bad_gangs = delivery.opened_gang_secrets(sealer, unstarted, stored.gang_keys)
        bad = bad_gangs | {each.task for each in unstarted if each.spec in bad_specs}
        good = [lease for lease in unstarted if lease.task not in bad]
        lines = reconciliation.wire_lines(good, self._owner, stored.checkpoints, meeting)
        self.grant(lines, stored.specs.get, secrets)
        return [lease for lease in unstarted if lease.task in bad]

    def _is_overtaken(self, hello: Hello) -> bool:
        """Refuse a delayed Hello: a later heartbeat of the agent or its next start came before, so its leases are out of date,
        whether or not the later connection is still open.
        """
        newest = self._server.nodes.newest_heartbeat(self.node)
        if newest is None or HeartbeatNumber(hello.boot, hello.beat) > newest:
            return False
        self._refuse_overtaken()
        return True

    def _refuse_overtaken(self) -> None:
        self.refuse(
            "conflict", "a newer frame of this agent was received; connect again", retry=True
        )

    def _is_blocked(self) -> bool:
        if not self._server.nodes.is_blocked(self.node):
            return False
        self.refuse(
            "conflict",
            "this node is blocked: it did not release a gang in time; connect again later",
            retry=True,
        )
        return True

    def changed_gpus(self, frame: FromAgent) -> int:
        """Number of GPUs that a frame's offer adds, changes or removes."""
        if not isinstance(frame, Hello | OfferChanged):
            return 0
        entry = self._server.picture.state.nodes.get(self.node)
        known = () if entry is None or entry.node is None else entry.node.offer.gpus
        before = {gpu.uuid: gpu for gpu in known}
        after = {gpu.uuid: gpu for gpu in frame.offer.gpus}
        added = sum(before.get(uuid) != gpu for uuid, gpu in after.items())
        return added + len(before.keys() - after.keys())

    async def close(self, *, is_orderly: bool = False) -> None:
        """Detach a channel whose transport is gone. The node keeps its leases until its deadline.

        `is_orderly`: the agent closed it. One that stops has ended its sandboxes before, so leases that it left behind
        expire after the margin; one that is killed meanwhile has not.
        """
        self.closed = True
        server = self._server
        if self._detach() and self._leaving and is_orderly:
            server.nodes.shorten_deadline(self.node, server.now, server.settings.margin)
        if self.link is not None:
            with suppress(GpoolError):  # no database: the row is cleared with this replica's
                await server.write(replicas.disconnect(self.node, self.link))

    def _detach(self) -> bool:
        is_current = self._server.nodes.detach(self)
        if is_current:
            self._server.picture.refresh_node(self.node)
        return is_current

    def refuse(self, code: str, detail: str, *, retry: bool, to: str = "") -> None:
        """Close the connection; `to`: address of a server that the agent should try next."""
        if not self.closed:
            self._send(Refused(code, detail, retry, to))
            self.closed = True
            self._detach()

    def stop(self, holds: tuple[Hold, ...], reason: StopReason) -> None:
        if not self.closed:
            self._send(Stop(holds, reason))

    def grant(
        self, lines: Iterable[Line], spec_of: Callable[[int], TaskSpec | None], secrets: OpenSecrets
    ) -> None:
        if self.closed:
            return
        batch: list[Line] = []
        size = 0
        weighed: set[int] = set()
        receipts = _receipts_name(self._server, self.node)
        for line in delivery.split_lines(lines):
            if receipts and not line.owner:
                line = msgspec.structs.replace(line, receipts=receipts)
            weight = delivery.weight(line)
            if line.spec not in weighed and SpecId(line.spec) not in self._specs_sent:
                weighed.add(line.spec)
                spec = spec_of(line.spec)
                weight += weight_of(spec) if spec is not None else 0
            if batch and size + weight > delivery.FRAME_PAYLOAD_BYTES:
                self._send_grants(batch, spec_of, secrets)
                batch, size = [], 0
            batch.append(line)
            size += weight
        if batch:
            self._send_grants(batch, spec_of, secrets)

    def _send_grants(
        self, lines: list[Line], spec_of: Callable[[int], TaskSpec | None], secrets: OpenSecrets
    ) -> None:
        specs = []
        opened: list[Secret] = []
        for line in lines:
            spec_id = SpecId(line.spec)
            if spec_id not in self._specs_sent:
                spec = spec_of(spec_id)
                if spec is None:
                    raise LookupError(f"spec {spec_id} of a committed lease is unknown")
                self._specs_sent.add(spec_id)
                specs.append((line.spec, spec))
                opened += secrets.get(spec_id, ())
        self._send(Grants(self._beat, tuple(specs), tuple(lines), tuple(opened)))

    async def _record(self, frame: Reports) -> None:
        if len(frame.items) > MAX_ITEMS:
            self.refuse("too_large", f"a frame of {len(frame.items)} reports", retry=False)
            return
        if self._server.read_only.is_on or self.is_behind:
            self.is_behind = True
            return
        entry = self._server.picture.state.nodes.get(self.node)
        gpus = () if entry is None or entry.node is None else entry.node.offer.gpus
        checked = [item for item in map(checked_report, frame.items) if item is not None]
        items = [report_without_ids(item, gpus) for item in checked] if gpus else checked
        refused = await self._server.reports.record(self, items, self._server.now)
        if refused is None:
            self._refuse_overtaken()
        elif not self.closed:
            self._send(Recorded(frame.sequence, refused))

    async def _take_beat(self, frame: Beat) -> None:
        if len(frame.holds) > MAX_HOLDS:
            self.refuse("too_large", f"a heartbeat with {len(frame.holds)} leases", retry=False)
            return
        server, now = self._server, self._server.now
        # Before the commit: if that fails, leases end late, not early.
        server.nodes.extend_deadline(self.node, now)
        drop = await server.reports.beat(self.node, frame.holds, now)
        if self.closed:
            return
        self._beat = max(self._beat, frame.number)
        server.nodes.set_newest_heartbeat(self.node, self._boot, self._beat)
        self._send(BeatSeen(frame.number, drop))
        if frame.readings:
            self._add_readings(frame, now)
        if self._forgotten(frame.holds, now):
            self.refuse(
                "conflict", "your heartbeats lack leases of yours; connect again", retry=True
            )

    def _add_readings(self, frame: Beat, now: Instant) -> None:
        picture = self._server.picture
        entry = picture.state.nodes.get(self.node)
        if entry is not None and entry.node is not None:
            indexes = {gpu.index for gpu in entry.node.offer.gpus}
            held = _held_by(picture, self.node) if frame.tasks else set()
            telemetry = self._server.telemetry
            telemetry.add(self.node, indexes, held, frame.readings, frame.tasks, now)

    async def _change_offer(self, frame: OfferChanged) -> None:
        server = self._server
        wrong = _offer_problem(frame.offer, server.settings)
        if wrong is not None:
            self.refuse("invalid", wrong, retry=False)
            return
        self._leaving = frame.leaving
        offer, now = self._kept(frame.offer), server.now
        gpu_ids = server.ids.take(len(offer.gpus))
        server.nodes.extend_deadline(self.node, now)  # stored as a heartbeat too
        try:
            changed = await server.write(
                reconciliation.change(self.node, offer, gpu_ids, now, server.offer_terms, self.link)
            )
        except (NotFound, Forbidden) as error:
            self.refuse(error.code, error.detail, retry=isinstance(error, Forbidden))
            return
        if isinstance(changed, NotRegistered):
            self._refuse_overtaken()
            return
        node: NodeRow | None = changed
        if await _took_time(server, changed):
            node = await server.write(nodes.node(self.node))
        if node is not None:
            server.picture.node_changed(node.node)

    def _kept(self, offer: Offer) -> Offer:
        own = offer_without_ids(offer)
        return reconciliation.at_own_site(own, self._owner, self._server.settings.sites)

    def tell_gpu(self, frame: ToGpu) -> None:
        if not self.closed:
            self._send(frame)

    def _forgotten(self, stated: Iterable[Hold], now: Instant) -> set[TaskId]:
        """Leases missing from two consecutive heartbeats: the agent does not know of them.

        Should not happen, as a connection loses no frames; nothing else would notice it. Heartbeats in quick succession
        were delayed and may be older than a new lease, so they are not compared; nor are gangs, whose members may have
        released what the gang still holds. A replica that is behind the others may know leases that it has not sent.
        """
        server, briefly = self._server, self._server.settings.beat_every // 2
        is_behind = server.replica.feed_lag_s(server.nodes.lease_time(now)) * SECOND > briefly
        if is_behind or now - self._compared_at < briefly:
            return set()
        self._compared_at = now
        picture = server.picture
        held = _held_by(picture, self.node).difference(TaskId(hold.task) for hold in stated)
        unstated = {task for task in held if not picture.state.held[task].members}
        forgotten = unstated & self._unstated
        self._unstated = unstated
        return forgotten


def _receipts_name(server: Server, node: NodeId) -> str:
    """The pool's name in receipts, if leases of this node are charged; else empty."""
    entry = server.picture.state.nodes.get(node)
    if not server.settings.prices or server.sign_ins is None:
        return ""
    if entry is None or entry.node is None:
        return ""
    return server.identity.receipts.pool if is_priced(entry.node.offer) else ""


async def _took_time(server: Server, row: NodeRow) -> bool:
    """Admit the GPUs of a node; return whether they are verified, so that rows may have changed meanwhile."""
    verifier = server.examiner
    if verifier is None:
        return False
    await verifier.admit(row)
    return verifier.verifies


def _held_by(picture: StatePicture, node: NodeId) -> set[TaskId]:
    entry = picture.state.nodes.get(node)
    if picture.is_stale or entry is None or not entry.lines:
        return set()
    return set().union(*(line.tasks for line in entry.lines.values()))


def _hello_problem(hello: Hello, settings: Settings, *, greeted: bool) -> str | None:
    if greeted:
        return "a second Hello on one connection; open a new one"
    if common_protocol(hello.protocol, hello.oldest_protocol) is None:
        return (
            f"the agent speaks versions {hello.oldest_protocol or hello.protocol} to {hello.protocol} of the protocol, "
            f"this server {OLDEST_PROTOCOL} to {PROTOCOL}: install a newer gpool on the older side"
        )
    if len(hello.holds) > MAX_HOLDS:
        return f"a Hello with {len(hello.holds)} leases; at most {MAX_HOLDS} are accepted"
    if len(hello.boot) > MAX_BOOT_LETTERS:
        return f"a boot of {len(hello.boot)} letters; at most {MAX_BOOT_LETTERS} are accepted"
    return _offer_problem(hello.offer, settings)


def _offer_problem(offer: Offer, settings: Settings) -> str | None:
    return offer_problem(offer, is_local=settings.is_local, max_gpus=settings.max_gpus_per_node)
