"""Requests as submissions: the spec, secrets sealed for it, and its tasks."""

from __future__ import annotations

import binascii
from binascii import a2b_base64
from dataclasses import replace

from gpool.core.errors import Invalid, TooLarge
from gpool.core.ids import BatchId, SpecId, TaskId, decode
from gpool.core.model import INLINE_LIMIT_BYTES
from gpool.core.money.transfers import parse_credits
from gpool.core.permissions import TeamId
from gpool.core.specs.owners import ANYONE
from gpool.observability.context import current_trace
from gpool.server.actions.accounts.named_secrets import stored_values
from gpool.server.actions.owners import accepted_owners
from gpool.server.actions.tasks.repeated import WantedTasks
from gpool.server.actions.tasks.specs import check_secret_values, secrets_of, spec_of
from gpool.server.identity.sealer import secret_place
from gpool.server.server import Server
from gpool.server.store.identity_values import Caller
from gpool.server.store.operations.tasks.submissions import (
    NewTask,
    Submission,
)
from gpool.wire.documents import MAX_BATCH, TaskRequest

_MAX_BASE64 = (INLINE_LIMIT_BYTES + 2) // 3 * 4


async def submission_of(
    server: Server, who: Caller, wanted: WantedTasks, team: TeamId | None
) -> Submission:
    request, spec = wanted.request, wanted.spec
    if spec is None:
        spec = spec_of(request)
        server.repeated.keep(wanted, spec)
    if request.on is not None or spec.secrets or server.settings.default_on != ANYONE:
        on = await accepted_owners(server, who, request.on, has_secrets=bool(spec.secrets))
        spec = replace(spec, requirements=replace(spec.requirements, on=on))
    trace = current_trace()
    if trace is not None and trace.is_sampled:
        spec = replace(spec, trace=trace.header)
    spec_id = SpecId(server.ids.next())
    secrets, mark = await _sealed(server, who, team, spec_id, request) if spec.secrets else ((), "")
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
        team_key=who.team_key,
        secrets=secrets,
        secrets_mark=mark,
        max_cost=None if request.max_cost is None else parse_credits(str(request.max_cost)),
        project=request.project or "",
    )


async def _sealed(
    server: Server, who: Caller, team: TeamId | None, spec: SpecId, request: TaskRequest
) -> tuple[tuple[tuple[str, bytes], ...], str]:
    """Each secret sealed for its spec, and a fingerprint that is equal for equal secrets of this user.

    A stored secret is copied: tasks keep the value that it had at submission.
    """
    given = sorted((await _secret_values(server, who, team, request)).items())
    await server.sealer.prepare()
    sealed = tuple(
        (name, server.sealer.seal_now(secret_place(spec, name), value.encode()))
        for name, value in given
    )
    words = [word.encode() for pair in given for word in pair]
    return sealed, server.sealer.mark(b"secrets", str(who.user.id).encode(), *words)


async def _secret_values(
    server: Server, who: Caller, team: TeamId | None, request: TaskRequest
) -> dict[str, str]:
    asked = secrets_of(request)
    given = {name: value for name, value in asked.items() if value is not None}
    if len(given) < len(asked):
        given |= await stored_values(server, who, team, asked.keys() - given.keys())
        check_secret_values(given)
    return given


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
