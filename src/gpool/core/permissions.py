"""Authorization: `may(actor, action, thing)` decides by one table. Pure; loads nothing.

The first check uses actor and action only (signed in, permission, scope of the API key), so it reveals nothing about
any object. The second uses the actor's relation to the object: without one the outcome is `HIDDEN`, as for a missing
object; else, if not allowed, `REFUSED`. The creator of a team's object has rights only as the team's owner or member.
One file because the table, its validation and the decision use the same relations.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import NewType

from gpool.core.ids import NodeId, UserId
from gpool.core.model import Permission

TeamId = NewType("TeamId", int)


class Role(StrEnum):
    OWNER = "owner"
    MEMBER = "member"
    VIEWER = "viewer"


class Scope(StrEnum):
    """A sign-in has all scopes, and more."""

    TASKS_READ = "tasks:read"
    TASKS_WRITE = "tasks:write"
    NODES_READ = "nodes:read"
    NODES_WRITE = "nodes:write"
    ACCOUNT_READ = "account:read"
    TEAMS_READ = "teams:read"
    TEAMS_WRITE = "teams:write"
    MONEY_READ = "money:read"
    WEBHOOKS = "webhooks"
    ADMIN = "admin"


class ObjectKind(StrEnum):
    """`ACCOUNT` is the user or team in whose name something is created or listed."""

    SERVER = "server"  # the pool itself
    ACCOUNT = "account"
    SESSION = "session"
    KEY = "key"
    MEMBERSHIP = "membership"  # its owner is the member
    TEAM = "team"
    TASK = "task"
    BATCH = "batch"
    ARTIFACT = "artifact"
    NODE = "node"
    GPU = "gpu"
    WEBHOOK = "webhook"


# ---- actors


@dataclass(frozen=True, slots=True)
class Nobody:
    """Anonymous caller."""


@dataclass(frozen=True, slots=True)
class Person:
    """`scopes` is None for a sign-in, else those of the API key."""

    id: UserId
    permissions: frozenset[Permission] = frozenset()
    teams: Mapping[TeamId, Role] = field(default_factory=dict)
    scopes: frozenset[Scope] | None = None


@dataclass(frozen=True, slots=True)
class NodeActor:
    """Node, acting for itself and its leases; never for its owner."""

    id: NodeId


Actor = Nobody | Person | NodeActor


# ---- objects


@dataclass(frozen=True, slots=True)
class Thing:
    """`holder`: the node whose lease covers the object, or the node itself."""

    kind: ObjectKind
    owner: UserId | None = None
    team: TeamId | None = None
    node_owner: UserId | None = None
    holder: NodeId | None = None
    exists: bool = True


POOL = Thing(ObjectKind.SERVER)


@cache
def missing(kind: ObjectKind) -> Thing:
    """Stand-in for a missing object: answered like another user's."""
    return Thing(kind, exists=False)


# ---- relations


class AccessRelation(StrEnum):
    ANYONE = "anyone"  # signed in or not
    SIGNED_IN = "signed_in"  # any user
    SELF = "self"  # the owner
    TEAM_OWNER = "team_owner"
    TEAM_MEMBER = "team_member"
    TEAM_VIEWER = "team_viewer"
    HOST = "host"  # it ran on one of the user's nodes
    OPERATOR = "operator"
    HOLDER = "holder"  # a node: itself, or an object its lease covers


_BY_ROLE = {
    Role.OWNER: AccessRelation.TEAM_OWNER,
    Role.MEMBER: AccessRelation.TEAM_MEMBER,
    Role.VIEWER: AccessRelation.TEAM_VIEWER,
}
_MACHINES = frozenset({AccessRelation.ANYONE, AccessRelation.HOLDER})
_STRANGERS = frozenset({AccessRelation.ANYONE, AccessRelation.SIGNED_IN})


