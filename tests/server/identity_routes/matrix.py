"""The matrix of routes, objects and callers: the expected answer of each cell.

Its skeleton is derived: one row for every declared endpoint, with the callers that `core.permissions` allows for the
declared action. Written by hand in `CASES` are request bodies, queries, further rows of one route (variants), and the
rows whose answer is not that of the one action. A cell is right when the real route answers as the row says.

A caller relates to an object in one or several of these ways: `self` (created it, and may still act for it), `owner`,
`member`, `viewer` (of the team it belongs to), `operator`, `user` (is signed in at all).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

from gpool.core.permissions import RULES, AccessRelation, Action, ObjectKind, PermissionRule
from gpool.server.api.endpoints import Endpoint
from gpool.server.api.routing import endpoints

OK, UNKNOWN, REFUSED, HIDDEN = "ok", 401, 403, 404
CONTENT = b"anybody may upload this"
SHA256 = hashlib.sha256(CONTENT).hexdigest()
USUAL = frozenset(
    [
        "tasks:read",
        "tasks:write",
        "nodes:read",
        "nodes:write",
        "account:read",
        "teams:read",
        "teams:write",
        "money:read",
        "webhooks",
    ]
)
EVERYTHING = frozenset({"consumer", "provider"})


@dataclass(frozen=True)
class Asker:
    """`stands`: relations to the objects, by name; `scopes` None: signed in, not by a key."""

    name: str
    kind: str = "person"  # person | machine | unknown
    permissions: frozenset[str] = EVERYTHING
    scopes: frozenset[str] | None = None
    stands: dict[str, frozenset[str]] = field(default_factory=dict)
    only_team: bool = False  # by a key that is for one team
    is_operator: bool = False


@dataclass(frozen=True)
class Row:
    """Expected answers of one route. `scope` None: no API key may. `sees`: callers who get 403 instead of 404."""

    may: frozenset[str]
    scope: str | None = None
    sees: frozenset[str] = frozenset()
    needs: str | None = None
    objects: tuple[str, ...] = ("-",)
    machine: int | str = REFUSED
    own_account: bool = False  # acts on the caller's own account, which a team's key may not
    team_key: int | str | None = None  # answer to a team's key, if it is not the member's
    open: int | None = None  # the status everybody gets, signed in or not
    body: Callable[[dict[str, str]], Any] | Any = None
    query: str = ""


# ---- the derived skeleton

_WORDS = {
    AccessRelation.SIGNED_IN: "user",
    AccessRelation.SELF: "self",
    AccessRelation.TEAM_OWNER: "owner",
    AccessRelation.TEAM_MEMBER: "member",
    AccessRelation.TEAM_VIEWER: "viewer",
    AccessRelation.OPERATOR: "operator",
}
_OBJECTS = {
    ObjectKind.TASK: ("task:p", "task:t", "task:o", "task:-"),
    ObjectKind.BATCH: ("batch:p", "batch:t", "batch:o", "batch:-"),
    ObjectKind.TEAM: ("team:t", "team:-"),
    ObjectKind.ARTIFACT: ("artifact:p", "artifact:t", "artifact:-"),
    ObjectKind.NODE: ("node:p", "node:-"),
    ObjectKind.GPU: ("gpu:p", "gpu:-"),
    ObjectKind.KEY: ("key:p", "key:-"),
    ObjectKind.SESSION: ("session:p", "session:-"),
    ObjectKind.WEBHOOK: ("webhook:p", "webhook:t", "webhook:-"),
}
TEAM_KEY_TOO = {Action.ME_READ, Action.ARTIFACT_UPLOAD}
"""Actions on the caller's own account that a key for one team may do."""


def derived(action: Action) -> Row:
    """The row of a route that does this one action to an object of its kind."""
    rule = RULES[action]
    may = _words(rule.may)
    if rule.kind is ObjectKind.TEAM:  # belongs to nobody but itself
        may -= {"self"}
    is_own = rule.kind is ObjectKind.ACCOUNT and AccessRelation.SELF in rule.may
    if is_own:  # the object is the caller's account: everybody has one
        may = frozenset({"user"})
    return Row(
        may,
        None if rule.scope is None else rule.scope.value,
        _seen_by(rule) - may if not is_own else frozenset(),
        None if rule.needs is None else rule.needs.value,
        _OBJECTS.get(rule.kind, ("-",)),
        HIDDEN if AccessRelation.HOLDER in rule.may else REFUSED,
        own_account=is_own and action not in TEAM_KEY_TOO,
    )


