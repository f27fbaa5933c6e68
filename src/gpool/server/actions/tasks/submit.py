"""Submission of tasks: one spec, one or many tasks, one commit. Builds no pydantic model per task."""

from __future__ import annotations

import binascii
from binascii import a2b_base64
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from gpool.core.errors import Invalid, TooLarge, TooMany, Unprocessable
from gpool.core.ids import BatchId, SpecId, TaskId, UserId, decode, encode
from gpool.core.model import INLINE_LIMIT_BYTES, KIB
from gpool.core.permissions import Action, TeamId
from gpool.server.actions.operators.quotas import most_queued, queue_quota_error, queue_quota_errors
from gpool.server.actions.tasks.documents import encode_many
from gpool.server.actions.tasks.query import acting_account
from gpool.server.actions.tasks.specs import secrets_of, spec_of
from gpool.server.identity.authorization import batch_thing, permit
from gpool.server.identity.secrets.sealer import secret_place
from gpool.server.server import Answered, Once, Server
from gpool.server.store.batching import Gathering
from gpool.server.store.identity_values import Caller
from gpool.server.store.operation import brief, operation
from gpool.server.store.operations.tasks import idempotency, submissions
from gpool.server.store.operations.tasks import tasks as operations
from gpool.server.store.protocol import Operation
from gpool.server.store.values import MissingArtifacts, NewTask, Submission, Submitted
from gpool.wire.documents import MAX_BATCH, TaskRequest
from gpool.wire.frames import weight_of


class _SubmittedAnswer(msgspec.Struct, frozen=True):
    batch: str
    first_position: int
    ids: list[str]


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_SubmittedAnswer).decode
_MAX_BASE64 = (INLINE_LIMIT_BYTES + 2) // 3 * 4


GATHERED_TASKS = 100
"""Submissions of more tasks are written alone."""

GATHERED_BYTES = 128 * KIB
"""Larger submissions are written alone: PostgreSQL limits a statement to 1 GB, however many are written together."""


@dataclass(slots=True, eq=False)
class _Pending:
    """A submission before its commit. Its tasks count as arriving until the scheduler has folded or refused them."""

    server: Server
    who: Caller
    submission: Submission
    once: Once | None
    is_counted: bool = False
    is_in_group: bool = False  # written with others, even if its request is cancelled

    def arrives(self) -> None:
        if not self.is_counted:
            self.is_counted = True
            self.server.scheduler.arriving += len(self.submission.tasks)

    def arrived(self) -> None:
        if self.is_counted:
            self.is_counted = False
            self.server.scheduler.arriving -= len(self.submission.tasks)

    @property
    def key(self) -> tuple[UserId, str] | None:
        return None if self.once is None else (self.who.user.id, self.once.key)


@dataclass(frozen=True, slots=True)
class Accepted:
    """A committed submission. `body` is the encoded answer; `fresh` is false for a repetition."""

    body: bytes
    batch: BatchId
    tasks: tuple[TaskId, ...]
    fresh: bool


async def submit(server: Server, who: Caller, request: TaskRequest, once: Once | None) -> Accepted:
    team = None if request.team is None else TeamId(decode("team", request.team))
    thing = await acting_account(server, who, team)
    permit(who, Action.TASK_SUBMIT, thing, f"team {request.team}")
    submission = await _submission(server, who, request, team)
    entry = _Pending(server, who, submission, once)
    answered = None
    if _is_light(submission) and submissions.is_plain(submission):
        _admit(entry)
        try:
            answered = await server.submitting.take(entry)
        finally:
            if not entry.is_in_group:
                entry.arrived()
    if answered is None:
        _admit(entry)
        answered = await _alone(entry)
    submitted, body = answered.value, answered.body
    if submitted is None:
        first = _decode(body)
        return Accepted(
            body,
            BatchId(decode("batch", first.batch)),
            tuple(TaskId(decode("task", text)) for text in first.ids),
            fresh=False,
        )
    if not submitted.tasks:
        server.hub.publish((submitted.batch,))  # closed: streams of its results may end
    ids = tuple([task.id for task in submitted.tasks])
    return Accepted(body, submitted.batch, ids, fresh=True)


