"""Authentication of users by API key or access token, and authorization: every action calls `permit`; the rules are in
`core.permissions`.

Another account's object and a missing one raise the same `NotFound`, so a caller cannot probe for existence.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace

from gpool.core.errors import Forbidden, NotFound, NotSignedIn
from gpool.core.ids import UserId, encode
from gpool.core.model import Instant, Permission, Span
from gpool.core.permissions import (
    POOL,
    RULES,
    AccessOutcome,
    AccessRelation,
    Action,
    Actor,
    Nobody,
    NodeActor,
    ObjectKind,
    Person,
    TeamId,
    Thing,
    may,
    missing,
    standings,
)
from gpool.server.identity.access_tokens import Claims, TokenType
from gpool.server.identity.signing_keys import TokenSigner
from gpool.server.store.identity_values import Caller
from gpool.server.store.operations.identity import sessions, users
from gpool.server.store.protocol import Operation, Store, operation
from gpool.server.store.values import Batch, NodeCredentials, NodeRow, TaskStory, TaskView

USER_PREFIX, INVITE_PREFIX = "gpk_", "gpi_"
MAX_REMEMBERED = 10_000


def hashed(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def fresh(prefix: str) -> str:
    return prefix + secrets.token_urlsafe(32)


@dataclass(frozen=True, slots=True)
class _CachedCaller:
    who: Caller
    until: Instant


class Credentials:
    def __init__(
        self,
        store: Store,
        now: Callable[[], Instant],
        remember: Span,
        root_key: bytes,
        signing: TokenSigner | None = None,
    ) -> None:
        self._store = store
        self._now = now
        self._remember = remember
        self._root_key = root_key
        self._signing = signing
        self._known: dict[str, _CachedCaller] = {}
        self._used: dict[int, Instant] = {}

    def remembered(self, secret: str) -> Caller | None:
        """Caller of a key that was looked up lately; None: ask `who`."""
        if not secret.startswith(USER_PREFIX):
            return None
        known, now = self._known.get(hashed(secret)), self._now()
        if known is None or known.until <= now:
            return None
        if known.who.key is not None:
            self._used[known.who.key] = now
        return known.who

    async def who(self, secret: str) -> Caller | None:
        if not secret.startswith(USER_PREFIX):
            return await self._by_token(secret)
        digest = hashed(secret)
        now = self._now()
        known = self._known.get(digest)
        if known is not None and known.until > now:
            found: Caller | None = known.who
        else:
            found = await self._store.read(users.caller_by_key(digest, now))
            self._keep(digest, found, now)
        if found is not None and found.key is not None:
            self._used[found.key] = now
        return found

    async def _by_token(self, token: str) -> Caller | None:
        """Caller of a token; every few seconds the store is asked whether its session has ended."""
        if self._signing is None:
            return None
        now = self._now()
        claims = await self._signing.read(token, TokenType.USER, now)
        if not isinstance(claims, Claims) or claims.session is None:
            return None
        known = self._known.get(claims.session)
        if known is not None and known.until > now:
            found: Caller | None = known.who
        else:
            found = await self._store.read(_in_session(claims.session, now))
            self._keep(claims.session, found, now)
        if found is None or encode("user", found.user.id) != claims.subject:
            return None
        return found

    def _keep(self, name: str, found: Caller | None, now: Instant) -> None:
        if len(self._known) >= MAX_REMEMBERED:
            self._known.clear()
        if found is not None:
            self._known[name] = _CachedCaller(found, Instant(now + self._remember))

    def cached(self, secret: str) -> Caller | None:
        """Caller of a browser cookie that was looked up lately."""
        known = self._known.get(hashed(secret))
        return None if known is None or known.until <= self._now() else known.who

    def cache(self, secret: str, who: Caller) -> None:
        self._keep(hashed(secret), who, self._now())

    def used_keys(self) -> list[tuple[int, Instant]]:
        used, self._used = self._used, {}
        return list(used.items())

    def forget(self) -> None:
        self._known.clear()

    def derived(self, prefix: str, *context: str) -> str:
        """Secret derived from the root key: the same for the same context, so it need not be stored."""
        message = "\0".join(context).encode()
        digest = hmac.new(self._root_key, message, hashlib.sha256).digest()
        return prefix + base64.urlsafe_b64encode(digest).decode().rstrip("=")


@operation
def _in_session(id_: str, at: Instant) -> Operation[Caller | None]:
    session = yield from sessions.session(id_)
    if session is None or session.ended_at is not None or session.expires_at <= at:
        return None
    found = yield from users.caller(session.user)
    return None if found is None else replace(found, session=id_)


Who = Caller | NodeCredentials | None
"""A user, a node, or an anonymous caller."""

SIGN_IN = (
    "sign in (`gpool login`), or send an API key as 'Authorization: Bearer gpk_…'; "
    "`gpool up` wrote one for you"
)
_TEAM_KEY_TOO = frozenset({Action.ME_READ, Action.ARTIFACT_UPLOAD})
"""Actions outside its team that a team key may take: submitting needs them."""


def actor_of(who: Who) -> Actor:
    match who:
        case None:
            return Nobody()
        case NodeCredentials():
            return NodeActor(who.node)
        case Caller():
            permissions = who.user.permissions
            if who.key_team is not None:
                permissions -= {Permission.OPERATOR}
            return Person(who.user.id, permissions, who.teams, who.scopes)


def permit(who: Who, action: Action, thing: Thing, what: str = "") -> None:
    """Raise unless `who` may take the action. `what`: the object as the caller named it."""
    if isinstance(who, Caller) and who.key_team is not None and _is_beyond(who, action, thing):
        thing = missing(thing.kind)
    decision = may(actor_of(who), action, thing)
    match decision.outcome:
        case AccessOutcome.ALLOWED:
            return
        case AccessOutcome.SIGN_IN:
            raise NotSignedIn(SIGN_IN)
        case AccessOutcome.REFUSED:
            raise Forbidden(f"not allowed: {decision.reason}")
        case AccessOutcome.HIDDEN:
            raise NotFound(f"no {what or thing.kind.value} of yours")


def acts_as_operator(who: Caller, action: Action, thing: Thing) -> bool:
    """Return whether the caller may do this for being an operator only: the object is another account's."""
    if Permission.OPERATOR not in who.user.permissions:
        return False
    return standings(actor_of(who), thing) & RULES[action].may == {AccessRelation.OPERATOR}


