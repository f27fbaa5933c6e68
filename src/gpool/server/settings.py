"""What an operator may set: `GPOOL_SERVER_*` variables or arguments. Refuses times that would break the lease law."""

from __future__ import annotations

import ipaddress
import platform
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from gpool.core.model import GIB, Span
from gpool.transfer.requests import is_loopback


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
    def address(self) -> str:
        """`HOST:PORT` as others reach it; a server that listens everywhere goes by its machine's name."""
        if self.public_url is None and self.host in ("0.0.0.0", "::"):
            return f"{platform.node()}:{self.port}"
        return self.url.removeprefix("https://").removeprefix("http://")

    @property
    def ttl(self) -> Span:
        return span(self.ttl_s)

    @property
    def margin(self) -> Span:
        return span(self.margin_s)

    @property
    def beat_every(self) -> Span:
        return span(self.beat_s)


def span(seconds: float) -> Span:
    return Span(round(seconds * 1_000_000))
