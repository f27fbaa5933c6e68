"""Submission of tasks: one spec, one or many tasks, one commit. Builds no pydantic model per task."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from gpool.core.errors import Conflict, GpoolError, Unprocessable
from gpool.core.ids import BatchId, TaskId, UserId, decode, encode
from gpool.core.model import KIB, TaskSpec
from gpool.core.permissions import Action, TeamId
from gpool.core.specs.owners import ANYONE
from gpool.observability.logs import MOST_LOGGED, get_logger
from gpool.server.actions.quotas import (
    QueuedBound,
    holders_of,
    most_queued,
    queue_is_full,
    queue_quota_errors,
    queue_room,
)
from gpool.server.actions.tasks.documents import encode_many
from gpool.server.actions.tasks.parsing import submission_of
from gpool.server.actions.tasks.query import acting_account
from gpool.server.actions.tasks.repeated import WantedTasks
from gpool.server.identity.authorization import batch_thing, permit
from gpool.server.scheduling.scheduler import Proposal
from gpool.server.server import Answered, Once, Server
from gpool.server.store.batching import WriteBatcher
from gpool.server.store.identity_values import Caller
from gpool.server.store.operations.leases import grants
from gpool.server.store.operations.tasks import idempotency, storage, submissions
from gpool.server.store.operations.tasks import tasks as operations
from gpool.server.store.operations.tasks.storage import holder_of
from gpool.server.store.operations.tasks.submissions import (
    FirstLease,
    MissingArtifacts,
    Submission,
    SubmittedTasks,
)
from gpool.server.store.protocol import Operation, brief, operation
from gpool.server.store.values import AppliedPlan
from gpool.wire.frames import weight_of

log = get_logger(__name__)


class _SubmittedAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    batch: str
    first_position: int
    ids: list[str]
    on: str = ANYONE


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_SubmittedAnswer).decode


GATHERED_TASKS = 100
"""Submissions of more tasks are written alone."""

GATHERED_BYTES = 128 * KIB
"""Larger submissions are written alone: PostgreSQL limits a statement to 1 GB, however many are written together."""


@dataclass(slots=True, eq=False)
class _Pending:
    """Submission before its commit. Its tasks count as arriving until the scheduler has folded or refused them."""

    server: Server
    who: Caller
    submission: Submission
    once: Once | None
    is_counted: bool = False
    is_in_group: bool = False  # written with others, even if its request is cancelled

    def arrives(self) -> None:
        if not self.is_counted:
            self.is_counted = True
            self.server.picture.add_arriving(len(self.submission.tasks))

    def arrived(self) -> None:
        if self.is_counted:
            self.is_counted = False
            self.server.picture.add_arriving(-len(self.submission.tasks))

    @property
    def key(self) -> tuple[UserId, str] | None:
        return None if self.once is None else (self.who.user.id, self.once.key)


@dataclass(frozen=True, slots=True)
class Accepted:
    body: bytes
    batch: BatchId
    tasks: tuple[TaskId, ...]
    fresh: bool


async def submit(server: Server, who: Caller, wanted: WantedTasks, once: Once | None) -> Accepted:
    request = wanted.request
    team = None if request.team is None else TeamId(decode("team", request.team))
    thing = await acting_account(server, who, team)
    permit(who, Action.TASK_SUBMIT, thing, f"team {request.team}")
    if once is not None and None in request.secrets.values():
        # A stored secret may have been deleted since the first of two equal requests.
        body = await _saved_answer(server, who, once)
        if body is not None:
            return _accepted_before(body)
    submission = await submission_of(server, who, wanted, team)
    if any(task.payload for task in submission.tasks):
        server.blobs.check_free()
    if server.settings.encrypt_data:
        await server.sealer.account_key(holder_of(who.user.id, team))
    entry = _Pending(server, who, submission, once)
    _let_in(entry)
    is_recognised = submission.spec is wanted.spec  # by its bytes, which are few: `repeated`
    is_light = _has_few_tasks(submission) and (is_recognised or _is_light(submission))
    take = server.submitting.take if is_light else server.submitting.take_alone
    try:
        answered: _Outcome = await take(entry)
    finally:
        if not entry.is_in_group:
            entry.arrived()
    if isinstance(answered, GpoolError):
        raise answered
    submitted, body = answered.value, answered.body
    if submitted is None:
        return _accepted_before(body)
    if not submitted.tasks:
        server.hub.publish((submitted.batch,))  # closed: streams of its results may end
    ids = tuple([task.id for task in submitted.tasks])
    if log.isEnabledFor(logging.DEBUG):
        log.debug("tasks submitted", batch=submitted.batch, count=len(ids), tasks=ids[:MOST_LOGGED])
    return Accepted(body, submitted.batch, ids, fresh=True)


async def _saved_answer(server: Server, who: Caller, once: Once) -> bytes | None:
    saved = await server.store.read(_saved((who.user.id, once.key)))
    if saved is None:
        return None
    saved.check(once.fingerprint)
    return bytes(saved.answer)


@operation
def _saved(key: tuple[UserId, str]) -> Operation[idempotency.SavedAnswer | None]:
    return (yield from idempotency.saved({key})).get(key)


def _accepted_before(body: bytes) -> Accepted:
    first = _decode(body)
    return Accepted(
        body,
        BatchId(decode("batch", first.batch)),
        tuple(TaskId(decode("task", text)) for text in first.ids),
        fresh=False,
    )


def _let_in(entry: _Pending) -> None:
    picture, most = entry.server.picture, entry.server.settings.max_queued
    waiting = picture.waiting + picture.arriving
    if waiting + len(entry.submission.tasks) > most:
        raise queue_is_full(waiting)
    entry.arrives()


# ---- writing them, one or many


def _has_few_tasks(s: Submission) -> bool:
    return len(s.tasks) <= GATHERED_TASKS


def _is_light(s: Submission) -> bool:
    return weight_of(s.spec) + sum(len(task.payload) for task in s.tasks) <= GATHERED_BYTES


_Outcome = Answered[SubmittedTasks] | GpoolError
_APART = Conflict("the submissions of this group are decided in smaller groups")
"""Makes `WriteBatcher` halve the group. Never raised for one submission."""


class _Written(NamedTuple):
    outcomes: list[_Outcome]
    proposal: Proposal | None = None
    applied: AppliedPlan | None = None  # None: nothing was proposed, or nothing of it is fresh


def batching() -> WriteBatcher[_Pending, _Written, _Outcome]:
    return WriteBatcher(_write, _fold)


async def _write(group: Sequence[_Pending]) -> _Written:
    """Write the group; if nothing waits and no pass is under way, together with the leases of its tasks."""
    server, is_written = group[0].server, False
    for entry in group:
        entry.is_in_group = True
        entry.arrives()
    rows = sum(len(entry.submission.tasks) for entry in group)
    planning = server.scheduler.planning
    can_propose = rows <= GATHERED_TASKS and not planning.locked()
    proposal = None
    try:
        async with planning if can_propose else nullcontext():
            if can_propose:
                submissions = [entry.submission for entry in group]
                proposal = server.scheduler.propose(submissions, server.now)
            if proposal is not None:
                for entry in group:
                    entry.arrived()  # its tasks count as waiting
            most = most_queued(server, {entry.submission.user for entry in group})
            writing = _submit_and_start(group, most, proposal)
            written = await server.write(brief(writing, rows))
            is_written = True
            return written  # `_fold` is called before any other coroutine runs
    finally:
        if not is_written:
            if proposal is not None:
                server.scheduler.withdraw(proposal.tasks)
            _leave(group)


@operation
def _submit_and_start(
    group: Sequence[_Pending], most: QueuedBound | None, proposal: Proposal | None
) -> Operation[_Written]:
    """Insert tasks that the proposal starts as leased: the row is then written once."""
    if proposal is None:
        return _Written((yield from _submit(group, most, submissions.NO_LEASES)))
    found = yield from grants.startable(proposal.places, proposal.term)
    places = () if found is None else found.places
    leases = grants.first_leases(places, proposal.at)
    outcomes = yield from _submit(group, most, leases)
    submitted = {
        task.id: (each.value.spec_id, task)
        for each in outcomes
        if isinstance(each, Answered) and each.value is not None
        for task in each.value.tasks
    }
    if not submitted:
        return _Written(outcomes, proposal)
    applied = grants.DEPOSED if found is None else grants.inserted(places, submitted)
    return _Written(outcomes, proposal, applied)


def _fold(group: Sequence[_Pending], written: _Written) -> list[_Outcome]:
    server, is_folded = group[0].server, False
    picture, added, granted = server.picture, 0, 0
    is_queued = written.proposal is not None
    try:
        for entry, answered in zip(group, written.outcomes, strict=True):
            if isinstance(answered, Answered) and answered.value is not None:
                picture.add_submission(answered.value, entry.submission, is_queued=is_queued)
                added += len(answered.value.tasks)
            elif is_queued:
                server.scheduler.withdraw(tuple([task.id for task in entry.submission.tasks]))
        if written.proposal is not None and written.applied is not None:
            granted = server.scheduler.accept(written.proposal, written.applied)
        if granted < added:
            picture.changed.call()
        is_folded = True
    finally:
        _leave(group)
        if not is_folded:
            picture.invalidate()  # those behind it are committed too
    return written.outcomes


def _leave(group: Sequence[_Pending]) -> None:
    for entry in group:
        entry.is_in_group = False
        entry.arrived()


def _submit(
    group: Sequence[_Pending], most: QueuedBound | None, leases: Mapping[TaskId, FirstLease]
) -> Operation[list[_Outcome]]:
    outcomes: dict[int, _Outcome] = {}
    saved = yield from idempotency.saved({entry.key for entry in group if entry.key is not None})
    first: dict[tuple[UserId, str], int] = {}
    fresh: list[int] = []
    for place, entry in enumerate(group):
        key, once = entry.key, entry.once
        if key is None or once is None:
            fresh.append(place)
        elif key in saved:
            is_same = saved[key].fingerprint == once.fingerprint
            answer = bytes(saved[key].answer)
            outcomes[place] = Answered(None, answer) if is_same else idempotency.reused(once.key)
        elif first.setdefault(key, place) == place:
            fresh.append(place)
    allowed: list[int] = []
    room = yield from queue_room(group[0].server)
    for place in fresh:
        refusal: GpoolError | None = room.refusal(len(group[place].submission.tasks))
        refusal = refusal or (yield from _may_extend(group[place]))
        if refusal is None:
            allowed.append(place)
        else:
            outcomes[place] = refusal
    server, wanted = group[0].server, [group[place].submission for place in allowed]
    usage = yield from storage.usage_of(holders_of(wanted))
    full = yield from queue_quota_errors(server, wanted, most, usage)
    outcomes |= {place: why for place, why in zip(allowed, full, strict=True) if why is not None}
    allowed = [place for place in allowed if place not in outcomes]
    limits = server.settings.storage_limits
    written = yield from submissions.submit(
        [group[place].submission for place in allowed],
        limits,
        storage.room_of(usage, limits),
        leases,
    )
    if any(full) and not all(isinstance(found, SubmittedTasks) for found in written):
        raise _APART  # a refused submission was charged to a quota that refused another one
    kept: list[idempotency.NewAnswer] = []
    for place, found in zip(allowed, written, strict=True):
        if not isinstance(found, SubmittedTasks):
            outcomes[place] = found if isinstance(found, GpoolError) else _missing(found)
            continue
        once, body = group[place].once, _document(found, group[place].submission.spec)
        outcomes[place] = Answered(found, body)
        if once is not None:
            user, at = group[place].who.user.id, group[place].submission.at
            kept.append(idempotency.NewAnswer(user, once.key, once.fingerprint, body, at))
    yield from idempotency.keep(kept)
    return [
        outcomes[place] if place in outcomes else _repeated(entry, group, first, outcomes)
        for place, entry in enumerate(group)
    ]


def _repeated(
    entry: _Pending,
    group: Sequence[_Pending],
    first: Mapping[tuple[UserId, str], int],
    outcomes: Mapping[int, _Outcome],
) -> _Outcome:
    assert entry.key is not None
    assert entry.once is not None
    place = first[entry.key]
    earlier = group[place].once
    found = outcomes[place]
    if earlier is None or earlier.fingerprint != entry.once.fingerprint:
        if isinstance(found, GpoolError):
            raise _APART  # the key was not kept
        return idempotency.reused(entry.once.key)
    return found if isinstance(found, GpoolError) else Answered(None, found.body)


def _may_extend(entry: _Pending) -> Operation[GpoolError | None]:
    submission = entry.submission
    if submission.is_new_batch:
        return None
    found = yield from operations.batch(submission.batch, None)
    try:
        permit(entry.who, Action.BATCH_EXTEND, batch_thing(found), _batch(submission.batch))
    except GpoolError as refusal:
        return refusal
    return None


def _missing(found: MissingArtifacts) -> Unprocessable:
    return Unprocessable(
        f"{len(found.sha256s)} artifact(s) named here are not yours to see, "
        f"e.g. {found.sha256s[0]}; upload them first (PUT /v1/artifacts/SHA256)",
        missing=list(found.sha256s[:100]),
    )


def _batch(id_: BatchId) -> str:
    return f"batch {encode('batch', id_)}"


def _document(submitted: SubmittedTasks, spec: TaskSpec) -> bytes:
    on = spec.requirements.on
    return _encode(
        _SubmittedAnswer(
            encode("batch", submitted.batch),
            submitted.first_position,
            encode_many("task", [task.id for task in submitted.tasks]),
            ANYONE if on is None else on.asked,
        )
    )
