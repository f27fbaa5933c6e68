"""The agent's settings. Validates form only."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from gpool.agent.machine.policy import MOST_GANG_PORT, AskedTerms, site_address, site_name
from gpool.agent.machine.policy_file import parse_free_for, parse_notice
from gpool.agent.runtime.microvm.passthrough import DedicatedCard, parse_dedicated
from gpool.core.errors import Invalid
from gpool.core.model import GIB
from gpool.core.money.prices import parse_credits, parse_prices
from gpool.core.specs import fields
from gpool.observability.logs import LogFormat, LogLevel
from gpool.transfer.node_proofs import NodeKey
from gpool.transfer.object_stores import StoreAccess, listed_origins
from gpool.transfer.requests import Address, origin_of


def _listed(text: str) -> list[str]:
    return list(dict.fromkeys(each.strip() for each in text.split(",") if each.strip()))


class AgentSettings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="GPOOL_AGENT_", extra="forbid")

    server_url: str = Field(
        description="URL of the server, or of several servers of one pool (replicas), separated by commas: "
        "the agent keeps a connection to one of them."
    )
    fingerprint: str | None = Field(
        None, description="SHA-256 of the server's certificate, as in the join link; unset: CAs."
    )
    plain_http: bool = Field(False, description="Accept an unencrypted connection.")
    node: str = Field(description="Id of this node, issued when it joined.")
    server_name: str = Field(description="Name of the server, issued when the node joined.")
    key_file: Path = Field(description="File with the node's private key.")
    data_dir: Path = Field(description="Directory for sandboxes, environments and the cache.")
    slots: int = Field(
        default_factory=lambda: os.cpu_count() or 1,
        ge=0,
        le=1024,
        description="CPUs to lend; 0 lends none.",
    )
    simulate_gpus: str | None = Field(
        None, description="Simulated GPUs instead of real ones, like `H100:2`."
    )
    allow_process: bool = Field(
        False, description="Offer the tier without isolation, for the owner's own tasks."
    )
    docker: bool = Field(True, description="Offer images if a container engine answers.")
    microvm: bool = Field(True, description="Offer the tier `vm` if a guest boots.")
    sharing: str = Field(
        "",
        description="Ways to share GPUs, first choice first: `mig,mps`; unset: as each card is set.",
    )
    lend_untested: bool = Field(
        False,
        description="Lend AMD and Intel GPUs, on which gpool was never run, to everyone; "
        "else to the owner and the owner's teams.",
    )
    vfio: str = Field(
        "",
        description="GPUs for guests of tier `vm` only, by PCI address: `0000:41:00.0,0000:61:00.0`, or "
        "`0000:41:00.0=H100:80GB` for one without a driver. Needs root and an IOMMU. Not run on real hardware yet.",
    )
    policy: Path | None = Field(None, description="The owner's policy, a TOML file.")
    log_format: LogFormat = Field(
        "text", description="Format of log lines: `text` for people, or `json`: ECS."
    )
    log_level: LogLevel = Field(
        "info", description="Lowest level of log lines; `debug` adds a line per start and end."
    )
    cache_bytes: int = Field(default=10 * GIB, ge=0, description="Size of the artifact cache.")
    site: str = Field(
        "",
        description="Site whose nodes reach each other directly; if set, gang members are accepted.",
    )
    gang_address: str = Field(
        "", description="Address for other nodes of the site; unset: the one towards the server."
    )
    gang_port: int = Field(
        default=0, ge=0, le=MOST_GANG_PORT, description="First UDP port of gangs; 0: the default."
    )
    gang_trusted_link: bool = Field(
        False,
        description="The link between the site's nodes is trusted: gangs use it directly, unencrypted, "
        "if all their nodes declare it. Needs a root agent and an Ethernet link that carries other MACs.",
    )
    gang_rdma: bool = Field(
        False,
        description="Give gang members on a trusted link the devices in /dev/infiniband. No filter applies to "
        "RDMA. Not run on RDMA hardware yet.",
    )
    stores: str = Field(
        "",
        description="Origins of object stores in private networks, like `http://10.0.0.5:9000`, separated by "
        "commas, that artifacts may be exchanged with; others only at public addresses, over TLS.",
    )
    labels: str = Field("", description="Labels like `ssd,zone=a`, in addition to the policy's.")
    price: str = Field(
        "",
        description="Price of a GPU hour, like `0.31/h` or `0.31/h,H100=2.00/h,gpu0=0/h`; unset: the policy's.",
    )
    min_charge: str = Field(
        "", description="Least charge of an allocation, in credits; unset: the policy's."
    )
    free_for: str | None = Field(
        None,
        description="Users and teams whose tasks cost nothing, like `team:lab,user:ana`; unset: the policy's.",
    )
    notice: str = Field(
        "",
        description="Promised time before a rule of the policy reclaims tasks, like `10m`; unset: the policy's.",
    )

    @property
    def own_labels(self) -> frozenset[str]:
        return frozenset(fields.normal_labels(self.labels.split(",") if self.labels else ()))

    @property
    def asked_terms(self) -> AskedTerms:
        return AskedTerms(
            parse_prices(self.price) if self.price else None,
            parse_credits(self.min_charge) if self.min_charge else None,
            None if self.free_for is None else parse_free_for(self.free_for),
            parse_notice(self.notice) if self.notice else None,
        )

    @field_validator("vfio")
    @classmethod
    def _vfio(cls, value: str) -> str:
        try:
            parse_dedicated(value)
        except Invalid as bad:
            raise Invalid(f"GPOOL_AGENT_VFIO: {bad.detail}") from bad
        return value

    @property
    def dedicated(self) -> tuple[DedicatedCard, ...]:
        return parse_dedicated(self.vfio)

    @property
    def store_access(self) -> StoreAccess:
        return StoreAccess(self.address, listed_origins(self.stores))

    @field_validator("stores")
    @classmethod
    def _stores(cls, value: str) -> str:
        listed_origins(value)  # Invalid names the fault
        return value

    @field_validator("site")
    @classmethod
    def _site(cls, value: str) -> str:
        return site_name(value)

    @field_validator("gang_address")
    @classmethod
    def _gang_address(cls, value: str) -> str:
        return site_address(value)

    @model_validator(mode="after")
    def _rdma_needs_trust(self) -> AgentSettings:
        if self.gang_rdma and not self.gang_trusted_link:
            raise ValueError(
                "GPOOL_AGENT_GANG_RDMA needs GPOOL_AGENT_GANG_TRUSTED_LINK: RDMA is neither encrypted nor filtered"
            )
        return self

    @property
    def address(self) -> Address:
        return self.addresses[0]

    @property
    def addresses(self) -> tuple[Address, ...]:
        return tuple(
            Address(url, self.fingerprint, self.plain_http) for url in _listed(self.server_url)
        )

    @field_validator("server_url")
    @classmethod
    def _server_url(cls, value: str) -> str:
        urls = _listed(value)
        if not urls:
            raise ValueError("it names no server; write https://HOST:PORT")
        for url in urls:
            try:
                origin_of(url)
            except Invalid as bad:
                raise ValueError(bad.detail) from bad
        return ",".join(urls)

    def read_key(self) -> NodeKey:
        if not self.key_file.exists():
            raise Invalid(
                f"the node key file {self.key_file} does not exist; join again with a new link: gpool join LINK"
            )
        return NodeKey.from_file(self.key_file)