def gate(who: Who, action: Action) -> None:
    """Check before the object is read: raise if `who` may do this to no object at all."""
    kind = RULES[action].kind
    if kind is ObjectKind.SERVER:
        permit(who, action, POOL)
        return
    decision = may(actor_of(who), action, missing(kind))
    if decision.outcome is AccessOutcome.SIGN_IN:
        raise NotSignedIn(SIGN_IN)
    if decision.outcome is AccessOutcome.REFUSED:
        raise Forbidden(f"not allowed: {decision.reason}")


def _is_beyond(who: Caller, action: Action, thing: Thing) -> bool:
    return (
        thing.kind is not ObjectKind.SERVER
        and thing.team != who.key_team
        and action not in _TEAM_KEY_TOO
    )


# ---- the facts of objects


def own(who: Caller) -> Thing:
    return Thing(ObjectKind.ACCOUNT, owner=who.user.id)


def account_of(user: UserId | None) -> Thing:
    return missing(ObjectKind.ACCOUNT) if user is None else Thing(ObjectKind.ACCOUNT, owner=user)


def task_thing(view: TaskView | TaskStory | None) -> Thing:
    if view is None or view.row.parent is not None:  # siblings are the server's own
        return missing(ObjectKind.TASK)
    row = view.row
    return Thing(
        ObjectKind.TASK,
        owner=row.user,
        team=None if row.team is None else TeamId(row.team),
        holder=row.node if row.holding else None,
    )


def batch_thing(batch: Batch | None) -> Thing:
    if batch is None:
        return missing(ObjectKind.BATCH)
    return Thing(
        ObjectKind.BATCH, owner=batch.user, team=None if batch.team is None else TeamId(batch.team)
    )


def node_thing(row: NodeRow | None) -> Thing:
    if row is None:
        return missing(ObjectKind.NODE)
    return Thing(ObjectKind.NODE, owner=row.node.owner, holder=row.node.id)
