"""What an agent has to be told. Checks form only; nothing is opened here."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from gpool.agent.machine.policy import MOST_GANG_PORT, site_address, site_name
from gpool.core.errors import Invalid
from gpool.core.model import GIB
from gpool.core.specs import labels
from gpool.core.specs import price as prices
from gpool.transfer.node_proofs import NodeKey
from gpool.transfer.requests import Address


class AgentSettings(BaseSettings):
    """From keywords, else from `GPOOL_AGENT_*` variables."""

    model_config = SettingsConfigDict(env_prefix="GPOOL_AGENT_", extra="forbid")

    server_url: str
    fingerprint: str | None = None  # of the server's certificate
    plain_http: bool = False  # the owner's word that nothing need be encrypted
    node: str  # who it is, to `server_name`; both were told when it joined
    server_name: str
    key_file: Path
    data_dir: Path
    slots: int = Field(default_factory=lambda: os.cpu_count() or 1, ge=0, le=1024)
    simulate_gpus: str | None = None
    allow_process: bool = False  # the owner's own tasks may run without isolation
    docker: bool = True  # images may run where an engine answers
    microvm: bool = True  # tasks that ask for it get a machine of their own, where one boots
    sharing: str = (
        ""  # how GPUs are shared, first choice first: "mig,mps"; empty: as each card is set
    )
    policy: Path | None = None  # the owner's rules, a TOML file; see gpool.agent.machine.policy
    cache_bytes: int = Field(default=10 * GIB, ge=0)
    site: str = (
        ""  # nodes of one site reach each other directly; named, this one takes members of gangs
    )
    gang_address: str = (
        ""  # by which the others of its site reach it; empty: the one that leads to the server
    )
    gang_port: int = Field(
        default=0, ge=0, le=MOST_GANG_PORT
    )  # UDP, the first of several; 0: the usual

    labels: str = ""  # what tasks can ask for by name, with those of the policy: "ssd,zone=a"
    price: str = ""  # "0.31/h", for an hour of a GPU; empty: the policy's

    @property
    def own_labels(self) -> frozenset[str]:
        return frozenset(labels.normal(self.labels.split(",") if self.labels else ()))

    @property
    def price_microcredits(self) -> int:
        return prices.parse_price(self.price) if self.price else 0

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
        """The node's key; `Invalid` says how to get one."""
        if not self.key_file.exists():
            raise Invalid(
                f"there is no node's key in {self.key_file}; join again with a new link: gpool join LINK"
            )
        return NodeKey.from_file(self.key_file)
