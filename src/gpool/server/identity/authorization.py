"""Authorization: every action calls `permit` with its object's facts; the rules are in `core.permissions`.

Another account's object and a missing one raise the same `NotFound`, so a caller cannot probe for existence.
"""

from __future__ import annotations

from gpool.core.errors import Forbidden, NotFound, NotSignedIn
from gpool.core.ids import UserId
from gpool.core.model import Permission
from gpool.core.permissions import (
    POOL,
    RULES,
    AccessOutcome,
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
)
from gpool.server.store.identity_values import Caller
from gpool.server.store.values import Batch, NodeCredentials, NodeRow, TaskStory, TaskView

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
    if view is None:
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