class Action(StrEnum):
    """Each action has exactly one row in `RULES`."""

    # sign-in
    REGISTER = "account.register"
    SIGN_IN_BEGIN = "session.begin_sign_in"  # redirect to an identity provider
    SIGN_IN_PROVE = "session.prove"  # a nonce that a wallet signs or a provider returns
    SIGN_IN = "session.sign_in"
    SIGN_IN_LINK = "session.link"  # a link that opens the page signed in, once
    PASSWORD_RESET = "password.reset"  # by the link of a mail or an operator
    REFRESH = "session.refresh"
    SIGN_OUT = "session.sign_out"
    SESSIONS_LIST = "session.list"
    SESSION_END = "session.end"
    # account
    ME_READ = "account.read"
    ACCOUNT_DELETE = "account.delete"
    ACCOUNT_EXPORT = "account.export"
    PASSWORD_CHANGE = "account.password"
    WALLET_LINK = "wallet.link"
    WALLET_UNLINK = "wallet.unlink"
    PAYOUT_WALLET_SET = "wallet.payout"
    KEY_MAKE = "key.make"
    KEYS_LIST = "key.list"
    KEY_END = "key.end"
    SECRETS_LIST = "secret.list"
    SECRET_CHANGE = "secret.change"
    # teams
    TEAM_MAKE = "team.make"
    TEAMS_LIST = "team.list"
    TEAM_READ = "team.read"
    TEAM_CHANGE = "team.change"
    TEAM_DELETE = "team.delete"
    TEAM_INVITE = "team.invite"
    TEAM_JOIN = "team.join"
    TEAM_ROLE_SET = "team.role"
    TEAM_LEAVE = "membership.leave"
    # tasks
    TASK_SUBMIT = "task.submit"
    TASK_QUOTE = "task.quote"
    TASKS_LIST = "task.list"
    TASKS_LIST_ALL = "task.list_all"
    TASK_READ = "task.read"
    TASK_CANCEL = "task.cancel"
    TASK_DELETE = "task.delete"
    TASK_PREEMPT = "task.preempt"
    BATCH_READ = "batch.read"
    BATCH_EXTEND = "batch.extend"
    BATCH_CANCEL = "batch.cancel"
    BATCH_DELETE = "batch.delete"
    ARTIFACT_UPLOAD = "artifact.upload"
    ARTIFACT_UPLOAD_OUTPUT = "artifact.upload_output"
    ARTIFACT_READ = "artifact.read"
    ARTIFACTS_LIST = "artifact.list"
    ARTIFACT_DELETE = "artifact.delete"
    # nodes
    NODES_LIST = "node.list"
    NODE_READ = "node.read"
    NODE_TASKS = "node.tasks"
    NODE_INVITE = "node.invite"
    NODE_JOIN = "node.join"
    NODE_JOIN_BY_INVITE = "node.join_by_invite"
    NODE_PROVE = "node.prove"
    NODE_OFFER = "node.offer"
    NODE_CHANNEL = "node.channel"
    NODE_REPORT = "node.report"
    NODE_CHANGE = "node.change"
    NODE_REMOVE = "node.remove"
    GPUS_LIST = "gpu.list"
    GPU_READ = "gpu.read"
    GPU_CHANGE = "gpu.change"
    GPU_UNFLAG = "gpu.unflag"
    # money
    LEDGER_READ = "ledger.read"
    LEDGER_GRANT = "ledger.grant"
    LEDGER_REFUND = "ledger.refund"
    LEDGER_VERIFY = "ledger.verify"
    BUDGET_SET = "budget.set"
    DEPOSITS_READ = "deposit.read"
    DEPOSITS_LIST_ALL = "deposit.list_all"
    DEPOSITS_RESUME = "deposit.resume"
    # events
    EVENTS_READ = "event.read"
    EVENTS_READ_POOL = "event.read_pool"
    WEBHOOK_CREATE = "webhook.create"
    WEBHOOKS_LIST = "webhook.list"
    WEBHOOK_READ = "webhook.read"
    WEBHOOK_CHANGE = "webhook.change"
    WEBHOOKS_POOL = "webhook.pool"
    WEBHOOKS_LIST_POOL = "webhook.list_pool"
    NOTICES_READ = "notice.read"
    NOTICE_CHANGE = "notice.change"
    # the pool
    HEALTH_READ = "server.health"
    SCHEMA_READ = "server.schema"
    PAGE_READ = "server.page"  # scripts and styles, and the sign-in page
    PUBLIC_KEYS_READ = "server.public_keys"
    METRICS_READ = "server.metrics"
    USERS_LIST = "user.list"
    USER_READ = "user.read"
    USER_INVITE = "user.invite"
    USER_PERMISSIONS_SET = "user.permissions"
    USER_SUSPEND = "user.suspend"
    PASSWORD_LINK = "password.link"  # a link that sets a new password, once
    QUOTA_SET = "quota.set"
    POLICY_READ = "policy.read"
    POLICY_CHANGE = "policy.change"
    KEYS_ROTATE = "server.rotate_keys"
    AUDIT_READ = "audit.read"
    REPLICAS_READ = "replicas.read"
    READ_ONLY_SET = "server.read_only"


