"""Which actions each route asks `core.permissions` about, and which class its rate is counted in. A route without a row fails a test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpool.core.permissions import Action
from gpool.server.identity.throttle import RouteClass
from gpool.wire.frames import CHANNEL_PATH


@dataclass(frozen=True, slots=True)
class Row:
    """Several actions: which one it is depends on who asks and on the body; each request asks about exactly one."""

    limit: RouteClass
    actions: tuple[Action, ...]


def _row(limit: RouteClass, *actions: Action) -> Row:
    return Row(limit, actions)


_A, _C = Action, RouteClass
_SUBMIT = _row(_C.SUBMIT, _A.TASK_SUBMIT, _A.BATCH_EXTEND)
_JOIN = _row(_C.SIGN_IN, _A.NODE_JOIN, _A.NODE_JOIN_BY_INVITE, _A.NODE_OFFER)
_TASK = _row(_C.READ, _A.TASK_READ)
_SIGN_IN = _row(_C.SIGN_IN, _A.SIGN_IN)
_GPUS = _row(_C.READ, _A.GPUS_LIST)

_SIGN_IN = _row(_C.SIGN_IN, _A.SIGN_IN)
_SIGN_IN_OR_UP = _row(_C.SIGN_IN, _A.SIGN_IN, _A.REGISTER)

WEBSOCKET = "WEBSOCKET"
ROUTES: Mapping[tuple[str, str], Row] = {
    ("GET", "/healthz"): _row(_C.READ, _A.HEALTH_READ),
    ("GET", "/readyz"): _row(_C.READ, _A.HEALTH_READ),
    ("GET", "/openapi.json"): _row(_C.READ, _A.SCHEMA_READ),
    ("GET", "/metrics"): _row(_C.READ, _A.METRICS_READ),
    ("GET", "/v1/me"): _row(_C.READ, _A.ME_READ),
    ("POST", "/v1/tasks"): _SUBMIT,
    ("POST", "/submit_task"): _SUBMIT,
    ("GET", "/v1/tasks"): _row(_C.READ, _A.TASKS_LIST, _A.TASKS_LIST_ALL),
    ("GET", "/v1/tasks/{id}"): _TASK,
    ("GET", "/task_status"): _TASK,
    ("DELETE", "/v1/tasks/{id}"): _row(_C.CHANGE, _A.TASK_CANCEL),
    ("POST", "/v1/tasks/{id}/preempt"): _row(_C.CHANGE, _A.TASK_PREEMPT),
    ("GET", "/v1/tasks/{id}/result"): _TASK,
    ("GET", "/v1/tasks/{id}/explain"): _TASK,
    ("GET", "/v1/tasks/{id}/events"): _TASK,
    ("GET", "/v1/tasks/{id}/telemetry"): _TASK,
    ("GET", "/v1/tasks/{id}/logs"): _row(_C.STREAM, _A.TASK_READ),
    ("GET", "/v1/batches/{id}"): _row(_C.READ, _A.BATCH_READ),
    ("DELETE", "/v1/batches/{id}"): _row(_C.CHANGE, _A.BATCH_CANCEL),
    ("GET", "/v1/batches/{id}/results"): _row(_C.STREAM, _A.BATCH_READ),
    ("GET", "/v1/nodes"): _row(_C.READ, _A.NODES_LIST),
    ("POST", "/v1/nodes"): _JOIN,
    ("POST", "/v1/nodes/challenges"): _row(_C.SIGN_IN, _A.NODE_PROVE),
    ("POST", "/v1/resources"): _JOIN,
    ("POST", "/register_gpu"): _JOIN,
    ("POST", "/v1/nodes/invites"): _row(_C.CHANGE, _A.NODE_INVITE),
    ("GET", "/v1/nodes/{id}"): _row(_C.READ, _A.NODE_READ),
    ("PATCH", "/v1/nodes/{id}"): _row(_C.CHANGE, _A.NODE_CHANGE),
    ("DELETE", "/v1/nodes/{id}"): _row(_C.CHANGE, _A.NODE_REMOVE),
    (WEBSOCKET, CHANNEL_PATH): _row(_C.STREAM, _A.NODE_CHANNEL, _A.NODE_REPORT),
    ("GET", "/v1/resources"): _GPUS,
    ("GET", "/resources"): _GPUS,
    ("GET", "/v1/resources/{gpu}"): _row(_C.READ, _A.GPU_READ, _A.NODE_READ),
    ("GET", "/v1/resources/{gpu}/telemetry"): _row(_C.READ, _A.GPU_READ),
    ("PATCH", "/v1/resources/{gpu}"): _row(_C.CHANGE, _A.GPU_CHANGE, _A.NODE_CHANGE, _A.GPU_UNFLAG),
    ("DELETE", "/v1/resources/{gpu}"): _row(_C.CHANGE, _A.GPU_CHANGE, _A.NODE_CHANGE),
    ("PUT", "/v1/artifacts/{sha256}"): _row(
        _C.TRANSFER, _A.ARTIFACT_UPLOAD, _A.ARTIFACT_UPLOAD_OUTPUT
    ),
    ("GET", "/v1/artifacts/{sha256}"): _row(_C.TRANSFER, _A.ARTIFACT_READ),
    ("HEAD", "/v1/artifacts/{sha256}"): _row(_C.TRANSFER, _A.ARTIFACT_READ),
    # accounts
    ("GET", "/.well-known/jwks.json"): _row(_C.READ, _A.PUBLIC_KEYS_READ),
    ("POST", "/v1/users"): _row(_C.SIGN_IN, _A.REGISTER),
    ("POST", "/v1/auth/password"): _SIGN_IN,
    ("POST", "/v1/auth/wallet/nonce"): _SIGN_IN,
    ("POST", "/v1/auth/wallet"): _SIGN_IN_OR_UP,
    ("GET", "/v1/auth/oidc/start"): _row(_C.SIGN_IN, _A.SIGN_IN_BEGIN),
    ("POST", "/v1/auth/oidc/finish"): _SIGN_IN_OR_UP,
    ("POST", "/v1/auth/refresh"): _row(_C.REFRESH, _A.REFRESH),
    ("POST", "/v1/auth/logout"): _row(_C.SIGN_IN, _A.SIGN_OUT),
    ("PUT", "/v1/me/password"): _row(_C.SIGN_IN, _A.PASSWORD_CHANGE),
    ("GET", "/v1/sessions"): _row(_C.READ, _A.SESSIONS_LIST),
    ("DELETE", "/v1/sessions/{id}"): _row(_C.CHANGE, _A.SESSION_END),
    ("GET", "/v1/keys"): _row(_C.READ, _A.KEYS_LIST),
    ("POST", "/v1/keys"): _row(_C.CHANGE, _A.KEY_MAKE),
    ("DELETE", "/v1/keys/{id}"): _row(_C.CHANGE, _A.KEY_END),
    ("GET", "/v1/wallets"): _row(_C.READ, _A.ME_READ),
    ("POST", "/v1/wallets"): _row(_C.SIGN_IN, _A.WALLET_LINK),
    ("PATCH", "/v1/wallets/{address}"): _row(_C.CHANGE, _A.PAYOUT_WALLET_SET),
    ("DELETE", "/v1/wallets/{address}"): _row(_C.SIGN_IN, _A.WALLET_UNLINK),
    # teams
    ("GET", "/v1/teams"): _row(_C.READ, _A.TEAMS_LIST),
    ("POST", "/v1/teams"): _row(_C.CHANGE, _A.TEAM_MAKE),
    ("POST", "/v1/teams/join"): _row(_C.SIGN_IN, _A.TEAM_JOIN),
    ("GET", "/v1/teams/{id}"): _row(_C.READ, _A.TEAM_READ),
    ("PATCH", "/v1/teams/{id}"): _row(_C.CHANGE, _A.TEAM_CHANGE, _A.QUOTA_SET),
    ("DELETE", "/v1/teams/{id}"): _row(_C.CHANGE, _A.TEAM_DELETE),
    ("POST", "/v1/teams/{id}/invites"): _row(_C.CHANGE, _A.TEAM_INVITE),
    ("GET", "/v1/teams/{id}/members"): _row(_C.READ, _A.TEAM_READ),
    ("POST", "/v1/teams/{id}/members"): _row(_C.CHANGE, _A.TEAM_ROLE_SET),
    ("PATCH", "/v1/teams/{id}/members/{user}"): _row(_C.CHANGE, _A.TEAM_ROLE_SET),
    ("DELETE", "/v1/teams/{id}/members/{user}"): _row(_C.CHANGE, _A.TEAM_ROLE_SET, _A.TEAM_LEAVE),
    # operators
    ("GET", "/v1/users"): _row(_C.READ, _A.USERS_LIST),
    ("POST", "/v1/users/invites"): _row(_C.CHANGE, _A.USER_INVITE),
    ("GET", "/v1/users/{id}"): _row(_C.READ, _A.USER_READ),
    ("PATCH", "/v1/users/{id}"): _row(
        _C.CHANGE, _A.USER_PERMISSIONS_SET, _A.USER_SUSPEND, _A.QUOTA_SET
    ),
    ("GET", "/v1/audit"): _row(_C.READ, _A.AUDIT_READ),
    ("GET", "/v1/admin/keys"): _row(_C.READ, _A.POLICY_READ),
    ("POST", "/v1/admin/keys/rotate"): _row(_C.CHANGE, _A.KEYS_ROTATE),
    ("GET", "/v1/admin/policy"): _row(_C.READ, _A.POLICY_READ),
    ("PATCH", "/v1/admin/policy"): _row(_C.CHANGE, _A.POLICY_CHANGE),
    ("POST", "/v1/admin/policy/learn"): _row(_C.CHANGE, _A.POLICY_CHANGE),
    ("PUT", "/v1/admin/cordons/{id}"): _row(_C.CHANGE, _A.POLICY_CHANGE),
    ("DELETE", "/v1/admin/cordons/{id}"): _row(_C.CHANGE, _A.POLICY_CHANGE),
    ("GET", "/v1/admin/reservations"): _row(_C.READ, _A.POLICY_READ),
    ("POST", "/v1/admin/reservations"): _row(_C.CHANGE, _A.POLICY_CHANGE),
    ("DELETE", "/v1/admin/reservations/{id}"): _row(_C.CHANGE, _A.POLICY_CHANGE),
}
