"""Committed grants as nodes receive them, and the specs of open tasks in memory. Sends nothing.

A gang's secret is drawn with its grant and stored encrypted beside it, so a member that connects later receives the
same one.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter

import msgspec

from gpool.core.ids import NodeId, SpecId, TaskId, UserId
from gpool.core.model import EndReason, Shape, TaskSpec
from gpool.core.scheduler.state.events import Placement
from gpool.core.scheduler.state.state import State
from gpool.core.scheduler.state.waiting import HeldAllocation, shape_of
from gpool.server.identity.envelope import FieldLocation
from gpool.server.identity.sealer import Sealer
from gpool.server.nodes.reports import FILE_WIRE_BYTES
from gpool.server.store.operations.leases.gang_members import members_of
from gpool.server.store.operations.tasks.submissions import Submission
from gpool.server.store.values import DataKey, GangMeeting, GrantedLine, HeldLease
from gpool.wire.frames import Finished, Lease, Line, Rendezvous

MAX_SPECS = 50_000
"""Specs kept beyond those in use."""

MAX_NAMES = 500_000
"""Names of inputs and outputs in specs kept since the last rebuild, about 100 MB."""


@dataclass(frozen=True, slots=True)
class KnownSpec:
    spec: TaskSpec
    shape: Shape


class SpecCache:
    def __init__(self) -> None:
        self.with_secrets: set[SpecId] = set()
        self.with_checkpoints: set[SpecId] = set()
        self._known: dict[SpecId, KnownSpec] = {}
        self._names = 0

    def rebuild(
        self, rows: Iterable[tuple[SpecId, UserId, TaskSpec]], teams: Mapping[SpecId, int]
    ) -> None:
        self.with_secrets, self.with_checkpoints, self._known = set(), set(), {}
        for id_, user, spec in rows:
            self._add(id_, user, spec, teams.get(id_))
        self._names = 0

    @property
    def known(self) -> Collection[SpecId]:
        return self._known.keys()

    def add_stored(self, id_: SpecId, user: UserId, spec: TaskSpec, team: int | None) -> None:
        """Add a spec that another replica wrote."""
        if id_ not in self._known:
            self._add(id_, user, spec, team)
            self._names += len(spec.inputs) + len(spec.outputs)

    def add(self, id_: SpecId, submission: Submission) -> Shape:
        known = self._known.get(id_)
        if known is None:
            spec = submission.spec
            known = self._add(id_, submission.user, spec, submission.team)
            self._names += len(spec.inputs) + len(spec.outputs)
        return known.shape

    def _add(self, id_: SpecId, user: UserId, spec: TaskSpec, team: int | None) -> KnownSpec:
        known = self._known[id_] = KnownSpec(spec, shape_of(spec, user, team))
        if spec.secrets:
            self.with_secrets.add(id_)
        if spec.checkpoint:
            self.with_checkpoints.add(id_)
        return known

    def shape(self, id_: SpecId) -> Shape | None:
        known = self._known.get(id_)
        return None if known is None else known.shape

    def shapes(self) -> Mapping[SpecId, Shape]:
        return {id_: known.shape for id_, known in self._known.items()}

    def spec(self, id_: int) -> TaskSpec | None:
        known = self._known.get(SpecId(id_))
        return None if known is None else known.spec

    def is_oversized(self, in_use: int) -> bool:
        return len(self._known) > MAX_SPECS + in_use or self._names > MAX_NAMES


SECRET_BYTES = 32

FRAME_PAYLOAD_BYTES = 4 * 1024 * 1024
"""Payloads and specs in one `Grants`, unless one lease has more: half of a frame's limit."""

GangSecrets = Mapping[TaskId, bytes]
"""By task: the secret its gang's members share."""


def _secret_place(task: int) -> FieldLocation:
    return FieldLocation("gangs", str(task), "secret_sealed")


async def new_gang_secrets(
    sealer: Sealer, places: Iterable[Placement]
) -> tuple[GangSecrets, GangSecrets]:
    tasks = [grant.task for place in places if place.members for grant in place.grants]
    if not tasks:
        return {}, {}
    await sealer.prepare()
    plain = {task: secrets.token_bytes(SECRET_BYTES) for task in tasks}
    return plain, {task: sealer.seal_now(_secret_place(task), plain[task]) for task in tasks}


