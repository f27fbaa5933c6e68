"""The server's settings: `GPOOL_SERVER_*` environment variables or keyword arguments, validated together.

`python -m gpool.server.settings` prints docs/settings.md. Past 400 lines because each setting carries its description.
"""

from __future__ import annotations

import ipaddress
import platform
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import SettingsConfigDict

from gpool.core.errors import Invalid
from gpool.core.model import GIB, MIB, Permission, Span
from gpool.core.quotas import OwnerQuota, Quota
from gpool.observability.logs import LogFormat, LogLevel
from gpool.server.blobs.bucket import Bucket, bucket_of, credentials_of_environment
from gpool.server.blobs.signatures import S3Credentials
from gpool.server.deposits.settings import DepositSettings
from gpool.server.events.settings import NoticeSettings
from gpool.server.identity.oidc import OidcProvider
from gpool.server.identity.sealer import MasterSource
from gpool.server.nodes.reports import SITE
from gpool.server.outbound import own_address
from gpool.server.store.drivers.opening import default_readers
from gpool.server.store.operations.tasks.storage import StorageLimits
from gpool.transfer.requests import WILDCARDS, is_loopback, origin_of, require_reachable_origin

Registration = Literal["open", "invite", "closed"]
DefaultOn = Literal["anyone", "team", "me"]


