"""One agent's connection, without a transport: frames in by `receive`, frames out by `send`.

On connect the agent states what it holds and is told what it should hold (reconcile, not replay). Every answer leaves
after the commit that covers it. The caller hands frames over one at a time, in order. A node has one channel: a newer
connection replaces the older one. `Refused` is the last frame of a channel; the transport closes after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from gpool.core.errors import NotFound
from gpool.core.gangs import GangOrder
from gpool.core.ids import NodeId, SpecId, TaskId
from gpool.core.model import EndReason, InputFile, Instant, Offer, TaskSpec, TaskStatus
from gpool.server.nodes import offers
from gpool.server.nodes.report_validation import (
    FILE_BYTES,
    MOST_ITEMS,
    checked_report,
    wrong_with_offer,
)
from gpool.server.scheduling import gangs
from gpool.server.store.operation import operation
from gpool.server.store.operations.identity.sealed_fields import data_keys, secrets_to_open
from gpool.server.store.operations.leases import leases
from gpool.server.store.operations.nodes import nodes
from gpool.server.store.operations.tasks import checkpoints
from gpool.server.store.protocol import Operation
from gpool.server.store.sealed_values import DataKey, SealedSecrets
from gpool.server.store.values import HeldLease, NodeCredentials, NodeRow
from gpool.wire.frames import (
    PROTOCOL,
    AgentFrame,
    Beat,
    BeatSeen,
    Finished,
    Grants,
    Hello,
    Hold,
    Line,
    OfferChanged,
    Recorded,
    Refused,
    Rendezvous,
    Reports,
    Secret,
    ServerFrame,
    Stop,
    StopReason,
    ToGpu,
    Welcome,
    weight_of,
)
from gpool.wire.frames import Lease as WireLease

if TYPE_CHECKING:
    from gpool.server.server import Server

FRAME_PAYLOAD_BYTES = 4 * 1024 * 1024
"""Payloads and specs in one `Grants`, unless one lease is more: half a frame's limit, the rest is for everything else."""

Checkpoints = Mapping[int, tuple[InputFile, ...]]
"""By task: what its next attempt begins with."""

Secrets = Mapping[int, tuple[Secret, ...]]
"""Opened, by spec: on their way to a node, and kept nowhere."""

MAX_HOLDS = 200_000
MAX_BOOT_LETTERS = 200  # it is remembered
REPLACED = "replaced by a newer connection of this node"


