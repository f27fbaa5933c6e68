"""Sign-in, token refresh, sign-out. Carries out the decisions of `identity.refresh_tokens`."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace

from gpool.core.errors import Forbidden, Invalid, NotSignedIn
from gpool.core.ids import encode
from gpool.core.model import SECOND, Instant, Span
from gpool.core.permissions import Action, ObjectKind, Thing, missing
from gpool.server.actions.audit import audited, entry, note_refused_sign_in
from gpool.server.identity import refresh_tokens as refresh
from gpool.server.identity.access_tokens import LIFE_S, TokenGrant, TokenType
from gpool.server.identity.authorization import own, permit
from gpool.server.identity.envelope import FieldLocation
from gpool.server.identity.passwords import Match
from gpool.server.identity.refresh_tokens import (
    EndFamily,
    Family,
    Presented,
    Refuse,
    Repeat,
    Rotate,
)
from gpool.server.server import Once, Server
from gpool.server.store.identity_values import Account, Caller, StoredSession
from gpool.server.store.operations.identity import accounts as account_operations
from gpool.server.store.operations.identity import sessions as operations
from gpool.server.store.operations.identity import users
from gpool.server.store.protocol import Operation, operation
from gpool.server.store.values import User
from gpool.wire.documents import instant_to_datetime
from gpool.wire.identity import SessionDocument, TokensDocument

MAX_LABEL = 80
EXTENDED_EVERY = Span(3600 * SECOND)
"""A browser's session in use is extended this often: a write for each request would be too many."""

NO_MATCH = "the name or the password is wrong"
SIGN_IN_AGAIN = "this session has ended; sign in again with `gpool login`"
DISABLED = "this account was disabled by an operator; contact an operator"


# ---- sign-in


async def sign_in_with_password(
    server: Server, name: str, password: str, label: str, address: str = ""
) -> TokensDocument:
    """Open a session with tokens."""
    account = await account_with_password(server, name, password, address)
    return await open_session(server, account, label, address, "password")


async def account_with_password(
    server: Server, name: str, password: str, address: str = ""
) -> Account:
    """Account that the password opens. An unknown name, an account without a password and a wrong password get the same answer in
    the same time; after too many wrong ones `TooMany` is raised before any lookup.
    """
    async with server.guard.sign_in(name, address) as guess:
        account = await server.store.read(account_operations.account_by_name(name))
        stored = None if account is None else account.password_hash
        found = await server.identity.passwords.verify(stored, password, trusted=guess.trusted)
        if isinstance(found, Match):
            guess.succeeded()
    if not isinstance(found, Match) or account is None or stored is None:
        await note_refused_sign_in(server, address, "password", f"name {name[:64]}")
        raise NotSignedIn(NO_MATCH)
    if found.rehash is not None:
        await server.write(
            account_operations.rehash_password(account.user.id, stored, found.rehash)
        )
    return account


async def open_session(
    server: Server, account: Account, label: str, address: str = "", via: str = ""
) -> TokensDocument:
    family, token = await _begin(server, account, label, address, via)
    return _tokens(server, account.user, family.id, token)


async def open_browser_session(
    server: Server, account: Account, label: str, address: str = "", via: str = ""
) -> str:
    """Open a session without tokens; returns the cookie's value."""
    family, _ = await _begin(server, account, label, address, f"{via}, browser")
    return refresh.cookie_of(family)


async def _begin(
    server: Server, account: Account, label: str, address: str, via: str
) -> tuple[Family, str]:
    if account.disabled:
        raise Forbidden(DISABLED)
    family, token = refresh.begin(
        account.user.id, secrets.token_bytes(48), server.now, server.identity.terms
    )
    sealed = await server.identity.sealer.seal(_place(family.id), family.seed)
    opened = operations.open_session(
        StoredSession(
            id=family.id,
            user=family.user,
            seed_sealed=sealed,
            generation=0,
            rotated_at=family.rotated_at,
            idle_until=family.idle_until,
            created_at=family.rotated_at,
            expires_at=family.expires_at,
            label=_label(label),
        )
    )
    audit_entry = entry(
        server.now, account.user, "sign_in", f"session {family.id}", address=address, via=via
    )
    await server.write(audited(opened, [audit_entry]))
    return family, token


