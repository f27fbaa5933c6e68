"""Stored secrets of users and teams: set, listed by name, deleted, and copied into submissions. Shows no value.

Owners of a team set and delete its secrets; every member who may submit for the team uses them, and so can read them.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from gpool.core.errors import Conflict, InternalFault, Invalid, NotFound, TooLarge, Unprocessable
from gpool.core.ids import encode
from gpool.core.permissions import Action, Role, TeamId
from gpool.server.actions.audit import audited, entry
from gpool.server.actions.tasks.query import acting_account
from gpool.server.identity.authorization import own, permit
from gpool.server.identity.envelope import FieldLocation
from gpool.server.server import Once, Server
from gpool.server.store.generated_rows import NamedSecretsRecord
from gpool.server.store.identity_values import Caller
from gpool.server.store.operations.identity import named_secrets as operations
from gpool.server.store.sealing import Account
from gpool.wire.documents import instant_to_datetime
from gpool.wire.identity import MAX_SECRET_BYTES, NamedSecretDocument, NamedSecretPage

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")


async def list_secrets(server: Server, who: Caller, team: TeamId | None) -> NamedSecretPage:
    holder = await _holder(server, who, team, Action.SECRETS_LIST)
    rows = await server.store.read(operations.secrets_of([holder]))
    return NamedSecretPage(items=[_document(row) for row in rows])


async def list_usable(server: Server, who: Caller) -> NamedSecretPage:
    """Secrets of the caller, and of every team for which the caller may submit."""
    permit(who, Action.SECRETS_LIST, own(who))
    teams = [team for team, role in who.teams.items() if role is not Role.VIEWER]
    holders: list[Account] = [("user", who.user.id), *(("team", team) for team in sorted(teams))]
    rows = await server.store.read(operations.secrets_of(holders))
    return NamedSecretPage(items=[_document(row) for row in rows])


async def put(
    server: Server, who: Caller, team: TeamId | None, name: str, value: str, once: Once | None
) -> NamedSecretDocument:
    """Store a secret, or replace the value of that name. Tasks that were submitted keep the old value."""
    holder = await _holder(server, who, team, Action.SECRET_CHANGE)
    plain = _checked(name, value)
    sealed = await server.sealer.seal(_place(*holder, name), plain)
    row = NamedSecretsRecord(*holder, name, sealed, server.now, server.now)
    fact = entry(server.now, who, "secret.set", encode(*holder), name=name)
    storing = audited(operations.put_secret(row), [fact])
    await server.write_once(who.user, once, storing, lambda _: b"")
    found = await server.store.read(operations.secrets_named([holder], [name]))
    if not found:
        raise NotFound(f"no stored secret {name!r}: it was deleted meanwhile")
    return _document(found[0])


async def delete(
    server: Server, who: Caller, team: TeamId | None, name: str, once: Once | None
) -> None:
    holder = await _holder(server, who, team, Action.SECRET_CHANGE)
    fact = entry(server.now, who, "secret.delete", encode(*holder), name=name[:128])
    deleting = audited(operations.delete_secret(holder, name[:128]), [fact])
    await server.write_once(who.user, once, deleting, lambda _: b"")


async def stored_values(
    server: Server, who: Caller, team: TeamId | None, names: Collection[str]
) -> dict[str, str]:
    """Values for a submission: of the team, else of the caller. A team's API key gets none of the caller's own.

    `Unprocessable` names those that are not stored. The caller has checked `TASK_SUBMIT`.
    """
    holders: list[Account] = [] if who.key_team is not None else [("user", who.user.id)]
    if team is not None:
        holders.append(("team", team))
    rows = await server.store.read(operations.secrets_named(holders, names))
    chosen = {row.name: row for row in rows}  # a team's secret comes last
    lacking = sorted(set(names) - chosen.keys())
    if lacking:
        raise _unknown(lacking, team)
    return {name: await _opened(server, row) for name, row in chosen.items()}


def _unknown(names: list[str], team: TeamId | None) -> Unprocessable:
    listed = ", ".join(repr(name[:80]) for name in names[:10])
    more = "" if team is None else f" (for the team: --team {encode('team', team)})"
    return Unprocessable(
        f"no value of the secret {listed} is given or stored; store it with: "
        f"gpool secret set {names[0][:80]}{more}"
    )


async def _opened(server: Server, row: NamedSecretsRecord) -> str:
    place = _place(row.holder_kind, row.holder_id, row.name)
    try:
        return (await server.sealer.open(place, bytes(row.sealed))).decode()
    except InternalFault as exc:
        raise Conflict(
            f"the stored secret {row.name!r} cannot be decrypted; set it again with: gpool secret set {row.name}"
        ) from exc


async def _holder(server: Server, who: Caller, team: TeamId | None, action: Action) -> Account:
    thing = await acting_account(server, who, team)
    if team is None:
        permit(who, action, thing)
        return "user", who.user.id
    permit(who, action, thing, f"team {encode('team', team)}")
    return "team", team


def _checked(name: str, value: str) -> bytes:
    """Bytes of the value; errors never show it."""
    if _NAME.fullmatch(name) is None:
        shown = name.partition("=")[0][:40]
        raise Invalid(
            f"{shown!r} cannot name a stored secret; a name has letters, digits and _, begins with no digit, "
            "and has at most 128 characters"
        )
    plain = value.encode()
    if not plain or b"\0" in plain:
        raise Invalid(f"the value of {name} is empty or contains a NUL character")
    if len(plain) > MAX_SECRET_BYTES:
        raise TooLarge(f"the value of {name} has {len(plain)} bytes; at most {MAX_SECRET_BYTES}")
    return plain


def _place(kind: str, id_: int, name: str) -> FieldLocation:
    return FieldLocation("named_secrets", f"{kind}/{id_}/{name}", "sealed")


def _document(row: NamedSecretsRecord) -> NamedSecretDocument:
    return NamedSecretDocument(
        name=row.name,
        team=encode("team", row.holder_id) if row.holder_kind == "team" else None,
        created_at=instant_to_datetime(row.created_at),
        updated_at=instant_to_datetime(row.updated_at),
    )