class AuditRule(StrEnum):
    """Rule of an action's row in the audit record, in the transaction of its effect."""

    ALWAYS = "always"
    OTHERS = "others"  # if an operator does it to an object of another account
    NEVER = "never"  # a read, or recorded elsewhere: in the task, its attempts, the session


@dataclass(frozen=True, slots=True)
class PermissionRule:
    """`scope` None: never with an API key. `needs`: a further permission."""

    kind: ObjectKind
    may: frozenset[AccessRelation]
    scope: Scope | None
    changes: bool
    needs: Permission | None = None
    audit: AuditRule = AuditRule.NEVER


_ANYONE = frozenset({AccessRelation.ANYONE})
_SIGNED_IN = frozenset({AccessRelation.SIGNED_IN})
_OPERATOR = frozenset({AccessRelation.OPERATOR})
_SELF = frozenset({AccessRelation.SELF})
_NODE = frozenset({AccessRelation.HOLDER})
_OWN = _SELF | {AccessRelation.TEAM_OWNER}  # a team's owner acts for the team
_WORK = _OWN | {AccessRelation.TEAM_MEMBER}
_VIEW = _WORK | {AccessRelation.TEAM_VIEWER}


def _reads(
    kind: ObjectKind,
    may: frozenset[AccessRelation],
    scope: Scope | None,
    needs: Permission | None = None,
    audit: AuditRule = AuditRule.NEVER,
) -> PermissionRule:
    return PermissionRule(kind, may, scope, False, needs, audit)


def _changes(
    kind: ObjectKind,
    may: frozenset[AccessRelation],
    scope: Scope | None,
    needs: Permission | None = None,
    audit: AuditRule = AuditRule.ALWAYS,
) -> PermissionRule:
    return PermissionRule(kind, may, scope, True, needs, audit)


_A, _K, _S = Action, ObjectKind, Scope
_OTHERS, _NEVER = AuditRule.OTHERS, AuditRule.NEVER