def _words(standings: Collection[AccessRelation]) -> frozenset[str]:
    return frozenset(_WORDS[each] for each in standings if each in _WORDS)


def _seen_by(rule: PermissionRule) -> frozenset[str]:
    """Callers who know of objects of this kind, because some action on them is theirs."""
    if rule.kind is ObjectKind.SERVER:
        return frozenset({"user"})
    known = (other.may for other in RULES.values() if other.kind is rule.kind)
    return _words({each for may in known for each in may}) - {"user"}


# ---- what is written by hand

Cell = dict[str, Any]
_TEAM = {"objects": ("team:t", "team:-")}
_MEMBER = {"objects": ("member:t", "member:-")}
_USER = {"objects": ("user:p", "user:-")}
_WALLET = {"objects": ("wallet:p", "wallet:-")}
_RESOURCE = {"objects": ("gpu:p", "gpu:-", "node:p", "node:-")}
_SIGNATURE = {"message": "x", "signature": "0x"}
_COMMAND = {"command": ["true"]}
_HOOK = {"url": "https://8.8.8.8/hook"}  # an address, so nothing is asked for it
_NOTICE = {"objects": ("notice:p", "notice:-"), "may": frozenset({"self"}), "own_account": False}
_SECRET: Cell = {"objects": ("secret:p",), "may": frozenset({"self"}), "own_account": False}
_TEAM_SECRET: Cell = {
    **_TEAM,
    "may": frozenset({"owner"}),
    "sees": frozenset({"member", "viewer", "operator"}),
    "own_account": False,
    "query": "?team={id}",
}
_NODE: Cell = {"machine": OK, "body": {"name": "another", "cpu_milli": 1000}}


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


