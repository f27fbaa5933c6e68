"""Values of the identity operations. Fields that are stored sealed stay sealed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from gpool.core.ids import GpuId, NodeId, UserId
from gpool.core.model import Instant, Permission
from gpool.core.permissions import Role, Scope, TeamId
from gpool.server.store.values import User

Holder = Literal["user", "team"]
"""Kind of the account that a quota or storage counts for."""

# ---- accounts


@dataclass(frozen=True, slots=True)
class Account:
    user: User
    password_hash: str | None = field(repr=False)  # None: no password
    disabled_at: Instant | None

    @property
    def disabled(self) -> bool:
        return self.disabled_at is not None


@dataclass(frozen=True, slots=True)
class LinkedWallet:
    address: str  # lower-case hex
    linked_at: Instant
    payout: bool


@dataclass(frozen=True, slots=True)
class UserInvite:
    hashed: str
    made_by: UserId
    permissions: frozenset[Permission]
    expires_at: Instant
    created_at: Instant
    team: TeamId | None = None
    role: Role | None = None


# ---- callers


@dataclass(frozen=True, slots=True)
class Caller:
    """Authenticated caller: not disabled, the key neither ended nor expired."""

    user: User
    teams: Mapping[TeamId, Role]
    scopes: frozenset[Scope] | None = None  # None: all
    key: int | None = None  # the API key's id; None: a sign-in
    key_team: TeamId | None = None  # the only team this key is for; None: all teams of the user
    session: str | None = None  # id of the sign-in; None: an API key
    address: str = ""  # of the client

    @property
    def team_key(self) -> int | None:
        """Id of the API key if it is for one team only: it sees the team's objects and its own uploads."""
        return None if self.key_team is None else self.key


@dataclass(frozen=True, slots=True)
class ApiKey:
    id: int
    user: UserId
    name: str
    scopes: frozenset[Scope] | None
    team: TeamId | None
    created_at: Instant
    expires_at: Instant | None
    ended_at: Instant | None
    last_used_at: Instant | None


# ---- sessions


@dataclass(frozen=True, slots=True)
class StoredSession:
    id: str
    user: UserId
    seed_sealed: bytes = field(repr=False)
    generation: int
    rotated_at: Instant
    idle_until: Instant
    created_at: Instant
    expires_at: Instant
    ended_at: Instant | None = None
    ended_why: str | None = None
    label: str = ""


@dataclass(frozen=True, slots=True)
class Rotation:
    """`won`: this call created the new generation. `session`: the row after the call, whoever changed it."""

    won: bool
    session: StoredSession | None


@dataclass(frozen=True, slots=True)
class SigningKey:
    kid: str
    sealed: bytes | None = field(repr=False)  # the private half; None once it only verifies
    public: str
    created_at: Instant
    signs_from: Instant
    verifies_until: Instant | None = None  # None: not retiring


# ---- teams and quotas


@dataclass(frozen=True, slots=True)
class Team:
    id: TeamId
    name: str
    created_at: Instant


@dataclass(frozen=True, slots=True)
class TeamMember:
    team: TeamId
    user: UserId
    name: str
    role: Role
    since: Instant


@dataclass(frozen=True, slots=True)
class TeamInvitation:
    """`invitee`: user name or id as the owner wrote it; `inviter`: name of the owner."""

    team: Team
    invitee: str
    role: Role
    inviter: str
    created_at: Instant
    expires_at: Instant


@dataclass(frozen=True, slots=True)
class GivenQuota:
    """Limits that an operator set; None: the default. `core.quotas.Quota` is the effective quota.

    `guaranteed_gpu_milli` is a guarantee, not a limit (`core.scheduler.order.limits`); by default none.
    """

    running_gpu_milli: int | None = None
    queued_tasks: int | None = None
    storage_bytes: int | None = None
    guaranteed_gpu_milli: int | None = None


# ---- GPUs


@dataclass(frozen=True, slots=True)
class Binding:
    uuid: str
    owner: UserId
    wallet: str | None
    bound_at: Instant
    settled_at: Instant | None  # when an operator decided on the owner


@dataclass(frozen=True, slots=True)
class GpuRow:
    id: GpuId
    node: NodeId
    owner: UserId
    uuid: str
    position: int
    available: bool
    gone: bool
    flagged: str | None  # why it is not scheduled; None: fine
    quarantined: str | None = None  # health problem, until the owner or an operator clears it
    unproven: str | None = None  # why its verification failed or is missing
    measured: str | None = None  # as JSON
    verified: bool = False  # its last verification passed