RULES: Mapping[Action, PermissionRule] = {
    _A.REGISTER: _changes(_K.SERVER, _ANYONE, None),
    _A.SIGN_IN_BEGIN: _reads(_K.SERVER, _ANYONE, None),
    _A.SIGN_IN_PROVE: _changes(_K.SERVER, _ANYONE, None, audit=_NEVER),
    _A.SIGN_IN: _changes(_K.SERVER, _ANYONE, None),
    _A.SIGN_IN_LINK: _changes(_K.ACCOUNT, _SELF, None, Permission.OPERATOR),
    _A.PASSWORD_RESET: _changes(_K.SERVER, _ANYONE, None),
    _A.REFRESH: _changes(_K.SERVER, _ANYONE, None, audit=_NEVER),
    _A.SIGN_OUT: _changes(_K.SESSION, _SELF, None),
    _A.SESSIONS_LIST: _reads(_K.ACCOUNT, _SELF | _OPERATOR, None),
    _A.SESSION_END: _changes(_K.SESSION, _SELF | _OPERATOR, None),
    _A.ME_READ: _reads(_K.ACCOUNT, _SELF, _S.ACCOUNT_READ),
    _A.ACCOUNT_DELETE: _changes(_K.ACCOUNT, _SELF, None),
    _A.ACCOUNT_EXPORT: _reads(_K.ACCOUNT, _SELF, None),
    _A.PASSWORD_CHANGE: _changes(_K.ACCOUNT, _SELF, None),
    _A.WALLET_LINK: _changes(_K.ACCOUNT, _SELF, None),
    _A.WALLET_UNLINK: _changes(_K.ACCOUNT, _SELF, None),
    _A.PAYOUT_WALLET_SET: _changes(_K.ACCOUNT, _SELF, None, Permission.PROVIDER),
    _A.KEY_MAKE: _changes(_K.ACCOUNT, _SELF, None),
    _A.KEYS_LIST: _reads(_K.ACCOUNT, _SELF | _OPERATOR, _S.ACCOUNT_READ),
    _A.KEY_END: _changes(_K.KEY, _SELF | _OPERATOR, None),
    _A.SECRETS_LIST: _reads(_K.ACCOUNT, _WORK, _S.TASKS_READ),
    _A.SECRET_CHANGE: _changes(_K.ACCOUNT, _OWN, _S.TASKS_WRITE),
    _A.TEAM_MAKE: _changes(_K.ACCOUNT, _SELF, _S.TEAMS_WRITE),
    _A.TEAMS_LIST: _reads(_K.ACCOUNT, _SELF | _OPERATOR, _S.TEAMS_READ),
    _A.TEAM_READ: _reads(_K.TEAM, _VIEW | _OPERATOR, _S.TEAMS_READ),
    _A.TEAM_CHANGE: _changes(_K.TEAM, _OWN | _OPERATOR, _S.TEAMS_WRITE),
    _A.TEAM_DELETE: _changes(_K.TEAM, _OWN, None),
    _A.TEAM_INVITE: _changes(_K.TEAM, _OWN, _S.TEAMS_WRITE),
    _A.TEAM_JOIN: _changes(_K.SERVER, _SIGNED_IN, _S.TEAMS_WRITE),
    _A.TEAM_ROLE_SET: _changes(_K.TEAM, _OWN, _S.TEAMS_WRITE),
    _A.TEAM_LEAVE: _changes(_K.MEMBERSHIP, _SELF, _S.TEAMS_WRITE),
    _A.TASK_SUBMIT: _changes(_K.ACCOUNT, _WORK, _S.TASKS_WRITE, Permission.CONSUMER, audit=_NEVER),
    _A.TASK_QUOTE: _reads(_K.ACCOUNT, _WORK, _S.TASKS_READ),
    _A.TASKS_LIST: _reads(_K.ACCOUNT, _VIEW | _OPERATOR, _S.TASKS_READ, audit=_OTHERS),
    _A.TASKS_LIST_ALL: _reads(_K.SERVER, _OPERATOR, _S.ADMIN, audit=_OTHERS),
    _A.TASK_READ: _reads(_K.TASK, _VIEW | _OPERATOR, _S.TASKS_READ, audit=_OTHERS),
    _A.TASK_CANCEL: _changes(_K.TASK, _OWN | _OPERATOR, _S.TASKS_WRITE, audit=_OTHERS),
    _A.TASK_DELETE: _changes(_K.TASK, _OWN | _OPERATOR, _S.TASKS_WRITE),
    _A.TASK_PREEMPT: _changes(_K.TASK, _OPERATOR, _S.ADMIN),
    _A.BATCH_READ: _reads(_K.BATCH, _VIEW | _OPERATOR, _S.TASKS_READ, audit=_OTHERS),
    _A.BATCH_EXTEND: _changes(_K.BATCH, _SELF, _S.TASKS_WRITE, Permission.CONSUMER, audit=_NEVER),
    _A.BATCH_CANCEL: _changes(_K.BATCH, _OWN | _OPERATOR, _S.TASKS_WRITE, audit=_OTHERS),
    _A.BATCH_DELETE: _changes(_K.BATCH, _OWN | _OPERATOR, _S.TASKS_WRITE),
    _A.ARTIFACT_UPLOAD: _changes(_K.ACCOUNT, _WORK, _S.TASKS_WRITE, audit=_NEVER),
    _A.ARTIFACT_UPLOAD_OUTPUT: _changes(_K.TASK, _NODE, None, audit=_NEVER),
    _A.ARTIFACT_READ: _reads(_K.ARTIFACT, _VIEW | _OPERATOR | _NODE, _S.TASKS_READ, audit=_OTHERS),
    _A.ARTIFACTS_LIST: _reads(_K.ACCOUNT, _VIEW, _S.TASKS_READ),
    _A.ARTIFACT_DELETE: _changes(_K.ARTIFACT, _SELF, _S.TASKS_WRITE),
    _A.NODES_LIST: _reads(_K.SERVER, _SIGNED_IN, _S.NODES_READ),
    _A.NODE_READ: _reads(_K.NODE, _SIGNED_IN, _S.NODES_READ),
    _A.NODE_TASKS: _reads(_K.NODE, _SELF | _OPERATOR, _S.NODES_READ, audit=_OTHERS),
    _A.NODE_INVITE: _changes(_K.ACCOUNT, _SELF, _S.NODES_WRITE, Permission.PROVIDER),
    _A.NODE_JOIN: _changes(_K.ACCOUNT, _SELF, _S.NODES_WRITE, Permission.PROVIDER),
    _A.NODE_JOIN_BY_INVITE: _changes(_K.SERVER, _ANYONE, None),
    _A.NODE_PROVE: _changes(_K.SERVER, _ANYONE, None, audit=_NEVER),
    _A.NODE_OFFER: _changes(_K.NODE, _NODE, None, audit=_NEVER),
    _A.NODE_CHANNEL: _changes(_K.NODE, _NODE, None, audit=_NEVER),
    _A.NODE_REPORT: _changes(_K.TASK, _NODE, None, audit=_NEVER),
    _A.NODE_CHANGE: _changes(_K.NODE, _SELF | _OPERATOR, _S.NODES_WRITE),
    _A.NODE_REMOVE: _changes(_K.NODE, _SELF | _OPERATOR, _S.NODES_WRITE),
    _A.GPUS_LIST: _reads(_K.SERVER, _SIGNED_IN, _S.NODES_READ),
    _A.GPU_READ: _reads(_K.GPU, _SIGNED_IN, _S.NODES_READ),
    _A.GPU_CHANGE: _changes(_K.GPU, _SELF | _OPERATOR, _S.NODES_WRITE),
    _A.GPU_UNFLAG: _changes(_K.GPU, _OPERATOR, _S.ADMIN),
    _A.LEDGER_READ: _reads(_K.ACCOUNT, _VIEW | _OPERATOR, _S.MONEY_READ, audit=_OTHERS),
    _A.LEDGER_GRANT: _changes(_K.SERVER, _OPERATOR, _S.ADMIN),
    _A.LEDGER_REFUND: _changes(_K.SERVER, _OPERATOR, _S.ADMIN),
    _A.LEDGER_VERIFY: _reads(_K.SERVER, _OPERATOR, _S.ADMIN),
    _A.BUDGET_SET: _changes(_K.ACCOUNT, _OWN | _OPERATOR, _S.ADMIN),
    _A.DEPOSITS_READ: _reads(_K.ACCOUNT, _SELF, _S.MONEY_READ),
    _A.DEPOSITS_LIST_ALL: _reads(_K.SERVER, _OPERATOR, _S.ADMIN),
    _A.DEPOSITS_RESUME: _changes(_K.SERVER, _OPERATOR, _S.ADMIN),
    _A.EVENTS_READ: _reads(_K.ACCOUNT, _VIEW, _S.TASKS_READ),
    _A.EVENTS_READ_POOL: _reads(_K.SERVER, _OPERATOR, _S.ADMIN),
    _A.WEBHOOK_CREATE: _changes(_K.ACCOUNT, _OWN, _S.WEBHOOKS),
    _A.WEBHOOKS_LIST: _reads(_K.ACCOUNT, _OWN, _S.WEBHOOKS),
    _A.WEBHOOK_READ: _reads(_K.WEBHOOK, _OWN, _S.WEBHOOKS),
    _A.WEBHOOK_CHANGE: _changes(_K.WEBHOOK, _OWN, _S.WEBHOOKS),
    _A.WEBHOOKS_POOL: _changes(_K.SERVER, _OPERATOR, _S.ADMIN),
    _A.WEBHOOKS_LIST_POOL: _reads(_K.SERVER, _OPERATOR, _S.ADMIN),
    _A.NOTICES_READ: _reads(_K.ACCOUNT, _SELF, _S.WEBHOOKS),
    _A.NOTICE_CHANGE: _changes(_K.ACCOUNT, _SELF, _S.WEBHOOKS),
    _A.HEALTH_READ: _reads(_K.SERVER, _ANYONE, None),
    _A.SCHEMA_READ: _reads(_K.SERVER, _ANYONE, None),
    _A.PAGE_READ: _reads(_K.SERVER, _ANYONE, None),
    _A.PUBLIC_KEYS_READ: _reads(_K.SERVER, _ANYONE, None),
    _A.METRICS_READ: _reads(_K.SERVER, _OPERATOR, _S.NODES_READ),
    _A.USERS_LIST: _reads(_K.SERVER, _OPERATOR, _S.ADMIN),
    _A.USER_READ: _reads(_K.ACCOUNT, _SELF | _OPERATOR, _S.ACCOUNT_READ),
    _A.USER_INVITE: _changes(_K.SERVER, _OPERATOR, _S.ADMIN),
    _A.USER_PERMISSIONS_SET: _changes(_K.ACCOUNT, _OPERATOR, None),
    _A.USER_SUSPEND: _changes(_K.ACCOUNT, _OPERATOR, _S.ADMIN),
    _A.PASSWORD_LINK: _changes(_K.ACCOUNT, _OPERATOR, None),
    _A.QUOTA_SET: _changes(_K.ACCOUNT, _OPERATOR, _S.ADMIN),
    _A.POLICY_READ: _reads(_K.SERVER, _OPERATOR, _S.ADMIN),
    _A.POLICY_CHANGE: _changes(_K.SERVER, _OPERATOR, None),
    _A.KEYS_ROTATE: _changes(_K.SERVER, _OPERATOR, None),
    _A.AUDIT_READ: _reads(_K.SERVER, _OPERATOR, _S.ADMIN),
    _A.REPLICAS_READ: _reads(_K.SERVER, _OPERATOR, _S.ADMIN),
    _A.READ_ONLY_SET: _changes(_K.SERVER, _OPERATOR, None),
}