class Channel:
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
        self._compared_at = Instant(0)  # when beats were last compared with what is held

    async def receive(self, frame: AgentFrame) -> None:
        """Takes one frame to its end, commit and answer included."""
        if self.closed:
            return
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
        """Registers what the node lends and reconciles what it holds."""
        server, scheduler = self._server, self._server.scheduler
        local = self._server.settings.is_local
        wrong = _wrong_with_hello(hello, greeted=self._greeted, is_local=local)
        if wrong is not None:
            self.refuse("invalid", wrong, retry=False)
            return
        now = server.now
        if self._is_overtaken(hello) or self._is_shunned():
            return
        scheduler.disconnect(self.node, REPLACED, retry=True)
        scheduler.heard_from(self.node, now)
        # Before the write: an older hello that comes while it takes its time must not write what it says over this.
        scheduler.heard[self.node] = (hello.boot, hello.beat)
        greeted = await server.write(
            _greeting(
                self.node, self._kept(hello.offer), server.ids.take(len(hello.offer.gpus)), now
            )
        )
        if greeted is not None:  # whatever becomes of this connection
            scheduler.node_changed(greeted.row.node)
        if greeted is not None and not self.closed and await self._took_time(greeted.row):
            greeted = await server.write(_standing(self.node))
        if self.closed:
            return
        if greeted is None:
            self.refuse("not_found", "this node was removed; join again", retry=False)
            return
        if scheduler.heard.get(self.node) != (hello.boot, hello.beat):
            self._refuse_overtaken()
            return
        scheduler.disconnect(self.node, REPLACED, retry=True)
        self._greeted = True
        self._boot, self._beat = hello.boot, hello.beat
        stated = set(hello.holds)
        open_leases = {Hold(lease.task, lease.epoch): lease for lease in greeted.held}
        settings = server.settings
        self._send(
            Welcome(
                node=self.node,
                beat=hello.beat,
                ttl_us=settings.ttl,
                margin_us=settings.margin,
                beat_every_us=settings.beat_every,
                drop=tuple(hold for hold in hello.holds if hold not in open_leases),
            )
        )
        scheduler.connect(self, greeted.row.node)
        # Unstated ones too: that the agent has nothing of them, only the agent can say, and now.
        stop = tuple(
            hold for hold, lease in open_leases.items() if lease.status is TaskStatus.CANCELLED
        )
        if stop:
            self._send(Stop(stop, StopReason.CANCELLED))
        # All of it before the next await: a cancel must not overtake the grant it stops.
        missing = [lease for hold, lease in open_leases.items() if hold not in stated]
        unstarted = [lease for lease in missing if lease.status is TaskStatus.LEASED]
        secrets, shut = server.sealer.opened(greeted.secrets)
        meeting, shut_gangs = gangs.opened(server.sealer, unstarted, greeted.gang_keys)
        shut_tasks = shut_gangs | {each.task for each in unstarted if each.spec in shut}
        lines = _lines(
            [lease for lease in unstarted if lease.task not in shut_tasks],
            self._owner,
            greeted.checkpoints,
            meeting,
        )
        self.grant(lines, greeted.specs.get, secrets)
        if greeted.preempting:  # after the grants: what it is just given again, it hands back
            self._send(Stop(greeted.preempting, StopReason.PREEMPTED))
        forgotten = [lease for lease in missing if lease.status is TaskStatus.RUNNING]
        ended = [
            secrets_shut(each.task, each.epoch) for each in unstarted if each.task in shut_tasks
        ]
        # by an agent started anew: an attempt runs once under its epoch
        ended += [Finished(lease.task, lease.epoch, EndReason.LOST) for lease in forgotten]
        if ended:
            recording = await server.write(leases.record(self.node, ended, server.now))
            if forgotten:
                scheduler.note_lost(self.node)
            scheduler.absorb(recording)

    def _is_overtaken(self, hello: Hello) -> bool:
        """A hello so long on its way that a later beat of the agent, or of its next start, was heard first.

        What it says it holds is out of date, whether or not that later connection is still open.
        """
        newest = self._server.scheduler.heard.get(self.node)
        if newest is None or (hello.boot, hello.beat) > newest:
            return False
        self._refuse_overtaken()
        return True

    def _refuse_overtaken(self) -> None:
        self.refuse(
            "conflict", "something newer was heard of this agent; say hello again", retry=True
        )

    def _is_shunned(self) -> bool:
        """It held on to what was over, and has not yet been given up."""
        scheduler = self._server.scheduler
        if self.node not in scheduler.rests.shunned:
            return False
        if self.node in scheduler.deadlines:
            self.refuse("conflict", "it did not let go of a gang in time; wait", retry=True)
            return True
        scheduler.rests.shunned.discard(self.node)
        return False

    async def close(self) -> None:
        """The transport is gone. What the node holds stays its own until the lease time is over."""
        self.closed = True
        self._server.scheduler.forget_channel(self)

    def refuse(self, code: str, detail: str, *, retry: bool) -> None:
        if not self.closed:
            self._send(Refused(code, detail, retry))
            self.closed = True
            self._server.scheduler.forget_channel(self)

    def stop(self, holds: tuple[Hold, ...], reason: StopReason) -> None:
        if not self.closed:
            self._send(Stop(holds, reason))

    def grant(
        self, lines: Iterable[Line], spec_of: Callable[[int], TaskSpec | None], secrets: Secrets
    ) -> None:
        """Sends leases that are committed, in as few frames as their payloads allow."""
        if self.closed:
            return
        batch: list[Line] = []
        size = 0
        weighed: set[int] = set()
        for line in _split(lines):
            weight = sum(map(_weight, line.leases))
            if line.spec not in weighed and SpecId(line.spec) not in self._specs_sent:
                weighed.add(line.spec)
                spec = spec_of(line.spec)
                weight += weight_of(spec) if spec is not None else 0
            if batch and size + weight > FRAME_PAYLOAD_BYTES:
                self._send_grants(batch, spec_of, secrets)
                batch, size = [], 0
            batch.append(line)
            size += weight
        if batch:
            self._send_grants(batch, spec_of, secrets)

    def _send_grants(
        self, lines: list[Line], spec_of: Callable[[int], TaskSpec | None], secrets: Secrets
    ) -> None:
        specs = []
        told: list[Secret] = []
        for line in lines:
            spec_id = SpecId(line.spec)
            if spec_id not in self._specs_sent:
                spec = spec_of(spec_id)
                if spec is None:
                    raise LookupError(f"spec {spec_id} of a committed lease is not known")
                self._specs_sent.add(spec_id)
                specs.append((line.spec, spec))
                told += secrets.get(spec_id, ())
        self._send(Grants(self._beat, tuple(specs), tuple(lines), tuple(told)))

    async def _record(self, frame: Reports) -> None:
        if len(frame.items) > MOST_ITEMS:
            self.refuse("too_large", f"a frame of {len(frame.items)} reports", retry=False)
            return
        items = [item for item in map(checked_report, frame.items) if item is not None]
        refused = await self._server.scheduler.recorder.record(self.node, items, self._server.now)
        if not self.closed:
            self._send(Recorded(frame.sequence, refused))

    async def _take_beat(self, frame: Beat) -> None:
        if len(frame.holds) > MAX_HOLDS:
            self.refuse("too_large", f"a beat with {len(frame.holds)} holds", retry=False)
            return
        now = self._server.now
        # Before the commit: if that fails we only give the leases away later than we might.
        self._server.scheduler.heard_from(self.node, now)
        drop = await self._server.scheduler.recorder.beat(self.node, frame.holds, now)
        if self.closed:
            return
        self._beat = max(self._beat, frame.number)
        self._server.scheduler.heard[self.node] = (self._boot, self._beat)
        self._send(BeatSeen(frame.number, drop))
        if frame.readings:
            self._note_readings(frame, now)
        if self._forgotten(frame.holds, now):
            self.refuse(
                "conflict", "leases of yours are not in your beats; say hello again", retry=True
            )

    def _note_readings(self, frame: Beat, now: Instant) -> None:
        scheduler = self._server.scheduler
        entry = scheduler.state.nodes.get(self.node)
        if entry is not None and entry.node is not None:
            indexes = {gpu.index for gpu in entry.node.offer.gpus}
            held = scheduler.held_by(self.node) if frame.tasks else set()
            telemetry = self._server.telemetry
            telemetry.take(self.node, indexes, held, frame.readings, frame.tasks, now)

    async def _change_offer(self, frame: OfferChanged) -> None:
        server = self._server
        wrong = wrong_with_offer(frame.offer, is_local=server.settings.is_local)
        if wrong is not None:
            self.refuse("invalid", wrong, retry=False)
            return
        offer = self._kept(frame.offer)
        try:
            node: NodeRow | None = await server.write(
                offers.take(self.node, offer, server.ids.take(len(offer.gpus)), server.now)
            )
        except NotFound as error:
            self.refuse("not_found", error.detail, retry=False)
            return
        assert node is not None
        if await self._took_time(node):
            node = await server.write(nodes.node(self.node))
        if node is not None:
            server.scheduler.node_changed(node.node)

    def _kept(self, offer: Offer) -> Offer:
        return offers.at_own_site(offer, self._owner, self._server.settings.sites)

    async def _took_time(self, row: NodeRow) -> bool:
        """Keeps back those of its GPUs that are to be examined first. True: what was known of this node and its leases may
        not be so any more."""
        examiner = self._server.examiner
        if examiner is None:
            return False
        await examiner.admit(row)
        return examiner.examines

    def tell_gpu(self, frame: ToGpu) -> None:
        if not self.closed:
            self._send(frame)

    def _forgotten(self, stated: Iterable[Hold], now: Instant) -> set[TaskId]:
        """Leases of this node that it has not named in two beats on end: it does not know of them.

        Frames are not lost on a connection, so this should not happen; if it does, nobody else would ever notice. Beats
        that come close together have waited for us: both may have been sent before a lease that we granted meanwhile.
        """
        if now - self._compared_at < self._server.settings.beat_every // 2:
            return set()
        self._compared_at = now
        unstated = self._server.scheduler.unstated(self.node, [TaskId(h.task) for h in stated])
        forgotten = unstated & self._unstated
        self._unstated = unstated
        return forgotten


