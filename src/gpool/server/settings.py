"""The server's settings: `GPOOL_SERVER_*` environment variables or keyword arguments, validated together.

`python -m gpool.server.settings` prints docs/settings.md. Past 400 lines because each setting carries its description.
"""

from __future__ import annotations

import ipaddress
import json
import platform
import sys
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, SettingsConfigDict

from gpool.core.model import GIB, Permission, Span
from gpool.core.quotas import Quota
from gpool.server.identity.sealer import MasterSource
from gpool.server.nodes.reports import SITE
from gpool.transfer.requests import is_loopback

Registration = Literal["open", "invite", "closed"]


class OidcProvider(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(
        pattern=r"^[a-z0-9-]{1,32}$", description="Name of the provider in URLs and account names."
    )
    issuer: str = Field(
        pattern=r"^https?://",
        description="Issuer URL; the discovery document is at ISSUER/.well-known/openid-configuration.",
    )
    client_id: str = Field(
        min_length=1, description="Client id under which this server is registered there."
    )
    client_secret: SecretStr | None = Field(
        default=None, description="Client secret; unset: a public client that uses PKCE alone."
    )
    scope: str = Field(default="openid", description="Scopes to request, separated by spaces.")


class Settings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="GPOOL_SERVER_", frozen=True, extra="forbid")

    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(
        default=8642, ge=0, le=65535, description="TCP port to listen on; 0 takes a free port."
    )
    data: Path = Field(
        default=Path("gpool-data"),
        description="Directory for the database, artifacts, keys and the TLS certificate.",
    )
    database_url: str | None = Field(
        default=None,
        description="`postgresql://…` or `sqlite:///…`; unset: SQLite in the data directory.",
    )
    public_url: str | None = Field(
        default=None,
        description="URL under which clients and nodes reach the server, used in join links; unset: host and port.",
    )
    tls: bool | None = Field(
        default=None, description="Serve TLS; unset: only if the server listens beyond loopback."
    )
    tls_cert: Path | None = Field(
        default=None,
        description="PEM file with the certificate chain, server certificate first; unset: a self-signed one, pinned by join links.",
    )
    tls_key: Path | None = Field(
        default=None, description="PEM file with the private key of `tls_cert`, without a password."
    )
    plain_http: bool = Field(
        default=False,
        description="Allow plain HTTP beyond loopback; use it only behind a proxy that terminates TLS.",
    )
    trusted_proxies: str = Field(
        default="",
        description="Addresses or networks, separated by commas, whose `X-Forwarded-*` headers are trusted.",
    )
    shared_sites: str = Field(
        default="",
        description="Site names, separated by commas, that nodes of several owners may share; other names are private to each owner.",
    )

    ttl_s: float = Field(
        default=30.0,
        gt=0,
        description="Lease time: a node that sends no heartbeat for this long loses its leases.",
    )
    margin_s: float = Field(
        default=5.0,
        ge=0,
        description="The agent stops its tasks this much before its leases expire.",
    )
    beat_s: float = Field(default=8.0, gt=0, description="Interval of the agents' heartbeats.")
    tick_s: float = Field(
        default=1.0, gt=0, description="Longest time between two scheduling passes."
    )
    prune_s: float = Field(
        default=60.0, gt=0, description="Interval of the loops that delete expired rows and files."
    )
    log_format: Literal["text", "json"] = Field(
        default="text", description="Form of the log: lines for people, or one JSON object a line."
    )
    order: str = Field(
        default="fair_share",
        description="Queue order: built in, or an entry point `gpool.orders` of an installed package.",
    )
    learn_every_s: float = Field(
        default=86_400.0,
        ge=0,
        description="Interval at which the placement pricing is trained on recent arrivals; 0: only on request.",
    )
    examine_gpus: bool = Field(
        default=False, description="Give a GPU no task before it has passed GPU verification."
    )
    measure_gpus: bool = Field(
        default=True, description="Measure the speed of GPUs that no task is using."
    )
    reexamine_s: float = Field(
        default=7 * 86_400.0,
        gt=0,
        description="Mean time between two verifications of a GPU; the exact moments are random.",
    )

    node_frames_per_s: float = Field(
        default=600.0,
        ge=0,
        description="Report frames one node may send; other frames count by their cost. 0: no limit.",
    )
    max_queued: int = Field(
        default=5_000_000, ge=1, description="Queued tasks in the whole pool; more are refused."
    )
    max_artifact_bytes: int = Field(
        default=256 * GIB, ge=1, description="Size of one artifact; larger uploads are refused."
    )
    max_wait_s: float = Field(
        default=60.0, ge=0, description="Longest `wait` of one request for a task's end."
    )
    key_cache_s: float = Field(
        default=4.0,
        ge=0,
        le=5,
        description="How long checked keys are cached; a revoked key may work for this long.",
    )
    keep_keys_s: float = Field(
        default=86_400.0,
        ge=0,
        description="How long ended sessions and responses to requests with an Idempotency-Key are kept.",
    )
    keep_unreferenced_s: float = Field(
        default=86_400.0,
        ge=0,
        description="How long artifacts without references and unfinished uploads are kept.",
    )
    keep_checkpoints_s: float = Field(
        default=86_400.0, ge=0, description="How long checkpoints are kept after their task's end."
    )
    seal_logs_after_s: float = Field(
        default=60.0,
        ge=0,
        description="Time after a task's end at which its log moves from the database to an artifact.",
    )

    registration: Registration | None = Field(
        default=None,
        description="Who may create an account: `open`, `invite` or `closed`; unset: `open` on loopback, else `invite`.",
    )
    new_users_may: frozenset[Permission] = Field(
        default=frozenset({Permission.CONSUMER, Permission.PROVIDER}),
        description="Permissions of new accounts.",
    )
    grace_s: float = Field(
        default=30.0,
        ge=0,
        le=600,
        description="How long the previous refresh token returns the current one again, for lost responses.",
    )
    idle_days: float = Field(
        default=30.0, gt=0, description="A session not refreshed for this long ends."
    )
    session_days: float = Field(
        default=180.0, gt=0, description="Longest life of a session after its sign-in."
    )
    rotate_signing_keys_s: float = Field(
        default=30 * 86_400.0, gt=0, description="Interval at which the token signing key changes."
    )
    signing_key_lead_s: float = Field(
        default=60.0,
        ge=0,
        description="Time between publishing a signing key and signing with it, so that every replica knows it.",
    )
    password_passes: int = Field(default=3, ge=1, description="Argon2id passes per password hash.")
    password_memory_kib: int = Field(
        default=64 * 1024, ge=8, description="Argon2id memory per password hash."
    )
    nonce_s: float = Field(
        default=600.0, gt=0, description="Time to complete a wallet or OpenID Connect sign-in."
    )
    chain_id: int = Field(
        default=1, ge=1, description="Ethereum chain id in wallet sign-in messages (EIP-155)."
    )
    chain_url: str | None = Field(
        default=None,
        description="JSON-RPC endpoint of the chain; unset: contract wallets cannot sign in.",
    )
    oidc: tuple[OidcProvider, ...] = Field(
        default=(), description="OpenID Connect providers, as a JSON list; members below."
    )

    user_gpus: float | None = Field(
        default=None, ge=0, description="Quota of an account: GPUs in use at once; unset: no limit."
    )
    user_queued: int | None = Field(
        default=1_000_000, ge=0, description="Quota of an account: queued tasks."
    )
    user_storage_bytes: int | None = Field(
        default=1024 * GIB, ge=0, description="Quota of an account: stored artifacts."
    )
    team_gpus: float | None = Field(
        default=None, ge=0, description="Quota of a team: GPUs in use at once; unset: no limit."
    )
    team_queued: int | None = Field(
        default=2_000_000, ge=0, description="Quota of a team: queued tasks."
    )
    team_storage_bytes: int | None = Field(
        default=4096 * GIB, ge=0, description="Quota of a team: stored artifacts."
    )

    master_key: SecretStr | None = Field(
        default=None,
        description="Master keys, 32 bytes in base64 or hexadecimal; the first one wraps new data keys.",
    )
    master_key_command: str | None = Field(
        default=None,
        description="Command that prints the master keys, e.g. a KMS client; takes precedence over `master_key`.",
    )
    master_key_file: Path | None = Field(
        default=None,
        description="File with the master keys if neither of the two is set, created on first start; unset: `master.key` in the data directory.",
    )

    @model_validator(mode="after")
    def _agent_stops_before_expiry(self) -> Self:
        if self.margin_s + self.beat_s >= self.ttl_s:
            raise ValueError(
                f"ttl_s={self.ttl_s} must be longer than beat_s={self.beat_s} plus margin_s={self.margin_s}"
            )
        return self

    @model_validator(mode="after")
    def _keys_are_encrypted_in_transit(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key must be set together")
        if self.plain_http and (self.tls or self.tls_cert):
            raise ValueError("plain_http contradicts tls and tls_cert; unset one of them")
        if not self.uses_tls and not self.plain_http and not is_loopback(self.host):
            raise ValueError(
                f"host={self.host} without TLS exposes every key to the network; leave tls on, "
                "or set plain_http behind a proxy that terminates TLS"
            )
        for each in self.proxies:
            ipaddress.ip_network(each)  # ValueError names the fault
        return self

    @model_validator(mode="after")
    def _sites_are_names(self) -> Self:
        for name in self.sites:
            if not SITE.fullmatch(name):
                raise ValueError(f"shared_sites: {name!r} may hold only letters, digits and . _ -")
        return self

    @property
    def sites(self) -> frozenset[str]:
        return frozenset(each.strip() for each in self.shared_sites.split(",") if each.strip())

    @property
    def is_local(self) -> bool:
        return is_loopback(self.host)

    @property
    def uses_tls(self) -> bool:
        if self.tls is not None:
            return self.tls
        return self.tls_cert is not None or not (self.plain_http or is_loopback(self.host))

    @property
    def is_reached_by_tls(self) -> bool:
        return self.url.startswith("https://")

    @property
    def proxies(self) -> list[str]:
        return [each.strip() for each in self.trusted_proxies.split(",") if each.strip()]

    @property
    def url(self) -> str:
        scheme = "https" if self.uses_tls else "http"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return (self.public_url or f"{scheme}://{host}:{self.port}").rstrip("/")

    @property
    def store_url(self) -> str:
        return self.database_url or f"sqlite:///{self.data / 'gpool.db'}"

    @property
    def is_shared(self) -> bool:
        """Whether other servers may write to the same database."""
        return self.database_url is not None and not self.database_url.startswith("sqlite")

    @property
    def address(self) -> str:
        """`HOST:PORT` for clients; the machine's name if the server listens on all addresses."""
        if self.public_url is None and self.host in ("0.0.0.0", "::"):
            return f"{platform.node()}:{self.port}"
        return self.url.removeprefix("https://").removeprefix("http://")

    @property
    def origin(self) -> str:
        """`SCHEME://HOST:PORT` that sign-in messages are bound to."""
        return (self.public_url or f"http://{self.host}:{self.port}").rstrip("/")

    @property
    def registers(self) -> Registration:
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


# ---- docs/settings.md

_SECTIONS = {
    "host": "Network and TLS",
    "ttl_s": "Leases and scheduling",
    "node_frames_per_s": "Limits and retention",
    "registration": "Accounts and sign-in",
    "user_gpus": "Default quotas",
    "master_key": "Master keys",
}
"""Heading by the first setting of each section."""

_UNITS = {
    "_frames_per_s": "frames/s",
    "_s": "seconds",
    "_days": "days",
    "_bytes": "bytes",
    "_kib": "KiB",
    "_gpus": "GPUs",
    "_queued": "tasks",
}
_TABLE = ("| variable | default | unit | meaning |", "|---|---|---|---|")


def as_markdown() -> str:
    lines = [
        "# Settings of the server",
        "",
        "Generated from `gpool.server.settings` (`make docs`); `make check` fails when it is stale.",
        "",
        "The server reads environment variables. Lists and sets are written as JSON.",
    ]
    for name, field in Settings.model_fields.items():
        if name in _SECTIONS:
            lines += ["", f"## {_SECTIONS[name]}", "", *_TABLE]
        lines.append(_row(f"GPOOL_SERVER_{name.upper()}", name, field))
    lines += ["", "## Members of an OpenID Connect provider", ""]
    lines += ["| member | default | unit | meaning |", _TABLE[1]]
    lines += [_row(name, name, field) for name, field in OidcProvider.model_fields.items()]
    return "\n".join([*lines, ""])


def _row(label: str, name: str, field: FieldInfo) -> str:
    unit = next((unit for ending, unit in _UNITS.items() if name.endswith(ending)), "")
    unit = "" if isinstance(field.default, bool) else unit
    return f"| `{label}` | {_default(field)} | {unit} | {field.description} |"


def _default(field: FieldInfo) -> str:
    value = field.default
    if field.is_required():
        return "required"
    if value is None or value == "":
        return "unset"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, frozenset | tuple):
        value = json.dumps(sorted(value))
    if isinstance(value, bool):
        value = str(value).lower()
    size = f" ({value // GIB} GiB)" if type(value) is int and value >= GIB else ""
    return f"`{value}`{size}"


if __name__ == "__main__":
    sys.stdout.write(as_markdown())