def whole(
    rules: Mapping[Action, PermissionRule], actions: Iterable[Action] = Action
) -> Mapping[ObjectKind, frozenset[AccessRelation]]:
    """Return the relations that can see each kind; raise if an action has no row or a row is invalid."""
    rowless = [action.value for action in actions if action not in rules]
    if rowless:
        raise AssertionError(
            f"no rule for {', '.join(rowless)}: add a row to RULES in core/permissions"
        )
    sees: dict[ObjectKind, frozenset[AccessRelation]] = {kind: frozenset() for kind in ObjectKind}
    for action, rule in rules.items():
        if not rule.may:
            raise AssertionError(f"nobody may {action}")
        if rule.changes and AccessRelation.TEAM_VIEWER in rule.may:
            raise AssertionError(f"a viewer could {action}")
        if rule.kind is not ObjectKind.SERVER and AccessRelation.ANYONE in rule.may:
            raise AssertionError(f"anyone could {action}, a {rule.kind} of somebody")
        sees[rule.kind] |= rule.may - _STRANGERS  # any right on an object includes seeing it
    return sees


_SEES = whole(RULES)


# ---- decisions


class AccessOutcome(StrEnum):
    ALLOWED = "allowed"
    HIDDEN = "hidden"  # 404, as for a missing object
    REFUSED = "refused"  # 403
    SIGN_IN = "sign_in"  # 401: nobody is signed in