@dataclass(frozen=True, slots=True)
class _Greeted:
    row: NodeRow
    held: tuple[HeldLease, ...]
    specs: Mapping[int, TaskSpec]
    secrets: SealedSecrets
    checkpoints: Checkpoints
    preempting: tuple[Hold, ...]
    gang_keys: tuple[DataKey, ...]  # that gangs' secrets may be sealed with


@operation
def _greeting(
    node: NodeId, offer: Offer, gpu_ids: Sequence[int], at: Instant
) -> Operation[_Greeted | None]:
    """Offer, leases and their specs as of one moment; None: there is no such node any more."""
    if (yield from nodes.node(node)) is None:
        return None
    row = yield from offers.take(node, offer, gpu_ids, at)
    return (yield from _leases_of(node, row))


@operation
def _standing(node: NodeId) -> Operation[_Greeted | None]:
    """The same once more, when its offer is known."""
    row = yield from nodes.node(node)
    return None if row is None else (yield from _leases_of(node, row))


def _leases_of(node: NodeId, row: NodeRow) -> Operation[_Greeted]:
    held = yield from leases.held(node)
    specs = {}
    for id_ in {lease.spec for lease in held}:
        found = yield from leases.spec(id_)
        if found is not None:
            specs[int(id_)] = found[1]
    secret = [SpecId(id_) for id_, spec in specs.items() if spec.secrets]
    secrets = yield from secrets_to_open(secret)
    saved = [lease.task for lease in held if lease.spec in specs and specs[lease.spec].checkpoint]
    begun = yield from checkpoints.manifests(saved)
    preempting = yield from checkpoints.preempting(node)
    members = [lease for lease in held if lease.gang is not None]
    preempting += tuple(
        Hold(each.task, each.epoch)
        for each in members
        if each.status is not TaskStatus.CANCELLED
        and each.gang
        and each.gang.call is GangOrder.BACK
    )
    keys = (yield from data_keys()) if members else ()
    return _Greeted(row, held, specs, secrets, begun, preempting, keys)