def _admit(entry: _Pending) -> None:
    scheduler, most = entry.server.scheduler, entry.server.settings.max_queued
    waiting = scheduler.waiting + scheduler.arriving
    if waiting + len(entry.submission.tasks) > most:
        raise TooMany(f"the queue is full with {waiting} waiting tasks; try again later")
    entry.arrives()


# ---- commits, of one submission or of several


def _is_light(s: Submission) -> bool:
    if len(s.tasks) > GATHERED_TASKS:
        return False
    return weight_of(s.spec) + sum(len(task.payload) for task in s.tasks) <= GATHERED_BYTES


_Written = Answered[Submitted] | None
"""None: it could not be written with the others and must be written alone."""


def gathering() -> Gathering[_Pending, list[_Written], _Written]:
    """Group commit of a server: small submissions that arrive during a write are written together by the next."""
    return Gathering(_alone, _together, _fold)


async def _alone(entry: _Pending) -> Answered[Submitted]:
    """Commit one submission. A cancelled request leaves the scheduler in doubt (`Server.write`), which rereads the store."""
    server, submission = entry.server, entry.submission
    entry.arrives()
    try:
        submitting = _submit(server, submission, entry.who, most_queued(server))
        operation = brief(submitting, len(submission.tasks))
        answered = await server.write_once(entry.who.user, entry.once, operation, _document)
        if answered.value is not None:
            server.scheduler.queued(answered.value, submission)
    finally:
        entry.arrived()
    return answered


async def _together(group: Sequence[_Pending]) -> list[_Written]:
    server, is_written = group[0].server, False
    for entry in group:
        entry.is_in_group = True
        entry.arrives()
    rows = sum(len(entry.submission.tasks) for entry in group)
    try:
        written = await server.write(brief(_submit_together(group, most_queued(server)), rows))
        is_written = True
        return written
    finally:
        if not is_written:
            _leave(group)


def _fold(group: Sequence[_Pending], answers: list[_Written]) -> list[_Written]:
    scheduler, is_folded = group[0].server.scheduler, False
    try:
        for entry, answered in zip(group, answers, strict=True):
            if answered is not None and answered.value is not None:
                scheduler.queued(answered.value, entry.submission)
        is_folded = True
    finally:
        _leave(group)
        if not is_folded:
            scheduler.doubt()  # the rest of the group is committed too
    return answers


def _leave(group: Sequence[_Pending]) -> None:
    for entry in group:
        entry.is_in_group = False
        entry.arrived()


async def _submission(
    server: Server, who: Caller, request: TaskRequest, team: TeamId | None
) -> Submission:
    spec = spec_of(request)
    spec_id = SpecId(server.ids.next())
    secrets, mark = (
        await _sealed(server, who.user.id, spec_id, request) if spec.secrets else ((), "")
    )
    new = request.batch is None
    batch = BatchId(server.ids.next() if request.batch is None else decode("batch", request.batch))
    return Submission(
        batch=batch,
        is_new_batch=new,
        closes_batch=not request.more,
        spec_id=spec_id,
        spec=spec,
        user=who.user.id,
        tasks=_tasks(server, request),
        at=server.now,
        team=team,
        secrets=secrets,
        secrets_mark=mark,
    )


async def _sealed(
    server: Server, user: UserId, spec: SpecId, request: TaskRequest
) -> tuple[tuple[tuple[str, bytes], ...], str]:
    """Each secret sealed for its spec, and a fingerprint that is equal for equal secrets of this user."""
    given = sorted(secrets_of(request).items())
    await server.sealer.prepare()
    sealed = tuple(
        (name, server.sealer.seal_now(secret_place(spec, name), value.encode()))
        for name, value in given
    )
    words = [word.encode() for pair in given for word in pair]
    return sealed, server.sealer.mark(b"secrets", str(user).encode(), *words)


