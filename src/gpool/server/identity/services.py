"""What signing people in needs, as one value: keys, passwords, sealing, and the way out. Wired in `app`."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from gpool.server.identity.passwords import PasswordCost, Passwords
from gpool.server.identity.secrets.sealer import Sealer
from gpool.server.identity.tokens.refresh import RefreshTerms
from gpool.server.identity.tokens.signing_keys import TokenSigner
from gpool.server.outbound import Outbound


@dataclass(frozen=True)
class SignInServices:
    sealer: Sealer
    signing: TokenSigner
    outbound: Outbound
    terms: RefreshTerms
    cost: PasswordCost = field(default_factory=PasswordCost)

    @cached_property
    def passwords(self) -> Passwords:
        """Made when first needed: its decoy costs as much as a password."""
        return Passwords(self.cost)

    async def close(self) -> None:
        if "passwords" in self.__dict__:
            self.passwords.close()
        await self.outbound.close()