class Settings(NoticeSettings, DepositSettings):
    model_config = SettingsConfigDict(env_prefix="GPOOL_SERVER_", frozen=True, extra="forbid")

    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(
        default=8642, ge=0, le=65535, description="TCP port to listen on; 0 takes a free port."
    )
    data: Path = Field(
        default=Path("gpool-data"),
        description="Directory for the database, artifacts, keys and the TLS certificate.",
    )
    artifact_folder: Path | None = Field(
        default=None,
        description="Folder of artifacts and of uploads in progress, which the servers of one database share; unset: in the data directory.",
    )
    artifacts: str | None = Field(
        default=None,
        description="`s3://BUCKET/PREFIX`: keep artifacts in an S3-compatible store (`gpool[s3]`); unset: in the data directory.",
    )
    s3_endpoint: str | None = Field(
        default=None,
        description="URL of the S3-compatible store; unset: Amazon's for `s3_region`.",
    )
    s3_public_endpoint: str | None = Field(
        default=None,
        description="URL under which agents and clients reach the store; unset: `s3_endpoint`.",
    )
    s3_region: str = Field(default="us-east-1", description="Region of the bucket.")
    s3_access_key: str | None = Field(
        default=None,
        description="Access key of the bucket; unset, with `s3_secret_key`: `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY` and `AWS_SESSION_TOKEN`.",
    )
    s3_secret_key: SecretStr | None = Field(default=None, description="Secret of `s3_access_key`.")
    direct_bytes: int = Field(
        default=8 * MIB,
        ge=0,
        description="Artifacts of at least this size travel between agents, clients and the S3 store without passing the server; 0: none.",
    )
    database_url: str | None = Field(
        default=None,
        description="`postgresql://…` or `sqlite:///…`; unset: SQLite in the data directory.",
    )
    database_readers: int | None = Field(
        default=None,
        ge=1,
        le=1000,
        description="Connections for reads, of each server; unset: 4 with PostgreSQL, 2 with SQLite. PostgreSQL's `max_connections` must allow these and 3 more per server.",
    )
    public_url: str | None = Field(
        default=None,
        description="URL under which clients and nodes reach the server, in links, invites and sign-in messages; unset: host and port, the address on the default route if the server listens on all.",
    )
    replica_url: str | None = Field(
        default=None,
        description="URL of this server alone among those of its database, as agents with several addresses name it; unset: host and port.",
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
    connections_per_network: int = Field(
        default=512,
        ge=1,
        description="Open connections from one IPv4 address or IPv6 /64 network, four times as many from a /48; channels of nodes that proved their key and `trusted_proxies` do not count.",
    )
    request_head_s: float = Field(
        default=10.0,
        gt=0,
        description="Time for a TLS handshake, for a request's head, and of a new connection until its first one.",
    )
    request_bytes_per_s: int = Field(
        default=1024,
        ge=0,
        description="Lowest rate of a request's body, and of an answer that is read more slowly than it is written, measured over three times `request_head_s`; slower connections are closed.",
    )
    overload_delay_s: float = Field(
        default=0.4,
        gt=0,
        description="Delay of the event loop or the store at which submissions are refused for overload: listings from half of it, explanations from 0.7 of it, all other requests but the agents' from 1.5 times.",
    )
    overload_requests: int = Field(
        default=512,
        ge=4,
        description="Requests being processed at once from which submissions are refused: listings and explanations from an eighth, all other requests but the agents' from twice as many.",
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
    replica_timeout_s: float = Field(
        default=8.0,
        ge=3,
        description="Time without a heartbeat after which another server of the same PostgreSQL database counts as dead, and a leader is replaced.",
    )
    drain_s: float = Field(
        default=0.0,
        ge=0,
        description="Time between SIGTERM and the end of the server, in which `/readyz` answers 503, its nodes are asked to connect elsewhere, and requests are still served.",
    )
    rebalance_per_minute: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Largest part of its nodes that a server asks in a minute to connect to another server of the same database, if it has more of them than the mean; 0: none.",
    )
    beat_s: float = Field(default=8.0, gt=0, description="Interval of the agents' heartbeats.")
    tick_s: float = Field(
        default=1.0, gt=0, description="Longest time between two scheduling passes."
    )
    release_s: float = Field(
        default=300.0,
        gt=0,
        description="Time a node has to release a cancelled task; then the server frees its slot.",
    )
    collect_s: float = Field(
        default=1800.0,
        gt=0,
        description="Time a node has after time-out or preemption, and grace, to save a checkpoint and outputs; then the server ends the lease.",
    )
    prune_s: float = Field(
        default=60.0, gt=0, description="Interval of the loops that delete expired rows and files."
    )
    audit_anchor_s: float = Field(
        default=600.0,
        ge=1,
        description="Interval at which number and hash of the newest audit entry are logged, if there is a new one, for the check of the record (`--anchor`).",
    )
    log_format: LogFormat = Field(
        default="text",
        description="Form of the log: `text` for people, or `json`: ECS, one JSON object a line.",
    )
    log_level: LogLevel = Field(
        default="info",
        description="Lowest level of log lines; `debug` adds a line per request, submission and grant.",
    )
    metrics_listen: str | None = Field(
        default=None,
        pattern=r"^(\[[0-9a-fA-F:.]+\]|[^\[\]:]+):[0-9]{1,5}$",
        description="`HOST:PORT` on which `/metrics` is served by plain HTTP without a key, for Prometheus alone; unset: only to operators, on the server's own port.",
    )
    metrics_gpus: int = Field(
        default=2000,
        ge=0,
        description="GPUs, and nodes, with series of their own in the metrics; beyond them only the sums are exported.",
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
    examine_gpus: bool | None = Field(
        default=None,
        description="Verify GPUs: before it has passed, a GPU gets no task of strangers. Unset: except on loopback.",
    )
    gpu_models: Path | None = Field(default=None, description="TOML file with more GPU models.")
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
    default_on: DefaultOn = Field(
        default="anyone",
        description="Owners whose nodes run a task that does not say so by `on`: `anyone`, `team` (the consumer's own "
        "nodes and those of its teams' members) or `me`. Tasks with secrets: at most `team`.",
    )
    max_gpus_per_node: int = Field(
        default=64,
        ge=1,
        le=64,
        description="GPUs that one node may offer; larger offers are refused.",
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
    keep_task_data_days: float = Field(
        default=30.0,
        ge=0,
        description="Days after a task's end at which its arguments, results, log and checkpoint expire; the summary stays. 0: kept.",
    )
    keep_tasks_days: float = Field(
        default=365.0,
        ge=0,
        description="Days after a task's end at which its summary is deleted too. 0: kept.",
    )
    keep_audit_days: float = Field(
        default=730.0,
        ge=0,
        description="Days after which entries of the audit record are deleted; the hash chain goes on. 0: kept.",
    )
    keep_credentials_days: float = Field(
        default=90.0,
        ge=0,
        description="Days after their end at which revoked or expired API keys and invitations are deleted. 0: kept.",
    )
    min_free_bytes: int = Field(
        default=GIB // 2,
        ge=0,
        description="Free disk space below which uploads and submissions with inline arguments are refused; ends of tasks are stored.",
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
    owner_nodes: int | None = Field(
        default=256,
        ge=0,
        description="Quota of an owner who is not an operator: nodes; unset: no limit.",
    )
    owner_gpus: int | None = Field(
        default=2048,
        ge=0,
        description="Quota of an owner who is not an operator: GPUs on all nodes together; unset: no limit.",
    )
    user_storage_bytes: int | None = Field(
        default=1024 * GIB,
        ge=0,
        description="Quota of an account: stored artifacts, logs, inline data, uploads in progress.",
    )
    user_teams: int = Field(default=100, ge=1, description="Teams that an account may belong to.")
    user_own_teams: int = Field(default=20, ge=0, description="Teams that an account may own.")
    team_gpus: float | None = Field(
        default=None, ge=0, description="Quota of a team: GPUs in use at once; unset: no limit."
    )
    team_queued: int | None = Field(
        default=2_000_000, ge=0, description="Quota of a team: queued tasks."
    )
    team_storage_bytes: int | None = Field(
        default=4096 * GIB,
        ge=0,
        description="Quota of a team: stored artifacts, logs, inline data, uploads in progress.",
    )

    prices: bool = Field(
        default=False,
        description="Charge tasks at the prices that owners ask; off: prices select nodes only, nothing is reserved or charged.",
    )
    vest_hours: float = Field(
        default=96.0,
        ge=0,
        le=24 * 90,
        description="Time after the end of a lease until its earning is the owner's; until then it returns if the node is caught.",
    )
    fee_ppm: int = Field(
        default=0, ge=0, le=1_000_000, description="The pool's part of each charge, in millionths."
    )

    encrypt_data: bool = Field(
        default=False,
        description="Encrypt new arguments, results, logs and artifacts with a data key per account; what is stored already stays as it is.",
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
    def _urls_are_origins(self) -> Self:
        for name in ("public_url", "replica_url"):
            value = getattr(self, name)
            if value is not None:
                require_reachable_origin(name, value)
        return self

    @model_validator(mode="after")
    def _sites_are_names(self) -> Self:
        for name in self.sites:
            if not SITE.fullmatch(name):
                raise ValueError(f"shared_sites: {name!r} may hold only letters, digits and . _ -")
        return self

    @model_validator(mode="after")
    def _bucket_is_complete(self) -> Self:
        if (self.s3_access_key is None) != (self.s3_secret_key is None):
            raise ValueError("s3_access_key and s3_secret_key must be set together")
        try:
            bucket = self.bucket
            for url in () if bucket is None else (bucket.endpoint, bucket.public_endpoint):
                origin_of(url)
        except Invalid as error:
            raise ValueError(f"artifacts: {error}") from error
        return self

    @property
    def folder(self) -> Path:
        """Folder of artifacts and of uploads in progress."""
        return self.artifact_folder or self.data / "artifacts"

    @property
    def bucket(self) -> Bucket | None:
        if self.artifacts is None:
            return None
        name, prefix = bucket_of(self.artifacts)
        endpoint = self.s3_endpoint or f"https://s3.{self.s3_region}.amazonaws.com"
        public = self.s3_public_endpoint or endpoint
        return Bucket(name, prefix, endpoint.rstrip("/"), public.rstrip("/"), self._s3_credentials)

    @property
    def _s3_credentials(self) -> S3Credentials:
        if self.s3_access_key is not None and self.s3_secret_key is not None:
            secret = self.s3_secret_key.get_secret_value()
            return S3Credentials(self.s3_access_key, secret, self.s3_region)
        return credentials_of_environment(self.s3_region)

    @property
    def storage_limits(self) -> StorageLimits:
        return StorageLimits(self.user_storage_bytes, self.team_storage_bytes)

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
        """Address for other machines: `public_url`, else of the listening socket; one machine, never a wildcard."""
        return self._listening_url if self.public_url is None else self.public_url.rstrip("/")

    @property
    def _listening_url(self) -> str:
        host = self._reachable_host
        scheme = "https" if self.uses_tls else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def replica_address(self) -> str:
        """Address of this server alone: `replica_url`, else of the listening socket."""
        return origin_of(self.replica_url or self._listening_url)

    @property
    def _reachable_host(self) -> str:
        if self.host not in WILDCARDS:
            return self.host
        return own_address(6 if self.host == "::" else 4) or platform.node() or "localhost"

    @property
    def store_url(self) -> str:
        return self.database_url or f"sqlite:///{self.data / 'gpool.db'}"

    @property
    def store_readers(self) -> int:
        return self.database_readers or default_readers(self.store_url)

    @property
    def is_shared(self) -> bool:
        """Whether other servers may write to the same database."""
        return self.database_url is not None and not self.database_url.startswith("sqlite")

    @property
    def origin(self) -> str:
        """`SCHEME://HOST[:PORT]` of `url`, in the spelling that sign-in messages and clients use."""
        return origin_of(self.url)

    @property
    def address(self) -> str:
        """`HOST[:PORT]` of `origin`, for links and as the domain of sign-in messages."""
        return self.origin.partition("://")[2]

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
    def owner_quota(self) -> OwnerQuota:
        return OwnerQuota(self.owner_nodes, self.owner_gpus)

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
