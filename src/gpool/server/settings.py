"""What an operator may set: `GPOOL_SERVER_*` variables or arguments. Refuses times that would break the lease law."""

from __future__ import annotations

import ipaddress
import platform
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from gpool.core.model import GIB, Permission, Span
from gpool.core.quotas import Quota
from gpool.server.identity.secrets.sealer import MasterSource
from gpool.server.nodes.report_validation import SITE
from gpool.transfer.requests import is_loopback

Registration = Literal["open", "invite", "closed"]


class OidcProvider(BaseModel):
    """Somebody else who says who people are. `issuer` is where its discovery document lies."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[a-z0-9-]{1,32}$")
    issuer: str = Field(pattern=r"^https?://")
    client_id: str = Field(min_length=1)
    client_secret: SecretStr | None = None  # None: a public client, PKCE alone
    scope: str = "openid"


class Settings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="GPOOL_SERVER_", frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    port: int = Field(default=8642, ge=0, le=65535)
    data: Path = Path("gpool-data")
    database_url: str | None = None  # None: SQLite in the data directory
    public_url: str | None = None  # how others reach it, for join links; None: host and port

    tls: bool | None = None  # None: on when it listens off loopback
    tls_cert: Path | None = None  # PEM, the server's first; None: one of its own, pinned by links
    tls_key: Path | None = None
    plain_http: bool = False  # off loopback without TLS: only behind a proxy that ends it
    trusted_proxies: str = ""  # addresses or networks, with commas; only their X-Forwarded-* count

    shared_sites: str = ""  # names, with commas, of sites that nodes of several owners may be in

    ttl_s: float = Field(default=30.0, gt=0)
    margin_s: float = Field(default=5.0, ge=0)
    beat_s: float = Field(default=8.0, gt=0)
    tick_s: float = Field(default=1.0, gt=0)
    prune_s: float = Field(default=60.0, gt=0)

    order: str = "fair_share"  # of `core.scheduling.orders`, or of an installed `gpool.orders`

    learn_every_s: float = Field(default=86_400.0, ge=0)  # how room is priced; 0: only when asked

    examine_gpus: bool = False  # a GPU gets no task before it has proved what it claims
    measure_gpus: bool = True
    reexamine_s: float = Field(default=7 * 86_400.0, gt=0)  # on average, at a moment nobody knows

    node_frames_per_s: float = Field(
        default=600.0, ge=0
    )  # of reports, or what costs as much; 0: no limit
    max_queued: int = Field(default=5_000_000, ge=1)
    max_artifact_bytes: int = Field(default=256 * GIB, ge=1)
    max_wait_s: float = Field(default=60.0, ge=0)
    key_cache_s: float = Field(default=4.0, ge=0, le=5)  # how long a revocation may go unnoticed
    keep_keys_s: float = Field(default=86_400.0, ge=0)
    keep_unreferenced_s: float = Field(default=86_400.0, ge=0)
    keep_checkpoints_s: float = Field(default=86_400.0, ge=0)  # after the task's end
    seal_logs_after_s: float = Field(default=60.0, ge=0)

    registration: Registration | None = None  # None: open on loopback, by invite elsewhere
    new_users_may: frozenset[Permission] = frozenset({Permission.CONSUMER, Permission.PROVIDER})
    grace_s: float = Field(default=30.0, ge=0, le=600)  # a refresh whose answer got lost
    idle_days: float = Field(default=30.0, gt=0)
    session_days: float = Field(default=180.0, gt=0)
    rotate_signing_keys_s: float = Field(default=30 * 86_400.0, gt=0)
    signing_key_lead_s: float = Field(default=60.0, ge=0)  # until every replica knows a new key
    password_passes: int = Field(default=3, ge=1)
    password_memory_kib: int = Field(default=64 * 1024, ge=8)
    nonce_s: float = Field(default=600.0, gt=0)
    chain_id: int = Field(default=1, ge=1)
    chain_url: str | None = None  # JSON-RPC endpoint; None: contract wallets cannot sign in
    oidc: tuple[OidcProvider, ...] = ()
    # What one account, or one team, may have at once unless an operator gave it another quota; None: no limit.
    user_gpus: float | None = Field(default=None, ge=0)
    user_queued: int | None = Field(default=1_000_000, ge=0)
    user_storage_bytes: int | None = Field(default=1024 * GIB, ge=0)
    team_gpus: float | None = Field(default=None, ge=0)
    team_queued: int | None = Field(default=2_000_000, ge=0)
    team_storage_bytes: int | None = Field(default=4096 * GIB, ge=0)

    # Master keys: what a command prints, else the variable's value, else a file that is made on the first start.
    master_key: SecretStr | None = None
    master_key_command: str | None = None
    master_key_file: Path | None = None  # None: `master.key` in the data directory

    @model_validator(mode="after")
    def _agent_lets_go_first(self) -> Self:
        if self.margin_s + self.beat_s >= self.ttl_s:
            raise ValueError(
                f"ttl_s={self.ttl_s} must be longer than beat_s={self.beat_s} plus margin_s={self.margin_s}"
            )
        return self

    @model_validator(mode="after")
    def _nothing_travels_in_the_clear(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key come together")
        if self.plain_http and (self.tls or self.tls_cert):
            raise ValueError("plain_http contradicts tls; the proxy before this server ends TLS")
        if not self.uses_tls and not self.plain_http and not is_loopback(self.host):
            raise ValueError(
                f"host={self.host} without TLS would show every key to the network; leave tls on, "
                "or say plain_http behind a proxy that ends TLS"
            )
        for each in self.proxies:
            ipaddress.ip_network(each)  # says what is wrong with it
        return self

    @model_validator(mode="after")
    def _sites_have_names(self) -> Self:
        for name in self.sites:
            if not SITE.fullmatch(name):
                raise ValueError(
                    f"shared_sites: {name!r} is not a word of letters, digits and . _ -"
                )
        return self

    @property
    def sites(self) -> frozenset[str]:
        """Names that mean the same site whoever says them; any other is its owner's own."""
        return frozenset(each.strip() for each in self.shared_sites.split(",") if each.strip())

    @property
    def is_local(self) -> bool:
        """Nobody but this machine reaches it."""
        return is_loopback(self.host)

    @property
    def uses_tls(self) -> bool:
        if self.tls is not None:
            return self.tls
        return self.tls_cert is not None or not (self.plain_http or is_loopback(self.host))

    @property
    def is_reached_by_tls(self) -> bool:
        """By others, perhaps through a proxy."""
        return self.url.startswith("https://")

    @property
    def proxies(self) -> list[str]:
        return [each.strip() for each in self.trusted_proxies.split(",") if each.strip()]

    @property
    def url(self) -> str:
        """As others reach it."""
        scheme = "https" if self.uses_tls else "http"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return (self.public_url or f"{scheme}://{host}:{self.port}").rstrip("/")

    @property
    def store_url(self) -> str:
        return self.database_url or f"sqlite:///{self.data / 'gpool.db'}"

    @property
    def is_shared(self) -> bool:
        """Other servers may write to the same database."""
        return self.database_url is not None and not self.database_url.startswith("sqlite")

    @property
    def address(self) -> str:
        """`HOST:PORT` as others reach it; a server that listens everywhere goes by its machine's name."""
        if self.public_url is None and self.host in ("0.0.0.0", "::"):
            return f"{platform.node()}:{self.port}"
        return self.url.removeprefix("https://").removeprefix("http://")

    @property
    def origin(self) -> str:
        """`SCHEME://HOST:PORT` as others reach it: what sign-in messages are for."""
        return (self.public_url or f"http://{self.host}:{self.port}").rstrip("/")

    @property
    def registers(self) -> Registration:
        """Who may make an account."""
        return self.registration or ("open" if is_loopback(self.host) else "invite")

    @property
    def user_quota(self) -> Quota:
        return Quota(_milli(self.user_gpus), self.user_queued, self.user_storage_bytes)

    @property
    def team_quota(self) -> Quota:
        return Quota(_milli(self.team_gpus), self.team_queued, self.team_storage_bytes)

    @property
    def master_source(self) -> MasterSource:
        text = self.master_key.get_secret_value() if self.master_key is not None else ""
        file = self.master_key_file or self.data / "master.key"
        return MasterSource(file, text, self.master_key_command or "")

    @property
    def ttl(self) -> Span:
        return span(self.ttl_s)

    @property
    def margin(self) -> Span:
        return span(self.margin_s)

    @property
    def beat_every(self) -> Span:
        return span(self.beat_s)


def _milli(gpus: float | None) -> int | None:
    return None if gpus is None else round(gpus * 1000)


def span(seconds: float) -> Span:
    return Span(round(seconds * 1_000_000))