CASES: dict[tuple[str, str, str], Cell] = {
    # ("METHOD", path, variant): members of the row; `action` where it is not the first one declared
    ("POST", "/v1/users", ""): {"open": 201, "body": {"name": "new", "password": "long enough 1"}},
    ("POST", "/v1/auth/password", ""): {
        "body": {"name": "ada", "password": "a long enough password"}
    },
    ("POST", "/v1/auth/wallet", ""): {"open": 400, "body": _SIGNATURE},
    ("GET", "/v1/auth/oidc/start", ""): {
        "open": 404,
        "query": "?redirect_uri=http://127.0.0.1/",
    },
    ("POST", "/v1/auth/oidc/finish", ""): {"open": 401, "body": {"state": "x", "code": "x"}},
    ("POST", "/v1/auth/refresh", ""): {"open": 401, "body": {"refresh_token": "x"}},
    ("POST", "/v1/auth/logout", ""): {  # the caller's own session
        "may": words("user"),
        "sees": words(""),
        "objects": ("-",),
        "body": {},
    },
    ("DELETE", "/v1/me", ""): {"body": {}},  # not confirmed
    ("PUT", "/v1/me/password", ""): {"body": {"new": "short"}},
    ("POST", "/v1/wallets", ""): {"body": _SIGNATURE},
    ("PATCH", "/v1/wallets/{address}", ""): {
        **_WALLET,
        "may": words("self"),
        "own_account": False,
        "body": {"payout": True},
    },
    ("DELETE", "/v1/wallets/{address}", ""): {**_WALLET, "body": _SIGNATURE},
    ("POST", "/v1/keys", ""): {"body": {"name": "one more"}},
    # stored secrets
    ("GET", "/v1/secrets", "of a team"): {
        **_TEAM,
        "may": words("owner member"),
        "sees": words("viewer operator"),
        "own_account": False,
        "query": "?team={id}",
    },
    ("PUT", "/v1/secrets/{name}", ""): {"body": {"value": "hush"}},
    ("PUT", "/v1/secrets/{name}", "of a team"): {**_TEAM_SECRET, "body": {"value": "hush"}},
    ("DELETE", "/v1/secrets/{name}", ""): _SECRET,
    ("DELETE", "/v1/secrets/{name}", "of a team"): _TEAM_SECRET,
    # teams
    ("POST", "/v1/teams", ""): {"body": {"name": "another"}},
    ("GET", "/v1/teams", "of everybody"): {"action": Action.USERS_LIST, "query": "?all=true"},
    ("POST", "/v1/teams/join", ""): {"body": {"token": "x"}},
    ("PATCH", "/v1/teams/{id}", ""): {"body": {"name": "office"}},
    ("PATCH", "/v1/teams/{id}", "quota"): {
        "may": words("operator"),
        "sees": words("owner member viewer"),
        "body": {"quota": {"queued_tasks": 5}},
    },
    ("POST", "/v1/teams/{id}/invites", ""): {"body": {}},
    ("POST", "/v1/teams/{id}/members", ""): {"body": {"user": "stranger", "role": "viewer"}},
    ("PATCH", "/v1/teams/{id}/members/{user}", ""): {**_MEMBER, "body": {"role": "member"}},
    ("DELETE", "/v1/teams/{id}/members/{user}", ""): {
        **_MEMBER,
        "may": words("owner leaver"),
        "sees": words("member viewer operator"),
    },
    ("DELETE", "/v1/teams/{id}/invitations/{user}", ""): {"objects": ("invited:t", "invited:-")},
    ("DELETE", "/v1/invitations/{id}", ""): {
        "may": words("invited"),
        "sees": words(""),
        "objects": ("invitation:t", "invitation:-"),
    },
    # pages: without the header of another site; that a form's origin and token count is in tests/server/web
    ("GET", "/static/{name}", ""): {"open": 404},
    ("POST", "/sign-in", ""): {"open": 403},
    ("POST", "/register", ""): {"open": 403},
    ("POST", "/in", ""): {"open": 403},
    ("POST", "/reset", ""): {"open": 403},
    ("GET", "/reset/{code}", ""): {"open": 401},
    ("POST", "/reset/password", ""): {"open": 403},
    ("POST", "/sign-in/wallet/message", ""): {"open": 403},
    ("POST", "/sign-in/wallet", ""): {"open": 403},
    ("POST", "/sign-in/oidc", ""): {"open": 403},
    ("GET", "/sign-in/oidc/back", ""): {"open": 401},
    ("POST", "/sign-in/oidc/finish", ""): {"open": 403},
    ("POST", "/sign-out", ""): {
        "may": words("user"),
        "sees": words(""),
        "objects": ("-",),
    },
    ("POST", "/account/keys/revoke", ""): {"body": lambda parts: f"id={parts['id']}".encode()},
    ("POST", "/account/secrets", ""): {"body": b"name=none&value=hush"},
    ("POST", "/account/secrets/delete", ""): {**_SECRET, "body": b"name=none"},
    ("POST", "/account/sessions/end", ""): {"body": lambda parts: f"id={parts['id']}".encode()},
    ("POST", "/tasks/cancel", ""): {"body": lambda parts: f"id={parts['id']}".encode()},
    ("GET", "/", "of everybody"): {"action": Action.TASKS_LIST_ALL, "query": "?all=1"},
    ("GET", "/live/pool", "of everybody"): {"action": Action.TASKS_LIST_ALL, "query": "?all=1"},
    ("GET", "/tasks", "of everybody"): {"action": Action.TASKS_LIST_ALL, "query": "?all=1"},
    ("GET", "/tasks/new", ""): {"own_account": False},  # a form, and prices that everybody sees
    ("POST", "/tasks/new", ""): {"body": b"command=true"},
    ("POST", "/tasks/new/quote", ""): {"body": b"command=true"},
    ("GET", "/tasks/{id}/files/{sha256}", ""): {"objects": ("task:-",)},  # 404 without results
    # operators
    ("POST", "/v1/users/invites", ""): {"body": {}},
    ("POST", "/v1/admin/keys/rotate", ""): {"body": {}},
    ("GET", "/v1/receipt-keys", ""): {"open": 404},  # no operator has created one
    ("PATCH", "/v1/admin/policy", ""): {"body": {"dry_run": True}},
    ("PUT", "/v1/admin/cordons/{id}", ""): {"objects": ("node:p",), "body": {}},
    ("PUT", "/v1/admin/certified/{id}", ""): {
        "objects": ("node:p",),
        "body": {"labels": ["audited"]},
    },
    ("DELETE", "/v1/admin/cordons/{id}", ""): {"objects": ("cordon:p",)},
    ("POST", "/v1/admin/reservations", ""): {"body": {"nodes": []}},
    ("DELETE", "/v1/admin/reservations/{id}", ""): {"objects": ("reservation:p",)},
    ("GET", "/v1/users/{id}", ""): {**_USER, "may": words("self operator"), "own_account": False},
    ("PATCH", "/v1/users/{id}", ""): {**_USER, "sees": words("self"), "body": {"disabled": False}},
    ("POST", "/v1/users/{id}/password-link", ""): {**_USER, "sees": words("self")},
    ("GET", "/admin/users/{id}", ""): {
        **_USER,
        "may": words("self operator"),
        "own_account": False,
    },
    ("POST", "/admin/users/{id}/permissions", ""): {
        **_USER,
        "sees": words("self"),
        "body": b"permission=consumer",
    },
    ("POST", "/admin/users/{id}/state", ""): {
        **_USER,
        "sees": words("self"),
        "body": b"to=enabled",
    },
    ("POST", "/admin/users/{id}/quota", ""): {
        **_USER,
        "sees": words("self"),
        "body": b"queued_tasks=9",
    },
    ("POST", "/admin/users/{id}/password-link", ""): {**_USER, "sees": words("self")},
    ("POST", "/admin/nodes/{id}/cordon", ""): {"objects": ("node:p",)},
    # money
    ("GET", "/v1/ledger", "of a team"): {
        **_TEAM,
        "may": words("owner member viewer operator"),
        "own_account": False,
        "query": "?team={id}",
    },
    ("GET", "/v1/ledger", "of a user"): {
        **_USER,
        "may": words("self operator"),
        "own_account": False,
        "query": "?user={id}",
    },
    ("PUT", "/v1/budget", ""): {"body": {"cap_microcredits": 5}},
    ("PUT", "/v1/budget", "of a team"): {
        **_TEAM,
        "may": words("owner operator"),
        "sees": words("member viewer"),
        "own_account": False,
        "query": "?team={id}",
        "body": {"cap_microcredits": 5},
    },
    ("PUT", "/v1/budget", "of a user"): {
        **_USER,
        "may": words("self operator"),
        "own_account": False,
        "query": "?user={id}",
        "body": {"cap_microcredits": 5},
    },
    **{
        ("GET", path, "of a user"): {
            **_USER,
            "may": words("self operator"),
            "own_account": False,
            "query": "?user={id}",
        }
        for path in (
            "/v1/receipts",
            "/v1/usage",
            "/v1/usage/totals",
            "/v1/earnings",
            "/v1/payouts",
        )
    },
    **{
        ("GET", path, "of a team"): {
            **_TEAM,
            "may": words("owner member viewer operator"),
            "own_account": False,
            "query": "?team={id}",
        }
        for path in ("/v1/receipts", "/v1/usage", "/v1/usage/totals")
    },
    **{
        ("GET", path, ""): {
            "objects": ("receipt:p", "receipt:-"),
            "may": words("self operator"),
            "own_account": False,
        }
        for path in ("/v1/receipts/{id}", "/receipts/{id}")
    },
    ("GET", "/v1/payouts/{id}", ""): {"objects": ("payout:p",)},
    ("POST", "/v1/admin/payouts", ""): {"objects": ("earned:p",), "body": {"month": "2001-01"}},
    ("POST", "/v1/admin/rewards", ""): {
        "objects": ("used:p",),
        "body": {"month": "2001-01", "pool_microcredits": 5},
    },
    ("POST", "/v1/admin/ledger/grants", ""): {
        "objects": ("user:p",),
        "body": lambda ids: {"to": ids["id"], "amount_microcredits": 5},
    },
    ("POST", "/v1/admin/ledger/refunds", ""): {
        "objects": ("charge:p",),
        "body": lambda ids: {"charge": ids["id"], "amount_microcredits": 5},
    },
    ("POST", "/v1/admin/deposits/resume", ""): {"body": {"from_block": 5}},
    # events
    ("GET", "/v1/events", "of a team"): {
        **_TEAM,
        "may": words("owner member viewer"),
        "sees": words("operator"),
        "own_account": False,
        "query": "?team={id}",
    },
    ("GET", "/v1/events", "of the pool"): {
        "action": Action.EVENTS_READ_POOL,
        "query": "?pool=true",
    },
    ("POST", "/v1/webhooks", ""): {"body": _HOOK},
    ("POST", "/v1/webhooks", "of a team"): {
        **_TEAM,
        "may": words("owner"),
        "sees": words("member viewer operator"),
        "own_account": False,
        "query": "?team={id}",
        "body": _HOOK,
    },
    ("POST", "/v1/webhooks", "of the pool"): {
        "action": Action.WEBHOOKS_POOL,
        "query": "?pool=true",
        "body": _HOOK,
    },
    ("GET", "/v1/webhooks", "of a team"): {
        **_TEAM,
        "may": words("owner"),
        "sees": words("member viewer operator"),
        "own_account": False,
        "query": "?team={id}",
    },
    ("GET", "/v1/webhooks", "of the pool"): {
        "action": Action.WEBHOOKS_LIST_POOL,
        "query": "?pool=true",
    },
    ("PATCH", "/v1/webhooks/{id}", ""): {"body": {"kinds": ["task.*"]}},
    ("POST", "/v1/webhooks/{id}/rotate", ""): {"body": {}},
    ("POST", "/v1/webhooks/{id}/replay", ""): {"body": {}},
    ("POST", "/v1/me/notices", ""): {"body": {"address": "ada@example.org"}},
    ("POST", "/v1/me/notices/{id}/confirm", ""): {**_NOTICE, "body": {"code": "00000000"}},
    ("DELETE", "/v1/me/notices/{id}", ""): _NOTICE,
    # tasks
    ("POST", "/v1/tasks", ""): {"body": _COMMAND},
    ("POST", "/v1/tasks", "for a team"): {
        **_TEAM,
        "may": words("owner member"),
        "sees": words("viewer operator"),
        "own_account": False,
        "body": lambda ids: {**_COMMAND, "team": ids["id"]},
    },
    ("POST", "/v1/tasks", "into a batch"): {
        "action": Action.BATCH_EXTEND,
        "may": words("self"),
        "sees": words("operator"),
        "objects": ("batch:p", "batch:-"),
        "body": lambda ids: {**_COMMAND, "batch": ids["id"], "more": True},
    },
    ("POST", "/submit_task", ""): {"body": _COMMAND},
    ("POST", "/v1/quotes", ""): {"body": _COMMAND},
    ("POST", "/v1/quotes", "for a team"): {
        **_TEAM,
        "may": words("owner member"),
        "sees": words("viewer operator"),
        "own_account": False,
        "body": lambda ids: {**_COMMAND, "team": ids["id"]},
    },
    ("GET", "/v1/tasks", "of a team"): {
        **_TEAM,
        "may": words("owner member viewer operator"),
        "own_account": False,
        "query": "?team={id}",
    },
    ("GET", "/v1/tasks", "of everybody"): {
        "action": Action.TASKS_LIST_ALL,
        "query": "?all=true",
    },
    ("GET", "/v1/queue", "of a team"): {
        **_TEAM,
        "may": words("owner member viewer operator"),
        "own_account": False,
        "query": "?team={id}",
    },
    ("GET", "/v1/queue", "of everybody"): {"action": Action.TASKS_LIST_ALL, "query": "?all=true"},
    ("GET", "/task_status", ""): {"query": "?id={id}"},
    ("GET", "/v1/batches/{id}/results", ""): {"objects": ("batch:done", "batch:-")},
    ("PUT", "/v1/artifacts/{sha256}", ""): {"machine": OK, "body": CONTENT},
    ("POST", "/v1/artifacts/{sha256}/parts", ""): {"machine": OK, "body": {"size_bytes": 1}},
    ("POST", "/v1/artifacts/{sha256}/complete", ""): {
        "machine": OK,
        "body": {"part_sha256s": []},
    },
    # Must it be uploaded? An operator reads others' artifacts, but may name only its own.
    ("HEAD", "/v1/artifacts/{sha256}", ""): {"may": words("self owner member viewer")},
    # A team's key deletes what it has uploaded itself, not the uploads of the member.
    ("DELETE", "/v1/artifacts/{sha256}", ""): {"team_key": REFUSED},
    # nodes
    ("POST", "/v1/nodes", ""): _NODE,
    ("POST", "/v1/resources", ""): _NODE,
    ("POST", "/register_gpu", ""): _NODE,
    ("POST", "/v1/nodes/challenges", ""): {"body": {}},
    ("POST", "/v1/nodes/invites", ""): {"body": {}},
    ("PATCH", "/v1/nodes/{id}", ""): {"body": {"availability": "paused"}},
    ("GET", "/v1/resources/{gpu}", ""): _RESOURCE,
    ("PATCH", "/v1/resources/{gpu}", "whether it is well"): {"body": {"quarantined": None}},
    ("PATCH", "/v1/resources/{gpu}", ""): {**_RESOURCE, "body": {"available": True}},
    ("PATCH", "/v1/resources/{gpu}", "whose it is"): {
        "action": Action.GPU_UNFLAG,
        "body": {"flagged": None},
    },
    ("DELETE", "/v1/resources/{gpu}", ""): _RESOURCE,
}
NOT_IN_SCHEMA = {("GET", "/openapi.json"), ("WEBSOCKET", "/v1/nodes/channel")}