@dataclass(frozen=True, slots=True)
class AccessDecision:
    outcome: AccessOutcome
    reason: str = ""  # for people; reveals no more than the outcome

    @property
    def allowed(self) -> bool:
        return self.outcome is AccessOutcome.ALLOWED


ALLOWED = AccessDecision(AccessOutcome.ALLOWED)
HIDDEN = AccessDecision(AccessOutcome.HIDDEN, "not there, or not yours")


def may(actor: Actor, action: Action, thing: Thing) -> AccessDecision:
    """Decide. Raises if the thing's kind is not the rule's."""
    rule = RULES[action]
    if rule.kind is not thing.kind:
        raise AssertionError(f"{action} acts on a {rule.kind}, not on a {thing.kind}")
    refusal = _refused_whatever_it_is(actor, action, rule)
    if refusal is not None:
        return refusal
    if not thing.exists:
        return HIDDEN
    has = standings(actor, thing)
    if has & rule.may:
        return ALLOWED
    if thing.kind is ObjectKind.SERVER:
        return AccessDecision(AccessOutcome.REFUSED, f"{action} needs {_words(rule.may)}")
    if has & _SEES[thing.kind]:
        return AccessDecision(
            AccessOutcome.REFUSED,
            f"you can see this {thing.kind}; {action} needs {_words(rule.may)}",
        )
    return HIDDEN


