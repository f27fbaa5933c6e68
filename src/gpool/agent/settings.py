"""The agent's settings. Validates form only."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from gpool.agent.machine.policy import MOST_GANG_PORT, site_address, site_name
from gpool.core.errors import Invalid
from gpool.core.model import GIB
from gpool.core.specs import fields
from gpool.transfer.node_proofs import NodeKey
from gpool.transfer.requests import Address


class AgentSettings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="GPOOL_AGENT_", extra="forbid")

    server_url: str
    fingerprint: str | None = None  # of the server's certificate
    plain_http: bool = False  # the owner accepts an unencrypted connection
    node: str  # its id on `server_name`; both were issued when it joined
    server_name: str
    key_file: Path
    data_dir: Path
    slots: int = Field(default_factory=lambda: os.cpu_count() or 1, ge=0, le=1024)
    simulate_gpus: str | None = None
    allow_process: bool = False  # offer the tier without isolation, for the owner's own tasks
    docker: bool = True  # offer images if a container engine answers
    microvm: bool = True  # offer the tier vm if a guest boots
    sharing: str = (
        ""  # ways to share GPUs, first choice first: "mig,mps"; empty: as each card is set
    )
    policy: Path | None = None  # the owner's policy, a TOML file; see gpool.agent.machine.policy
    log_format: Literal["text", "json"] = "text"
    cache_bytes: int = Field(default=10 * GIB, ge=0)
    site: str = (
        ""  # nodes of a site reach each other directly; if set, this node accepts gang members
    )
    gang_address: str = ""  # address for other nodes of the site; empty: the one towards the server
    gang_port: int = Field(default=0, ge=0, le=MOST_GANG_PORT)  # first UDP port; 0: the default
    labels: str = ""  # "ssd,zone=a", in addition to the policy's
    price: str = ""  # "0.31/h", for an hour of a GPU; empty: the policy's

    @property
    def own_labels(self) -> frozenset[str]:
        return frozenset(fields.normal_labels(self.labels.split(",") if self.labels else ()))

    @property
    def price_microcredits(self) -> int:
        return fields.parse_price(self.price) if self.price else 0

    @field_validator("site")
    @classmethod
    def _site(cls, value: str) -> str:
        return site_name(value)

    @field_validator("gang_address")
    @classmethod
    def _gang_address(cls, value: str) -> str:
        return site_address(value)

    @property
    def address(self) -> Address:
        return Address(self.server_url, self.fingerprint, self.plain_http)

    def read_key(self) -> NodeKey:
        if not self.key_file.exists():
            raise Invalid(
                f"the node key file {self.key_file} does not exist; join again with a new link: gpool join LINK"
            )
        return NodeKey.from_file(self.key_file)