def _tasks(server: Server, request: TaskRequest) -> list[NewTask]:
    if request.function is None:
        ids = server.ids.take(request.copies)
        return [NewTask(TaskId(id_), position) for position, id_ in enumerate(ids)]
    calls = request.calls
    if calls is None:
        raise Invalid("a function needs 'calls': one entry of pickled arguments per run")
    if not calls and request.batch is None:
        raise Invalid("'calls' is empty; give at least one call, or the 'batch' to close")
    if len(calls) > MAX_BATCH:
        raise TooLarge(f"{len(calls)} calls; at most {MAX_BATCH} in one request, more with 'batch'")
    new = []
    for position, (call, id_) in enumerate(zip(calls, server.ids.take(len(calls)), strict=True)):
        if type(call) is str:
            text, sha256 = call, ""
        else:
            assert not isinstance(call, str)
            text, sha256 = call.payload, call.payload_sha256
            if bool(text) == bool(sha256):
                raise Invalid(
                    f"calls[{position}]: give exactly one of 'payload' and 'payload_sha256'"
                )
        if len(text) > _MAX_BASE64:
            raise TooLarge(
                f"calls[{position}] has more than {INLINE_LIMIT_BYTES} bytes; "
                "upload it as an artifact and give 'payload_sha256'"
            )
        try:
            payload = a2b_base64(text, strict_mode=True) if text else b""
        except (binascii.Error, ValueError):
            raise Invalid(f"calls[{position}] is not base64") from None
        if len(payload) > INLINE_LIMIT_BYTES:
            raise TooLarge(f"calls[{position}] has {len(payload)} bytes; upload it as an artifact")
        if not payload and not sha256:
            raise Invalid(f"calls[{position}] is empty; it must be the pickled (args, kwargs)")
        new.append(NewTask(TaskId(id_), position, payload, sha256))
    return new


@operation
def _submit(
    server: Server, submission: Submission, who: Caller, most: int | None
) -> Operation[Submitted]:
    if not submission.is_new_batch:
        found = yield from operations.batch(submission.batch, None)
        permit(who, Action.BATCH_EXTEND, batch_thing(found), _batch(submission.batch))
    full = yield from queue_quota_error(server, submission, most)
    if full is not None:
        raise full
    outcome = yield from operations.submit(submission)
    if isinstance(outcome, MissingArtifacts):
        raise Unprocessable(
            f"{len(outcome.sha256s)} artifact(s) named here are missing or not yours, "
            f"e.g. {outcome.sha256s[0]}; upload them first (PUT /v1/artifacts/SHA256)",
            missing=list(outcome.sha256s[:100]),
        )
    return outcome


@operation
def _submit_together(group: Sequence[_Pending], most: int | None) -> Operation[list[_Written]]:
    """Commit those without an obstacle; the others get None and raise their error when written alone."""
    server = group[0].server
    seen = yield from idempotency.used({entry.key for entry in group if entry.key is not None})
    new: list[int] = []
    for place, entry in enumerate(group):
        if entry.key not in seen:
            new.append(place)
            if entry.key is not None:
                seen.add(entry.key)  # a key counts once within the group too
    asked = [group[place].submission for place in new]
    full = yield from queue_quota_errors(server, asked, most)
    plain = [place for place, why in zip(new, full, strict=True) if why is None]
    written = yield from submissions.submit_together([group[place].submission for place in plain])
    answers: list[_Written] = [None] * len(group)
    kept: list[idempotency.Kept] = []
    for place, submitted in zip(plain, written, strict=True):
        if submitted is None:
            continue
        once, body = group[place].once, _document(submitted)
        answers[place] = Answered(submitted, body)
        if once is not None:
            user, at = group[place].who.user.id, group[place].submission.at
            kept.append((user, once.key, once.fingerprint, body, at))
    yield from idempotency.keep(kept)
    return answers


def _batch(id_: BatchId) -> str:
    return f"batch {encode('batch', id_)}"


def _document(submitted: Submitted) -> bytes:
    return _encode(
        _SubmittedAnswer(
            encode("batch", submitted.batch),
            submitted.first_position,
            encode_many("task", [task.id for task in submitted.tasks]),
        )
    )
