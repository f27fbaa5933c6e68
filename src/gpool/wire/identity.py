"""REST documents of accounts, sign-ins, keys, secrets, wallets, sessions and teams; they validate form only.

One file because they share the names and limits at its top.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AwareDatetime, Field, SecretStr, StringConstraints

from gpool.wire.documents import Answer, Document

USER_NAME = r"^[a-z][a-z0-9._-]{1,62}$"
"""One spelling per name: lower case, never confusable with a wallet address or an id."""

UserName = Annotated[str, StringConstraints(pattern=USER_NAME)]
TeamName = Annotated[str, StringConstraints(pattern=USER_NAME)]
KeyName = Annotated[str, StringConstraints(pattern=r"^[\x20-\x7e]{1,80}$")]
Password = Annotated[str, StringConstraints(max_length=1024)]
Token = Annotated[str, StringConstraints(max_length=200)]
SignInMessage = Annotated[str, StringConstraints(max_length=8192)]
SignatureText = Annotated[str, StringConstraints(max_length=2 + 2 * 8192)]
PermissionName = Literal["consumer", "provider", "operator"]
PermissionNames = Annotated[list[PermissionName], Field(max_length=20, fail_fast=True)]
RoleName = Literal["owner", "member", "viewer"]
ScopeName = Literal[
    "tasks:read",
    "tasks:write",
    "nodes:read",
    "nodes:write",
    "account:read",
    "teams:read",
    "teams:write",
    "money:read",
    "webhooks",
    "admin",
]
DAY_S = 86_400
MAX_SECRET_BYTES = 32 * 1024


# ---- sign-in


class UserRequest(Document):
    name: UserName
    password: Password
    invite: Token | None = None


class PasswordSignIn(Document):
    name: Annotated[str, StringConstraints(max_length=200)]
    password: Password


class NonceRequest(Document):
    """Purpose of the message that will contain the nonce; its statement must name the same."""

    purpose: Literal["sign_in", "link", "unlink", "approve"] = "sign_in"


class NonceDocument(Answer):
    """Values for a message to a wallet; valid once, for its purpose, until it expires.

    A client computes domain and URI from the address it dialled and refuses an answer with others.
    """

    nonce: str
    domain: str
    uri: str
    chain_id: int
    issued_at: AwareDatetime  # the server's own time, for machines without a good clock
    expires_at: AwareDatetime


class SignedMessage(Document):
    """Sign-In with Ethereum message (EIP-4361) and its signature."""

    message: SignInMessage
    signature: SignatureText


class WalletSignIn(SignedMessage):
    """A wallet's first sign-in creates its account if registration allows it."""

    invite: Token | None = None


class TokensDocument(Answer):
    access_token: str
    refresh_token: str
    token_type: Literal["Bearer"] = "Bearer"
    expires_in: int  # seconds, of the access token


class SignInLinkDocument(Answer):
    """Path beneath the server's address that opens the page signed in, once, from the server's own machine."""

    path: str
    expires_at: AwareDatetime


class PasswordLinkDocument(Answer):
    """Link with which the user of an account sets a new password, once."""

    url: str
    expires_at: AwareDatetime


class RefreshRequest(Document):
    refresh_token: Token


class SignOutRequest(Document):
    """Ends the session of this refresh token, or the caller's; `everywhere`: all sessions."""

    refresh_token: Token | None = None
    everywhere: bool = False


class OidcStarted(Answer):
    """Open `url` in a browser; it returns to `redirect_uri` with the `code` and `state` that complete the sign-in."""

    url: str
    state: str
    provider: str


class OidcFinish(Document):
    state: Annotated[str, StringConstraints(max_length=4096)]
    code: Annotated[str, StringConstraints(max_length=4096)]
    invite: Token | None = None


class JwkDocument(Answer):
    kty: str
    crv: str
    alg: str
    use: str
    kid: str
    x: str


class JwksDocument(Answer):
    keys: list[JwkDocument]


class ReceiptKeyDocument(Answer):
    """Ed25519 key in hexadecimal; valid from `from_ms` (Unix time) until the next key begins."""

    public: str
    from_ms: int
    endorsement: str


class ReceiptKeysDocument(Answer):
    """History of the pool's receipt keys, oldest first; in canonical JSON it is the file of `gpool receipt verify`."""

    pool: str
    keys: list[ReceiptKeyDocument]
    version: int


# ---- account


class OwnTeam(Answer):
    id: str
    name: str
    role: RoleName


class MeDocument(Answer):
    id: str
    name: str
    wallets: list[str]
    permissions: list[str]
    has_password: bool = False
    identities: list[str] = Field(default=[])  # issuers of OpenID Connect
    payout_wallet: str | None = None
    teams: list[OwnTeam] = Field(default=[])
    scopes: list[str] | None = None  # of the API key in use; None: all


class PasswordChange(Document):
    """`old` is required if the account has a password."""

    old: Password | None = None
    new: Password


class AccountDeletion(Document):
    """`password` is required if the account has one, else `name`: the account's name, as a confirmation."""

    password: Password | None = None
    name: str | None = Field(default=None, max_length=200)