def opened_gang_secrets(
    sealer: Sealer, held: Sequence[HeldLease], keys: Sequence[DataKey]
) -> tuple[Mapping[TaskId, Rendezvous], set[TaskId]]:
    found: dict[TaskId, Rendezvous] = {}
    undecryptable: set[TaskId] = set()
    members = [lease for lease in held if lease.gang is not None]
    fields = [
        (_secret_place(lease.task), lease.gang.secret_sealed) for lease in members if lease.gang
    ]
    for lease, secret in zip(members, sealer.opened_fields(fields, keys), strict=True):
        if secret is None or lease.gang is None:
            undecryptable.add(lease.task)
        else:
            found[lease.task] = _rendezvous(lease.gang.rank, lease.gang.meeting, secret)
    return found, undecryptable


def _rendezvous(rank: int, meeting: GangMeeting, secret: bytes) -> Rendezvous:
    return Rendezvous(rank, meeting.peers, secret, meeting.link)


def undecryptable_secret(task: int, epoch: int) -> Finished:
    return Finished(
        task,
        epoch,
        EndReason.BAD_INPUT,
        error_text="a secret of this task cannot be decrypted any more; tell the operator",
    )


def deliverable(
    lines: Sequence[GrantedLine], undecryptable: Collection[SpecId]
) -> tuple[Sequence[GrantedLine], list[tuple[NodeId, list[Finished]]]]:
    if not undecryptable:
        return lines, []
    kept, ended = [], []
    for line in lines:
        bad = [
            undecryptable_secret(lease.task, lease.epoch)
            for id_, lease in line.leases
            if id_ in undecryptable
        ]
        good = tuple([pair for pair in line.leases if pair[0] not in undecryptable])
        if good:
            kept.append(replace(line, leases=good))
        if bad:
            ended += [(node, bad) for node in nodes_of(line)]
    return kept, ended


def nodes_of(line: GrantedLine) -> Iterator[NodeId]:
    return (part.node for part in members_of(line.place))


def wire_lines(
    granted: Iterable[GrantedLine], node: NodeId, owner: UserId | None, shared: GangSecrets
) -> Iterable[Line]:
    for line in granted:
        if line.place.members:
            yield _member_line(line, node, owner, shared)
            continue
        user = line.place.shape.user
        for spec_id, pairs in groupby(line.leases, key=itemgetter(0)):
            yield Line(
                line.place.allocation,
                user,
                user == owner,
                spec_id,
                tuple([lease for _, lease in pairs]),
            )


def _member_line(
    line: GrantedLine, node: NodeId, owner: UserId | None, shared: GangSecrets
) -> Line:
    ((spec, lease),) = line.leases
    parts = members_of(line.place)
    rank = next(rank for rank, part in enumerate(parts) if part.node == node)
    user = line.place.shape.user
    meeting = _rendezvous(rank, line.meeting, shared[TaskId(lease.task)])
    return Line(parts[rank].allocation, user, user == owner, spec, (lease,), meeting)


def weight(line: Line) -> int:
    return sum(map(_lease_weight, line.leases))


def _lease_weight(lease: Lease) -> int:
    names = lease.checkpoint
    return len(lease.payload) + (
        sum(FILE_WIRE_BYTES + len(f.path.encode()) for f in names) if names else 0
    )


def split_lines(lines: Iterable[Line]) -> Iterable[Line]:
    for line in lines:
        if weight(line) <= FRAME_PAYLOAD_BYTES:
            yield line
            continue
        piece: list[Lease] = []
        size = 0
        for lease in line.leases:
            if piece and size + _lease_weight(lease) > FRAME_PAYLOAD_BYTES:
                yield msgspec.structs.replace(line, leases=tuple(piece))
                piece, size = [], 0
            piece.append(lease)
            size += _lease_weight(lease)
        yield msgspec.structs.replace(line, leases=tuple(piece))


def lines_on(state: State, node: NodeId) -> Iterator[tuple[TaskId, HeldAllocation]]:
    for task, line in state.held.items():
        for part in (line, *line.members):
            if part.node == node:
                yield task, part