def action_of(key: tuple[str, str, str]) -> Action:
    """The action that a row of the table is about."""
    endpoint = next(each for each in endpoints() if (each.method, each.path) == key[:2])
    action: Action = CASES.get(key, {}).get("action", endpoint.actions[0])
    assert action in endpoint.actions, f"{endpoint.name} does not declare {action}"
    return action


def _row(endpoint: Endpoint, case: Cell) -> Row:
    members = dict(case)
    action = members.pop("action", endpoint.actions[0])
    assert action in endpoint.actions, f"{endpoint.name} does not declare {action}"
    if endpoint.is_open:
        return replace(Row(frozenset(), open=200), **members)
    return replace(derived(action), **members)


def _table() -> dict[tuple[str, str, str], Row]:
    known = {(each.method, each.path): each for each in endpoints()}
    keys = [(*route, "") for route in known if route not in NOT_IN_SCHEMA]
    return {key: _row(known[key[:2]], CASES.get(key, {})) for key in dict.fromkeys((*keys, *CASES))}


TABLE = _table()


def rowless(paths: dict[str, dict[str, Any]]) -> set[tuple[str, str]]:
    """Routes of the OpenAPI document without a row, and rows without a route."""
    told = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    pages = {(each.method, each.path) for each in endpoints() if each.is_page}
    return told ^ {(method, path) for method, path, _ in TABLE if (method, path) not in pages}