class WalletLink(SignedMessage):
    """Signature of the new wallet, and the password or a linked wallet's signature."""

    password: Password | None = None
    proof: SignedMessage | None = None


class WalletUnlink(SignedMessage):
    """Signature of the wallet, and the password or another wallet's signature."""

    password: Password | None = None
    proof: SignedMessage | None = None


class WalletPatch(Document):
    payout: bool


class WalletDocument(Answer):
    address: str
    linked_at: AwareDatetime
    payout: bool


class WalletPage(Answer):
    items: list[WalletDocument]
    next: str | None = None


# ---- API keys


class KeyRequest(Document):
    """Without `scopes`: all but `admin`. With `team`, the key is valid for that team's tasks only."""

    name: KeyName
    scopes: Annotated[list[ScopeName], Field(max_length=20)] | None = None
    expires_in_s: Annotated[int, Field(ge=60, le=3650 * DAY_S)] | None = None
    team: str | None = None


class KeyDocument(Answer):
    id: str
    name: str
    scopes: list[str] | None  # None: all
    team: str | None
    created_at: AwareDatetime
    expires_at: AwareDatetime | None
    ended_at: AwareDatetime | None
    last_used_at: AwareDatetime | None


class KeyMade(KeyDocument):
    """The key is shown only once."""

    key: str


class KeyPage(Answer):
    items: list[KeyDocument]
    next: str | None = None


# ---- sessions


class SessionDocument(Answer):
    id: str
    label: str
    created_at: AwareDatetime
    last_used_at: AwareDatetime
    expires_at: AwareDatetime
    current: bool


class SessionPage(Answer):
    items: list[SessionDocument]
    next: str | None = None


# ---- teams


class QuotaDocument(Document):
    """Null: the pool's default. Starts within `guaranteed_gpus` go first; borrowed GPUs are reclaimed by preemption."""

    running_gpus: Annotated[float, Field(ge=0, le=1_000_000)] | None = None
    queued_tasks: Annotated[int, Field(ge=0, le=1 << 40)] | None = None
    storage_bytes: Annotated[int, Field(ge=0, le=1 << 60)] | None = None
    guaranteed_gpus: Annotated[float, Field(ge=0, le=1_000_000)] | None = None


class TeamRequest(Document):
    name: TeamName


class TeamPatch(Document):
    """Owners change the name, operators the quota."""

    name: TeamName | None = None
    quota: QuotaDocument | None = None


class TeamDocument(Answer):
    id: str
    name: str
    created_at: AwareDatetime
    role: RoleName | None = None  # yours; null for an operator who is not in it
    quota: QuotaDocument | None = None


class TeamPage(Answer):
    items: list[TeamDocument]
    next: str | None = None


class MemberRequest(Document):
    user: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    role: RoleName = "member"


class MemberPatch(Document):
    role: RoleName


class TeamMemberDocument(Answer):
    user: str
    name: str
    role: RoleName
    since: AwareDatetime


class MemberPage(Answer):
    items: list[TeamMemberDocument]
    next: str | None = None


class TeamInviteRequest(Document):
    role: RoleName = "member"
    expires_in_s: Annotated[int, Field(ge=60, le=30 * DAY_S)] = 7 * DAY_S


class TeamJoin(Document):
    """Consent to join: the token of an invite, or the id of a team that has invited you by name."""

    token: Token | None = None
    team: Annotated[str, StringConstraints(max_length=64)] | None = None


class InvitationDocument(Answer):
    """Invitation that waits for the consent of `user`: a name or id as the owner wrote it, whether it exists or not."""

    team: str
    team_name: str
    user: str
    role: RoleName
    invited_by: str
    expires_at: AwareDatetime


class InvitationPage(Answer):
    items: list[InvitationDocument]
    next: str | None = None


# ---- stored secrets


class NamedSecretRequest(Document):
    value: Annotated[SecretStr, Field(min_length=1, max_length=MAX_SECRET_BYTES)]


class NamedSecretDocument(Answer):
    """Secret that tasks use by its name; its value is never shown. `team`: id of its team; null: your own."""

    name: str
    team: str | None = None
    created_at: AwareDatetime
    updated_at: AwareDatetime


class NamedSecretPage(Answer):
    items: list[NamedSecretDocument]
    next: str | None = None


# ---- operators


class UserDocument(Answer):
    id: str
    name: str
    permissions: list[str]
    created_at: AwareDatetime
    disabled_at: AwareDatetime | None = None
    has_password: bool = False
    quota: QuotaDocument | None = None


class UserPage(Answer):
    items: list[UserDocument]
    next: str | None = None


class UserPatch(Document):
    permissions: PermissionNames | None = None
    disabled: bool | None = None
    quota: QuotaDocument | None = None


class UserInviteRequest(Document):
    permissions: PermissionNames | None = None  # null: the default permissions
    team: str | None = None
    role: RoleName | None = None
    expires_in_s: Annotated[int, Field(ge=60, le=30 * DAY_S)] = 7 * DAY_S


class UserInviteDocument(Answer):
    """The token is shown only once. `url`, `fingerprint`: the server's address for others, and its own certificate."""

    token: str
    expires_at: AwareDatetime
    url: str
    fingerprint: str | None = None
