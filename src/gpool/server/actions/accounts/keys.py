"""API keys: creation, listing, revocation. A key is limited to its scopes and to actions open to API keys."""

from __future__ import annotations

import msgspec

from gpool.core.errors import Forbidden
from gpool.core.ids import decode, encode
from gpool.core.model import Instant, Permission
from gpool.core.permissions import Action, ObjectKind, Scope, TeamId, Thing, missing
from gpool.server.actions.operators.audit import audited, entry
from gpool.server.identity import credentials
from gpool.server.identity.authorization import own, permit
from gpool.server.server import Once, Server
from gpool.server.settings import span
from gpool.server.store.identity_values import ApiKey, Caller
from gpool.server.store.operation import operation
from gpool.server.store.operations.identity import users as operations
from gpool.server.store.protocol import Operation
from gpool.wire.documents import instant_to_datetime
from gpool.wire.identity import KeyDocument, KeyMade, KeyRequest

USUAL_SCOPES = frozenset(Scope) - {Scope.ADMIN}
"""Default scopes of a key; `admin` must be named explicitly."""


class _SavedKey(msgspec.Struct, frozen=True):
    """Answer stored under its Idempotency-Key, without the key, which is derived again."""

    id: int


async def list_keys(server: Server, who: Caller) -> list[KeyDocument]:
    permit(who, Action.KEYS_LIST, own(who))
    return [_document(key) for key in await server.store.read(operations.keys_of(who.user.id))]


async def create_key(
    server: Server, who: Caller, request: KeyRequest, once: Once | None
) -> KeyMade:
    permit(who, Action.KEY_MAKE, own(who))
    scopes = (
        USUAL_SCOPES
        if request.scopes is None
        else frozenset(Scope(word) for word in request.scopes)
    )
    if Scope.ADMIN in scopes and Permission.OPERATOR not in who.user.permissions:
        raise Forbidden("the scope 'admin' is only for keys of operators")
    team = None if request.team is None else TeamId(decode("team", request.team))
    if team is not None:
        is_member = (
            Thing(ObjectKind.TEAM, team=team) if team in who.teams else missing(ObjectKind.TEAM)
        )
        permit(who, Action.TEAM_READ, is_member, f"team {request.team}")
    if once is None:
        key = credentials.fresh(credentials.USER_PREFIX)
    else:
        parts = ("key", str(who.user.id), once.key, once.fingerprint)
        key = server.credentials.derived(credentials.USER_PREFIX, *parts)
    now = server.now
    made = ApiKey(
        id=server.ids.next(),
        user=who.user.id,
        name=request.name,
        scopes=scopes,
        team=team,
        created_at=now,
        expires_at=None
        if request.expires_in_s is None
        else Instant(now + span(request.expires_in_s)),
        ended_at=None,
        last_used_at=None,
    )
    words = None if scopes is None else " ".join(sorted(scope.value for scope in scopes))
    audit_entry = entry(
        now, who, "key.make", encode("key", made.id), name=made.name, scopes=words or "all"
    )
    answered = await server.write_once(
        who.user,
        once,
        audited(_add(made, credentials.hashed(key)), [audit_entry]),
        lambda id_: msgspec.json.encode(_SavedKey(id_)),
    )
    saved = msgspec.json.decode(answered.body, type=_SavedKey)
    found = await server.store.read(operations.key(saved.id))
    return KeyMade(**_document(found or made).model_dump(), key=key)


@operation
def _add(key: ApiKey, hashed: str) -> Operation[int]:
    yield from operations.add_key(
        key.id,
        key.user,
        key.name,
        hashed,
        key.created_at,
        scopes=key.scopes,
        expires_at=key.expires_at,
        team=key.team,
    )
    return key.id


async def revoke_key(server: Server, who: Caller, id_: int, once: Once | None) -> None:
    audit_entry = entry(server.now, who, "key.end", encode("key", id_))
    ending = audited(_end(id_, who, server.now), [audit_entry])
    await server.write_once(who.user, once, ending, lambda _: b"")
    server.credentials.forget()


@operation
def _end(id_: int, who: Caller, at: Instant) -> Operation[bool]:
    found = yield from operations.key(id_)
    thing = missing(ObjectKind.KEY) if found is None else Thing(ObjectKind.KEY, owner=found.user)
    permit(who, Action.KEY_END, thing, f"key {encode('key', id_)}")
    yield from operations.end_key(id_, None, at)
    return True


def _document(key: ApiKey) -> KeyDocument:
    def when(at: Instant | None) -> object:
        return None if at is None else instant_to_datetime(at)

    return KeyDocument.model_validate(
        {
            "id": encode("key", key.id),
            "name": key.name,
            "scopes": None if key.scopes is None else sorted(scope.value for scope in key.scopes),
            "team": None if key.team is None else encode("team", key.team),
            "created_at": when(key.created_at),
            "expires_at": when(key.expires_at),
            "ended_at": when(key.ended_at),
            "last_used_at": when(key.last_used_at),
        }
    )