def _tokens(server: Server, user: User, session: str, token: str) -> TokensDocument:
    grant = TokenGrant(TokenType.USER, encode("user", user.id), session=session)
    return TokensDocument(
        access_token=server.identity.signing.issue(grant, server.now),
        refresh_token=token,
        expires_in=LIFE_S[TokenType.USER],
    )


def _label(text: str) -> str:
    return "".join(letter for letter in text if letter.isprintable())[:MAX_LABEL]


# ---- refresh


@dataclass(frozen=True, slots=True)
class _StoredSession:
    session: StoredSession | None
    user: User | None


async def refresh_tokens(server: Server, token: str) -> TokensDocument:
    """Next pair of tokens, or the same pair again if the answer was lost. Reuse of an older token ends the session."""
    presented = refresh.parse(token)
    if presented is None:
        raise NotSignedIn(SIGN_IN_AGAIN)
    stored = await server.store.read(_stored(presented.family))
    for _ in range(refresh.MAX_TURNS):
        session, user = stored.session, stored.user
        family = None if session is None else await _family(server, session)
        decision = refresh.present(family, presented, server.now, server.identity.terms)
        match decision:
            case Refuse():
                raise NotSignedIn(SIGN_IN_AGAIN)
            case _ if user is None or session is None:
                raise NotSignedIn(SIGN_IN_AGAIN)  # disabled, or gone
            case Repeat(token=again):
                return _tokens(server, user, session.id, again)
            case Rotate(row=row, token=fresh):
                won = await server.write(
                    operations.rotate(row.id, row.generation - 1, row.idle_until, row.rotated_at)
                )
                if won.won:
                    return _tokens(server, user, session.id, fresh)
                stored = _StoredSession(won.session, user)
            case EndFamily(row=row):
                assert row.end_reason is not None
                ending = operations.end_session(
                    row.id, row.end_reason.value, server.now, generation=row.generation
                )
                audit_entry = entry(
                    server.now, user, "session.end", f"session {row.id}", why=row.end_reason.value
                )
                ended = await server.write(audited(ending, [audit_entry]))
                server.credentials.forget()
                if ended:
                    raise NotSignedIn(
                        "this refresh token was used before, so somebody may have a copy; "
                        "the session has ended for both: sign in again"
                    )
                stored = await server.store.read(_stored(presented.family))
    raise NotSignedIn(SIGN_IN_AGAIN)


@operation
def _stored(family: str) -> Operation[_StoredSession]:
    session = yield from operations.session(family)
    if session is None:
        return _StoredSession(None, None)
    caller = yield from users.caller(session.user)
    return _StoredSession(session, None if caller is None else caller.user)


async def _family(server: Server, session: StoredSession) -> Family:
    return Family(
        id=session.id,
        user=session.user,
        seed=await server.identity.sealer.open(_place(session.id), session.seed_sealed),
        generation=session.generation,
        rotated_at=session.rotated_at,
        idle_until=session.idle_until,
        expires_at=session.expires_at,
        ended_at=session.ended_at,
    )


def _place(session: str) -> FieldLocation:
    return FieldLocation("sessions", session, "seed_sealed")


# ---- browser sessions


async def browser_caller(server: Server, cookie: str) -> Caller | None:
    """Caller of a browser's cookie; None if the session is unknown, ended or expired."""
    presented = refresh.parse_cookie(cookie)
    if presented is None:
        return None
    known = server.credentials.cached(cookie)
    if known is not None:
        return known
    stored = await server.store.read(_browser_session(presented.family))
    if stored.session is None or stored.caller is None:
        return None
    family, now = await _family(server, stored.session), server.now
    if not refresh.is_live(family, presented, now):
        return None
    if now - family.rotated_at >= EXTENDED_EVERY and not server.read_only.is_on:
        until = Instant(now + server.identity.terms.idle)
        await server.write(operations.rotate(family.id, family.generation, until, now))
    found = replace(stored.caller, session=family.id)
    server.credentials.cache(cookie, found)
    return found


