"""Submitting tasks: one spec, one or many tasks, one commit. Makes no model per task."""

from __future__ import annotations

import binascii
from binascii import a2b_base64
from dataclasses import dataclass

import msgspec

from gpool.core.errors import Forbidden, Invalid, TooLarge, TooMany, Unprocessable
from gpool.core.ids import BatchId, SpecId, TaskId, decode, encode
from gpool.core.model import INLINE_LIMIT_BYTES, Permission
from gpool.server.actions.specs import spec_of
from gpool.server.actions.spelling import spell
from gpool.server.server import Once, Server
from gpool.server.store.operation import brief, operation
from gpool.server.store.operations import tasks as operations
from gpool.server.store.protocol import Operation
from gpool.server.store.values import MissingArtifacts, NewTask, Submission, Submitted, User
from gpool.wire.documents import MAX_BATCH, TaskRequest


class _Answer(msgspec.Struct, frozen=True):
    """`wire.documents.SubmittedDocument`, as fast as it has to be."""

    batch: str
    first_position: int
    ids: list[str]


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Answer).decode
_MAX_BASE64 = (INLINE_LIMIT_BYTES + 2) // 3 * 4


@dataclass(frozen=True, slots=True)
class Accepted:
    """Durable. `body` is the document; `batch` and `tasks` are what it names; not `fresh`: it happened before."""

    body: bytes
    batch: BatchId
    tasks: tuple[TaskId, ...]
    fresh: bool


async def submit(server: Server, user: User, request: TaskRequest, once: Once | None) -> Accepted:
    """Checks, commits, and lets the scheduler know. Under a repeated key: the first answer."""
    if Permission.CONSUMER not in user.permissions and Permission.OPERATOR not in user.permissions:
        raise Forbidden(
            "your account may not submit tasks; ask the operator for the permission 'consumer'"
        )
    submission = _submission(server, user, request)
    waiting = server.scheduler.state.queued_count
    if waiting + len(submission.tasks) > server.settings.max_queued:
        raise TooMany(f"{waiting} tasks wait already, the queue is full; try again later")
    operation = brief(_submit(submission), len(submission.tasks))
    answered = await server.write_once(user, once, operation, _document)
    submitted, body = answered.value, answered.body
    if submitted is None:
        first = _decode(body)
        return Accepted(
            body,
            BatchId(decode("batch", first.batch)),
            tuple(TaskId(decode("task", text)) for text in first.ids),
            fresh=False,
        )
    server.scheduler.queued(submitted, submission.spec, user.id, submission.at)
    if not submitted.tasks:
        server.hub.publish((submitted.batch,))  # closed: those who stream its results may be done
    ids = tuple([task.id for task in submitted.tasks])
    return Accepted(body, submitted.batch, ids, fresh=True)


def _submission(server: Server, user: User, request: TaskRequest) -> Submission:
    spec = spec_of(request)
    new = request.batch is None
    batch = BatchId(server.ids.next() if request.batch is None else decode("batch", request.batch))
    return Submission(
        batch=batch,
        is_new_batch=new,
        closes_batch=not request.more,
        spec_id=SpecId(server.ids.next()),
        spec=spec,
        user=user.id,
        tasks=_tasks(server, request),
        at=server.now,
    )


def _tasks(server: Server, request: TaskRequest) -> list[NewTask]:
    if request.function is None:
        ids = server.ids.take(request.copies)
        return [NewTask(TaskId(id_), position) for position, id_ in enumerate(ids)]
    calls = request.calls
    if calls is None:
        raise Invalid("a function needs 'calls': one entry of pickled arguments for each run")
    if not calls and request.batch is None:
        raise Invalid("'calls' is empty; give at least one call, or the 'batch' this closes")
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
                f"calls[{position}] holds more than {INLINE_LIMIT_BYTES} bytes; "
                "upload it as an artifact and give 'payload_sha256'"
            )
        try:
            payload = a2b_base64(text, strict_mode=True) if text else b""
        except (binascii.Error, ValueError):
            raise Invalid(f"calls[{position}] is not base64") from None
        if len(payload) > INLINE_LIMIT_BYTES:
            raise TooLarge(
                f"calls[{position}] holds {len(payload)} bytes; upload it as an artifact"
            )
        if not payload and not sha256:
            raise Invalid(f"calls[{position}] is empty; it holds the pickled (args, kwargs)")
        new.append(NewTask(TaskId(id_), position, payload, sha256))
    return new


@operation
def _submit(submission: Submission) -> Operation[Submitted]:
    outcome = yield from operations.submit(submission)
    if isinstance(outcome, MissingArtifacts):
        raise Unprocessable(
            f"{len(outcome.sha256s)} artifact(s) named here are not yours to see, "
            f"e.g. {outcome.sha256s[0]}; upload them first (PUT /v1/artifacts/SHA256)",
            missing=list(outcome.sha256s[:100]),
        )
    return outcome


def _document(submitted: Submitted) -> bytes:
    return _encode(
        _Answer(
            encode("batch", submitted.batch),
            submitted.first_position,
            spell("task", [task.id for task in submitted.tasks]),
        )
    )
