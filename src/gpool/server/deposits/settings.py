"""Settings of deposits by chain transfers; part of the server's settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings

from gpool.wallet import signing
from gpool.wallet.errors import BadAddress


@dataclass(frozen=True, slots=True)
class DepositTerms:
    """Where deposits are looked for. Addresses in lower case; the first block read is `from_block`."""

    rpc_url: str = field(repr=False)  # may contain a key of the provider
    chain_id: int
    token: str
    address: str
    confirmations: int
    from_block: int


class DepositSettings(BaseSettings):
    deposit_rpc_url: SecretStr | None = Field(
        default=None,
        description="JSON-RPC endpoint of the chain `chain_id`, for deposits; unset: there are none. All of `deposit_*` are set, or none.",
    )
    deposit_token: str | None = Field(
        default=None,
        description="Address of the ERC-20 token, with 6 decimals: one unit is one micro-credit.",
    )
    deposit_address: str | None = Field(
        default=None, description="Address of the pool that receives deposits."
    )
    deposit_confirmations: int = Field(
        default=12, ge=1, description="Blocks after that of a deposit until it is credited."
    )
    deposit_from_block: int | None = Field(
        default=None, ge=0, lt=1 << 62, description="First block in which deposits are looked for."
    )

    @model_validator(mode="after")
    def _check_deposits(self) -> Self:
        named = {
            "deposit_rpc_url": self.deposit_rpc_url,
            "deposit_token": self.deposit_token,
            "deposit_address": self.deposit_address,
            "deposit_from_block": self.deposit_from_block,
        }
        absent = [name for name, value in named.items() if value is None]
        if absent and len(absent) < len(named):
            raise ValueError(f"deposits need all of {', '.join(named)}; {absent[0]} is unset")
        for text in (self.deposit_token, self.deposit_address):
            if text is not None:
                try:
                    signing.parse(text)
                except BadAddress as error:
                    raise ValueError(error.detail) from error
        return self

    def deposit_terms(self, chain_id: int) -> DepositTerms | None:
        """None: the pool takes no deposits."""
        if (
            self.deposit_rpc_url is None
            or self.deposit_token is None
            or self.deposit_address is None
            or self.deposit_from_block is None
        ):
            return None
        return DepositTerms(
            self.deposit_rpc_url.get_secret_value(),
            chain_id,
            self.deposit_token.lower(),
            self.deposit_address.lower(),
            self.deposit_confirmations,
            self.deposit_from_block,
        )