@dataclass(frozen=True, slots=True)
class _BrowserSession:
    session: StoredSession | None
    caller: Caller | None


@operation
def _browser_session(family: str) -> Operation[_BrowserSession]:
    session = yield from operations.session(family)
    caller = None if session is None else (yield from users.caller(session.user))
    return _BrowserSession(session, caller)


# ---- sign-out


async def sign_out(server: Server, who: Caller | None, token: str | None, everywhere: bool) -> None:
    """End the session of `token` or of the caller, or all. The token is the credential without a signed-in caller: an
    API key given with it changes nothing, and an unknown token is answered like a known one.
    """
    session: StoredSession | None = None
    if token is not None:
        who = who if who is not None and who.session is not None else None
        session = await _of_token(server, token)
        if who is None and session is not None:
            who = await server.store.read(users.caller(session.user))
        if session is None or who is None:
            return  # an unknown token, or one of a removed or disabled user: no session to end
    assert who is not None, "checked by the route"
    owner = who.user.id if session is None else session.user
    permit(who, Action.SIGN_OUT, Thing(ObjectKind.SESSION, owner=owner), "session")
    name = session.id if session is not None else who.session
    why = refresh.FamilyEnd.SIGNED_OUT.value
    audit_entry = entry(
        server.now, who, "sign_out", "everywhere" if everywhere else f"session {name}"
    )
    if everywhere:
        ending = operations.end_sessions_of(who.user.id, why, server.now)
        await server.write(audited(ending, [audit_entry]))
    elif name is not None:
        await server.write(audited(operations.end_session(name, why, server.now), [audit_entry]))
    else:
        raise Invalid("an API key has no session; revoke the key with DELETE /v1/keys/{id}")
    server.credentials.forget()


async def _of_token(server: Server, token: str) -> StoredSession | None:
    presented: Presented | None = refresh.parse(token)
    if presented is None:
        return None
    session = await server.store.read(operations.session(presented.family))
    if session is None:
        return None
    family = await _family(server, session)
    decision = refresh.present(family, presented, server.now, server.identity.terms)
    if isinstance(decision, Refuse):
        return None
    return session


# ---- sessions of the caller


async def list_sessions(server: Server, who: Caller) -> list[SessionDocument]:
    permit(who, Action.SESSIONS_LIST, own(who))
    found = await server.store.read(operations.sessions_of(who.user.id, server.now))
    return [
        SessionDocument(
            id=session.id,
            label=session.label,
            created_at=instant_to_datetime(session.created_at),
            last_used_at=instant_to_datetime(session.rotated_at),
            expires_at=instant_to_datetime(min(session.expires_at, session.idle_until)),
            current=session.id == who.session,
        )
        for session in found
    ]


async def end_session(server: Server, who: Caller, id_: str, once: Once | None) -> None:
    audit_entry = entry(server.now, who, "session.end", f"session {id_[:64]}", why="revoked")
    ending = audited(_end(id_, who, server.now), [audit_entry])
    await server.write_once(who.user, once, ending, lambda _: b"")
    server.credentials.forget()


@operation
def _end(id_: str, who: Caller, at: Instant) -> Operation[bool]:
    found = yield from operations.session(id_)
    thing = (
        missing(ObjectKind.SESSION)
        if found is None
        else Thing(ObjectKind.SESSION, owner=found.user)
    )
    permit(who, Action.SESSION_END, thing, f"session {id_[:64]}")
    yield from operations.end_session(id_, refresh.FamilyEnd.REVOKED.value, at)
    return True