def secrets_shut(task: int, epoch: int) -> Finished:
    """A task whose secrets were changed in the store, or whose key is lost, does not run."""
    return Finished(
        task,
        epoch,
        EndReason.BAD_INPUT,
        error_text="a secret of this task does not open any more; tell the operator",
    )


def _lines(
    held: Iterable[HeldLease],
    owner: int,
    checkpoints: Checkpoints,
    meeting: Mapping[TaskId, Rendezvous],
) -> Iterable[Line]:
    """Leases of one allocation and spec are one line; the order in line is that of the tasks."""
    grouped: dict[tuple[int, int], list[HeldLease]] = {}
    for lease in sorted(held, key=lambda lease: (lease.allocation.number, lease.task)):
        grouped.setdefault((lease.allocation.number, lease.spec), []).append(lease)
    for members in grouped.values():
        first = members[0]
        yield Line(
            first.allocation,
            first.user,
            first.user == owner,
            first.spec,
            tuple(_wire_lease(lease, checkpoints) for lease in members),
            meeting.get(first.task),
        )


def _wire_lease(lease: HeldLease, checkpoints: Checkpoints) -> WireLease:
    begins_with = checkpoints.get(lease.task, ())
    return WireLease(lease.task, lease.epoch, lease.payload, lease.payload_sha256, begins_with)


def _weight(lease: WireLease) -> int:
    """What it takes in a frame, of all that can be much."""
    names = lease.checkpoint
    return len(lease.payload) + (
        sum(FILE_BYTES + len(f.path.encode()) for f in names) if names else 0
    )


def _split(lines: Iterable[Line]) -> Iterable[Line]:
    """Lines whose payloads would overfill a frame, in pieces that do not."""
    for line in lines:
        if sum(map(_weight, line.leases)) <= FRAME_PAYLOAD_BYTES:
            yield line
            continue
        piece: list[WireLease] = []
        size = 0
        for lease in line.leases:
            if piece and size + _weight(lease) > FRAME_PAYLOAD_BYTES:
                yield msgspec.structs.replace(line, leases=tuple(piece))
                piece, size = [], 0
            piece.append(lease)
            size += _weight(lease)
        yield msgspec.structs.replace(line, leases=tuple(piece))


def _wrong_with_hello(hello: Hello, *, greeted: bool, is_local: bool) -> str | None:
    if greeted:
        return "a second Hello on one connection; open a new one"
    if hello.protocol != PROTOCOL:
        return f"protocol {hello.protocol}; this server speaks {PROTOCOL}: install the same gpool version"
    if len(hello.holds) > MAX_HOLDS:
        return f"a hello with {len(hello.holds)} holds"
    if len(hello.boot) > MAX_BOOT_LETTERS:
        return f"a boot of {len(hello.boot)} letters"
    return wrong_with_offer(hello.offer, is_local=is_local)