def _refused_whatever_it_is(
    actor: Actor, action: Action, rule: PermissionRule
) -> AccessDecision | None:
    if AccessRelation.ANYONE in rule.may:
        return None
    match actor:
        case Nobody():
            return AccessDecision(
                AccessOutcome.SIGN_IN, f"{action} needs somebody who is signed in"
            )
        case NodeActor():
            if not rule.may & _MACHINES:
                return AccessDecision(
                    AccessOutcome.REFUSED, f"{action} is for users, not for nodes"
                )
            return None
        case Person():
            if rule.may <= _NODE:
                return AccessDecision(
                    AccessOutcome.REFUSED, f"{action} is for nodes, not for users"
                )
            if actor.scopes is not None and rule.scope not in actor.scopes:
                wanted = (
                    f"an API key with the scope {rule.scope}"
                    if rule.scope
                    else "a sign-in; no API key can do this"
                )
                return AccessDecision(AccessOutcome.REFUSED, f"{action} needs {wanted}")
            if rule.needs is not None and rule.needs not in actor.permissions:
                return AccessDecision(
                    AccessOutcome.REFUSED, f"{action} needs the permission {rule.needs}"
                )
            return None


def standings(actor: Actor, thing: Thing) -> frozenset[AccessRelation]:
    found = {AccessRelation.ANYONE}
    match actor:
        case Nobody():
            pass
        case NodeActor():
            if thing.holder == actor.id:
                found.add(AccessRelation.HOLDER)
        case Person():
            found.add(AccessRelation.SIGNED_IN)
            if Permission.OPERATOR in actor.permissions:
                found.add(AccessRelation.OPERATOR)
            if thing.node_owner == actor.id:
                found.add(AccessRelation.HOST)
            role = actor.teams.get(thing.team) if thing.team is not None else None
            if role is not None:
                found.add(_BY_ROLE[role])
            at_work = thing.team is None or role in (Role.OWNER, Role.MEMBER)
            if thing.owner == actor.id and at_work:
                found.add(AccessRelation.SELF)
    return frozenset(found)


def _words(who: Collection[AccessRelation]) -> str:
    return " or ".join(sorted(standing.value.replace("_", " ") for standing in who))


def as_markdown() -> str:
    """docs/permissions.md, generated: `python -m gpool.core.permissions > docs/permissions.md`."""
    lines = [
        "# Permissions",
        "",
        "Generated from `gpool.core.permissions.RULES`; a test fails when it is stale.",
        "",
        "| action | on | who may | scope of an API key | permission | audit record |",
        "|---|---|---|---|---|---|",
    ]
    for action, rule in RULES.items():
        scope = (
            rule.scope.value if rule.scope else "-" if AccessRelation.ANYONE in rule.may else "none"
        )
        who = ", ".join(standing.value for standing in AccessRelation if standing in rule.may)
        needs = rule.needs.value if rule.needs else ""
        audit = "" if rule.audit is AuditRule.NEVER else rule.audit.value
        lines.append(f"| {action} | {rule.kind} | {who} | {scope} | {needs} | {audit} |")
    lines += [
        "",
        "Scope `none`: the action needs a signed-in session; no API key can perform it. A caller without any",
        "role on an object gets the answer for an object that does not exist; a caller who may see the object",
        "but not perform the action is refused.",
        "",
        "Audit record: `always`: one row per request that succeeds, in the transaction of its effect;",
        "`others`: a row if an operator does it to another account's object (reads: once an hour per object).",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(as_markdown(), end="")  # noqa: T201 - its output is the page