def expected(asker: Asker, wanted: Row, thing: str) -> int | str:
    """What the cell must answer: OK, 401, 403, 404, or the one status of an open route."""
    if wanted.open is not None:
        return wanted.open
    if asker.kind == "unknown":
        return UNKNOWN
    if asker.kind == "machine":
        return wanted.machine
    if asker.scopes is not None and wanted.scope not in asker.scopes:
        return REFUSED
    if wanted.needs is not None and wanted.needs not in asker.permissions:
        return REFUSED
    if thing.endswith(":-"):
        return HIDDEN if not wanted.own_account else OK
    if asker.only_team and wanted.own_account:
        return HIDDEN
    if asker.only_team and wanted.team_key is not None and thing.endswith(":t"):
        return wanted.team_key
    stands = _stands(asker, thing)
    if stands & wanted.may:
        return OK
    return REFUSED if stands & wanted.sees else HIDDEN


def _stands(asker: Asker, thing: str) -> Collection[str] | frozenset[str]:
    found = asker.stands.get(thing, frozenset()) | {"user"}
    if asker.is_operator:
        found |= {"operator"}
    if asker.only_team and not thing.endswith((":t", ":o")) and thing != "-":
        # what is not the team's is not there for its key, were it their own; but what everybody may see is
        return found if thing.split(":")[0] in ("node", "gpu") else frozenset()
    return found
