"""Export of an account's data as JSON lines, read page by page: a long export holds no transaction open.

Artifacts are named by hash and size; their bytes are downloaded with `GET /v1/artifacts/{sha256}`. Webhooks show the
host of their URL only: the rest of it may be a password, and an export is a file that is kept and passed on. Stored
secrets show their names.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import AsyncIterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from gpool.core.errors import GpoolError
from gpool.core.ids import TaskId, UserId, encode
from gpool.core.money.transfers import LedgerAccountId
from gpool.core.permissions import Action
from gpool.server.actions.accounts import accounts, named_secrets, sessions
from gpool.server.actions.events import notices, webhooks
from gpool.server.actions.events.streams import EventQuery
from gpool.server.actions.money import ledger
from gpool.server.actions.tasks import documents, outputs
from gpool.server.identity.authorization import own, permit
from gpool.server.server import Server
from gpool.server.store.identity_values import Caller
from gpool.server.store.operations import nodes
from gpool.server.store.operations.money import accounts as ledger_accounts
from gpool.server.store.operations.tasks import deletion, projects, tasks
from gpool.server.store.protocol import Operation, operation
from gpool.server.store.rows import of_ids, select
from gpool.server.store.sealing import PAYLOAD, VALUE, opened
from gpool.server.store.values import TaskView
from gpool.wire.documents import instant_to_datetime

PAGE = 50

_encode = msgspec.json.Encoder().encode


class _Inline(NamedTuple):
    id: TaskId
    payload: bytes | None
    value: bytes | None


async def lines(server: Server, who: Caller) -> AsyncIterator[bytes]:
    permit(who, Action.ACCOUNT_EXPORT, own(who))
    return _lines(server, who)


async def _lines(server: Server, who: Caller) -> AsyncIterator[bytes]:
    me = await accounts.me(server, who)
    yield _line("account", me.model_dump(mode="json"))
    for key in await accounts.list_keys(server, who):
        yield _line("key", key.model_dump(mode="json"))
    for session in await sessions.list_sessions(server, who):
        yield _line("session", session.model_dump(mode="json"))
    for row in await server.store.read(nodes.nodes(who.user.id)):
        node = row.node
        created = instant_to_datetime(row.created_at).isoformat()
        yield _line(
            "node", {"id": encode("node", node.id), "name": node.name, "created_at": created}
        )
    for webhook in (await webhooks.webhooks(server, who, EventQuery())).items:
        document = webhook.model_dump(mode="json")
        document["host"] = urlsplit(document.pop("url")).hostname
        yield _line("webhook", document)
    for notice in (await notices.notices(server, who)).items:
        yield _line("notice", notice.model_dump(mode="json"))
    for secret in (await named_secrets.list_secrets(server, who, None)).items:
        yield _line("secret", secret.model_dump(mode="json"))
    async for line in _ledger(server, who.user.id):
        yield line
    for project in await server.store.read(projects.labels(("user", who.user.id))):
        yield _line("project", {"name": project})
    async for line in _artifacts(server, who.user.id):
        yield line
    before: TaskId | None = None
    while page := await server.store.read(tasks.tasks(who.user.id, before, PAGE)):
        inline = await server.store.read(_inline([view.row.id for view in page]))
        for view in page:
            async for line in _task(server, who, view, inline.get(view.row.id)):
                yield line
        before = page[-1].row.id


async def _ledger(server: Server, user: UserId) -> AsyncIterator[bytes]:
    for account in await server.store.read(ledger_accounts.balances(("user", user))):
        last = ledger.LAST
        id_ = LedgerAccountId(account.account_id)
        while page := await server.store.read(ledger_accounts.entries(id_, last, PAGE)):
            for row in page:
                document = ledger.entry_document(row).model_dump(mode="json")
                document["transfer_kind"] = document.pop("kind")
                yield _line("ledger_entry", {"account": account.kind, **document})
            last = page[-1].sequence


async def _artifacts(server: Server, user: UserId) -> AsyncIterator[bytes]:
    below = (1 << 62, "")
    while page := await server.store.read(deletion.artifacts_of(("user", user), below, PAGE)):
        for found in page:
            document = {
                "sha256": found.sha256,
                "size_bytes": found.size_bytes,
                "used_as": found.kind,
            }
            yield _line("artifact", document)
        below = (page[-1].size_bytes, page[-1].sha256)


async def _task(
    server: Server, who: Caller, view: TaskView, inline: _Inline | None
) -> AsyncIterator[bytes]:
    document = documents.task(view).model_dump(mode="json")
    document["arguments"] = _text(None if inline is None else inline.payload)
    document["arguments_sha256"] = view.record.payload_sha256
    document["value"] = _text(None if inline is None else inline.value)
    document["value_sha256"] = view.value_sha256
    document["env"] = dict(view.spec.env)
    document["runs"] = document.pop("kind")
    yield _line("task", document)
    after = 0
    while True:
        try:
            page = await outputs.page(server, who, view.row.id, after)
        except GpoolError:  # deleted meanwhile
            return
        if page.items:
            items = [item.model_dump(mode="json") for item in page.items]
            yield _line("log", {"task": encode("task", view.row.id), "items": items})
        if page.next is None:
            return
        after = page.next


@operation
def _inline(ids: list[TaskId]) -> Operation[dict[TaskId, _Inline]]:
    rows = yield from select(
        _Inline,
        "SELECT t.id, t.payload, t.value FROM {tasks} AS i JOIN tasks t ON t.id = i.id",
        {},
        {"tasks": of_ids(ids)},
    )
    return {row.id: row for row in (yield from opened(rows, PAYLOAD, VALUE))}


def _text(data: bytes | None) -> str:
    return b64encode(data or b"").decode()


def _line(kind: str, document: dict[str, Any]) -> bytes:
    return _encode({"kind": kind, **document}) + b"\n"
