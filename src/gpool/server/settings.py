"""What an operator may set: `GPOOL_SERVER_*` variables or arguments. Refuses times that would break the lease law."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from gpool.core.model import GIB, Span
from gpool.core.quotas import Quota
from gpool.server.identity.sealer import MasterSource


class Settings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="GPOOL_SERVER_", frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    port: int = Field(default=8642, ge=0, le=65535)
    data: Path = Path("gpool-data")
    database_url: str | None = None  # None: SQLite in the data directory
    public_url: str | None = None  # how others reach it, for join links; None: host and port

    ttl_s: float = Field(default=30.0, gt=0)
    margin_s: float = Field(default=5.0, ge=0)
    beat_s: float = Field(default=8.0, gt=0)
    tick_s: float = Field(default=1.0, gt=0)
    prune_s: float = Field(default=60.0, gt=0)

    order: Literal["fcfs", "round_robin", "priority"] = "priority"

    max_queued: int = Field(default=5_000_000, ge=1)
    max_artifact_bytes: int = Field(default=256 * GIB, ge=1)
    max_wait_s: float = Field(default=60.0, ge=0)
    key_cache_s: float = Field(default=5.0, ge=0)
    keep_keys_s: float = Field(default=86_400.0, ge=0)
    keep_unreferenced_s: float = Field(default=86_400.0, ge=0)
    seal_logs_after_s: float = Field(default=60.0, ge=0)

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

    @property
    def store_url(self) -> str:
        return self.database_url or f"sqlite:///{self.data / 'gpool.db'}"

    @property
    def address(self) -> str:
        """`HOST:PORT` as others reach it."""
        url = self.public_url or f"http://{self.host}:{self.port}"
        return url.removeprefix("https://").removeprefix("http://").rstrip("/")

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
