"""The matrix of routes, objects and askers: what each cell must answer, from a table of its own.

The table repeats nothing of `core.permissions`: it says in plain words who gets what, and a cell is right when the real
route agrees. An asker stands to an object in one or several of these ways: `self` (made it, and may still act for it),
`owner`, `member`, `viewer` (of the team it belongs to), `operator`, `user` (is signed in at all).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

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
    """`stands`: how they stand to the objects, by name; `scopes` None: signed in, not by a key."""

    name: str
    kind: str = "person"  # person | machine | unknown
    permissions: frozenset[str] = EVERYTHING
    scopes: frozenset[str] | None = None
    stands: dict[str, frozenset[str]] = field(default_factory=dict)
    only_team: bool = False  # by a key that is for one team
    is_operator: bool = False


@dataclass(frozen=True)
class Row:
    """One route. `scope` None: no API key may. `sees`: who is told 403 instead of 404."""

    may: frozenset[str]
    scope: str | None = None
    sees: frozenset[str] = frozenset()
    needs: str | None = None
    objects: tuple[str, ...] = ("-",)
    machine: int | str = REFUSED
    own_account: bool = (
        False  # acts for the asker's own account: a team's key has no business there
    )
    open: int | None = None  # the status everybody gets, signed in or not
    body: Callable[[dict[str, str]], Any] | Any = None
    query: str = ""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def row(scope: str | None, may: str, sees: str = "", **more: Any) -> Row:
    return Row(_words(may), scope, _words(sees), **more)


def is_open(status: int, **more: Any) -> Row:
    return Row(frozenset(), open=status, **more)


TEAM = "self owner member viewer"
READ_TASK: dict[str, Any] = {"objects": ("task:p", "task:t", "task:o", "task:-")}
_READS_TASK = row("tasks:read", f"{TEAM} operator", **READ_TASK)
_BATCHES = ("batch:p", "batch:t", "batch:o", "batch:-")
_TEAMS = ("team:t", "team:-")
_OUTPUT = {"command": ["true"]}
_NODE = {"name": "another", "cpu_milli": 1000}

# ("METHOD", path, variant): variants are further rows of one route, for another body or query
TABLE: dict[tuple[str, str, str], Row] = {
    ("GET", "/healthz", ""): is_open(200),
    ("GET", "/readyz", ""): is_open(200),
    ("GET", "/.well-known/jwks.json", ""): is_open(200),
    ("POST", "/v1/users", ""): is_open(201, body={"name": "new", "password": "long enough 1"}),
    ("POST", "/v1/auth/password", ""): is_open(
        200, body={"name": "ada", "password": "a long enough password"}
    ),
    ("POST", "/v1/auth/wallet/nonce", ""): is_open(200),
    ("POST", "/v1/auth/wallet", ""): is_open(400, body={"message": "x", "signature": "0x"}),
    ("GET", "/v1/auth/oidc/start", ""): is_open(404, query="?redirect_uri=http://127.0.0.1/"),
    ("POST", "/v1/auth/oidc/finish", ""): is_open(401, body={"state": "x", "code": "x"}),
    ("POST", "/v1/auth/refresh", ""): is_open(401, body={"refresh_token": "x"}),
    ("POST", "/v1/auth/logout", ""): row(None, "user", body={}),
    ("GET", "/metrics", ""): row("nodes:read", "user"),
    # one's account
    ("GET", "/v1/me", ""): row("account:read", "user"),
    ("PUT", "/v1/me/password", ""): row(None, "user", own_account=True, body={"new": "short"}),
    ("GET", "/v1/sessions", ""): row(None, "user", own_account=True),
    ("DELETE", "/v1/sessions/{id}", ""): row(
        None, "self operator", objects=("session:p", "session:-")
    ),
    ("GET", "/v1/wallets", ""): row("account:read", "user"),
    ("POST", "/v1/wallets", ""): row(
        None, "user", own_account=True, body={"message": "x", "signature": "0x"}
    ),
    ("PATCH", "/v1/wallets/{address}", ""): row(
        None, "self", needs="provider", objects=("wallet:p", "wallet:-"), body={"payout": True}
    ),
    ("DELETE", "/v1/wallets/{address}", ""): row(
        None,
        "user",
        own_account=True,
        objects=("wallet:p", "wallet:-"),
        body={"message": "x", "signature": "0x"},
    ),
    ("GET", "/v1/keys", ""): row("account:read", "user", own_account=True),
    ("POST", "/v1/keys", ""): row(None, "user", own_account=True, body={"name": "one more"}),
    ("DELETE", "/v1/keys/{id}", ""): row(None, "self operator", objects=("key:p", "key:-")),
    # teams
    ("GET", "/v1/teams", ""): row("teams:read", "user", own_account=True),
    ("POST", "/v1/teams", ""): row(
        "teams:write", "user", own_account=True, body={"name": "another"}
    ),
    ("POST", "/v1/teams/join", ""): row("teams:write", "user", body={"token": "x"}),
    ("GET", "/v1/teams/{id}", ""): row(
        "teams:read", "owner member viewer operator", objects=_TEAMS
    ),
    ("PATCH", "/v1/teams/{id}", ""): row(
        "teams:write", "owner operator", "member viewer", objects=_TEAMS, body={"name": "office"}
    ),
    ("PATCH", "/v1/teams/{id}", "quota"): row(
        "teams:write",
        "operator",
        "owner member viewer",
        objects=_TEAMS,
        body={"quota": {"queued_tasks": 5}},
    ),
    ("DELETE", "/v1/teams/{id}", ""): row(None, "owner", "member viewer operator", objects=_TEAMS),
    ("POST", "/v1/teams/{id}/invites", ""): row(
        "teams:write", "owner", "member viewer operator", objects=_TEAMS, body={}
    ),
    ("GET", "/v1/teams/{id}/members", ""): row(
        "teams:read", "owner member viewer operator", objects=_TEAMS
    ),
    ("POST", "/v1/teams/{id}/members", ""): row(
        "teams:write",
        "owner",
        "member viewer operator",
        objects=_TEAMS,
        body={"user": "stranger", "role": "viewer"},
    ),
    ("PATCH", "/v1/teams/{id}/members/{user}", ""): row(
        "teams:write",
        "owner",
        "member viewer operator",
        objects=("member:t", "member:-"),
        body={"role": "member"},
    ),
    ("DELETE", "/v1/teams/{id}/members/{user}", ""): row(
        "teams:write",
        "owner leaver",
        "member viewer operator",
        objects=("member:t", "member:-"),
    ),
    # operators
    ("GET", "/v1/users", ""): row("admin", "operator", "user"),
    ("POST", "/v1/users/invites", ""): row("admin", "operator", "user", body={}),
    ("GET", "/v1/audit", ""): row("admin", "operator", "user"),
    ("GET", "/v1/admin/keys", ""): row("admin", "operator", "user"),
    ("POST", "/v1/admin/keys/rotate", ""): row(None, "operator", "user", body={}),
    ("GET", "/v1/admin/policy", ""): row("admin", "operator", "user"),
    ("PATCH", "/v1/admin/policy", ""): row(None, "operator", "user", body={"dry_run": True}),
    ("POST", "/v1/admin/policy/learn", ""): row(None, "operator", "user"),
    ("PUT", "/v1/admin/cordons/{id}", ""): row(
        None, "operator", "user", objects=("node:p",), body={}
    ),
    ("DELETE", "/v1/admin/cordons/{id}", ""): row(None, "operator", "user", objects=("cordon:p",)),
    ("GET", "/v1/admin/reservations", ""): row("admin", "operator", "user"),
    ("POST", "/v1/admin/reservations", ""): row(None, "operator", "user", body={"nodes": []}),
    ("DELETE", "/v1/admin/reservations/{id}", ""): row(
        None, "operator", "user", objects=("reservation:p",)
    ),
    ("GET", "/v1/users/{id}", ""): row(
        "account:read", "self operator", objects=("user:p", "user:-")
    ),
    ("PATCH", "/v1/users/{id}", ""): row(
        "admin", "operator", "self", objects=("user:p", "user:-"), body={"disabled": False}
    ),
    # tasks
    ("POST", "/v1/tasks", ""): row(
        "tasks:write", "user", needs="consumer", own_account=True, body=_OUTPUT
    ),
    ("POST", "/v1/tasks", "for a team"): row(
        "tasks:write",
        "owner member",
        "viewer operator",
        needs="consumer",
        objects=_TEAMS,
        body=lambda ids: {**_OUTPUT, "team": ids["id"]},
    ),
    ("POST", "/v1/tasks", "into a batch"): row(
        "tasks:write",
        "self",
        "operator",
        needs="consumer",
        objects=("batch:p", "batch:-"),
        body=lambda ids: {**_OUTPUT, "batch": ids["id"], "more": True},
    ),
    ("POST", "/submit_task", ""): row(
        "tasks:write", "user", needs="consumer", own_account=True, body=_OUTPUT
    ),
    ("GET", "/v1/tasks", ""): row("tasks:read", "user", own_account=True),
    ("GET", "/v1/tasks", "of a team"): row(
        "tasks:read",
        "owner member viewer operator",
        objects=_TEAMS,
        query="?team={id}",
    ),
    ("GET", "/v1/tasks", "of everybody"): row("admin", "operator", "user", query="?all=true"),
    ("GET", "/v1/tasks/{id}", ""): _READS_TASK,
    ("GET", "/task_status", ""): row(
        "tasks:read", f"{TEAM} operator", query="?id={id}", **READ_TASK
    ),
    ("DELETE", "/v1/tasks/{id}", ""): row(
        "tasks:write", "self owner operator", "member viewer", **READ_TASK
    ),
    ("POST", "/v1/tasks/{id}/preempt", ""): row("admin", "operator", TEAM, **READ_TASK),
    ("GET", "/v1/tasks/{id}/result", ""): _READS_TASK,
    ("GET", "/v1/tasks/{id}/explain", ""): _READS_TASK,
    ("GET", "/v1/tasks/{id}/events", ""): _READS_TASK,
    ("GET", "/v1/tasks/{id}/telemetry", ""): _READS_TASK,
    ("GET", "/v1/tasks/{id}/logs", ""): _READS_TASK,
    ("GET", "/v1/batches/{id}", ""): row("tasks:read", f"{TEAM} operator", objects=_BATCHES),
    ("DELETE", "/v1/batches/{id}", ""): row(
        "tasks:write", "self owner operator", "member viewer", objects=_BATCHES
    ),
    ("GET", "/v1/batches/{id}/results", ""): row(
        "tasks:read", f"{TEAM} operator", objects=("batch:done", "batch:-")
    ),
    ("PUT", "/v1/artifacts/{sha256}", ""): row("tasks:write", "user", machine=OK, body=CONTENT),
    ("GET", "/v1/artifacts/{sha256}", ""): row(
        "tasks:read",
        f"{TEAM} operator",
        objects=("artifact:p", "artifact:t", "artifact:-"),
        machine=HIDDEN,
    ),
    (
        "HEAD",
        "/v1/artifacts/{sha256}",
        "",
    ): row(  # need I upload it? An operator reads others', but names its own
        "tasks:read",
        TEAM,
        objects=("artifact:p", "artifact:t", "artifact:-"),
        machine=HIDDEN,
    ),
    # nodes
    ("GET", "/v1/nodes", ""): row("nodes:read", "user"),
    ("POST", "/v1/nodes", ""): row(
        "nodes:write", "user", needs="provider", own_account=True, machine=OK, body=_NODE
    ),
    ("POST", "/v1/resources", ""): row(
        "nodes:write", "user", needs="provider", own_account=True, machine=OK, body=_NODE
    ),
    ("POST", "/register_gpu", ""): row(
        "nodes:write", "user", needs="provider", own_account=True, machine=OK, body=_NODE
    ),
    ("POST", "/v1/nodes/challenges", ""): is_open(200, body={}),
    ("POST", "/v1/nodes/invites", ""): row(
        "nodes:write", "user", needs="provider", own_account=True, body={}
    ),
    ("GET", "/v1/nodes/{id}", ""): row("nodes:read", "user", objects=("node:p", "node:-")),
    ("PATCH", "/v1/nodes/{id}", ""): row(
        "nodes:write",
        "self operator",
        objects=("node:p", "node:-"),
        body={"availability": "paused"},
    ),
    ("DELETE", "/v1/nodes/{id}", ""): row(
        "nodes:write", "self operator", objects=("node:p", "node:-")
    ),
    ("GET", "/v1/resources", ""): row("nodes:read", "user"),
    ("GET", "/resources", ""): row("nodes:read", "user"),
    ("GET", "/v1/resources/{gpu}", ""): row(
        "nodes:read", "user", objects=("gpu:p", "gpu:-", "node:p", "node:-")
    ),
    ("GET", "/v1/resources/{gpu}/telemetry", ""): row(
        "nodes:read", "user", objects=("gpu:p", "gpu:-")
    ),
    ("PATCH", "/v1/resources/{gpu}", "whether it is well"): row(
        "nodes:write", "self operator", objects=("gpu:p", "gpu:-"), body={"quarantined": None}
    ),
    ("PATCH", "/v1/resources/{gpu}", ""): row(
        "nodes:write",
        "self operator",
        objects=("gpu:p", "gpu:-", "node:p", "node:-"),
        body={"available": True},
    ),
    ("PATCH", "/v1/resources/{gpu}", "whose it is"): row(
        "admin", "operator", "self", objects=("gpu:p", "gpu:-"), body={"flagged": None}
    ),
    ("DELETE", "/v1/resources/{gpu}", ""): row(
        "nodes:write", "self operator", objects=("gpu:p", "gpu:-", "node:p", "node:-")
    ),
}


def rowless(paths: dict[str, dict[str, Any]]) -> set[tuple[str, str]]:
    """Routes of the OpenAPI document that the table does not know, and rows that have no route."""
    told = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    return told ^ {(method, path) for method, path, _ in TABLE}


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
