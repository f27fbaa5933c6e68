"""People at a desk: they register, hold wallets, sign in, and carry their tokens along."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import httpx2

from gpool.core.ids import UserId, decode
from gpool.wallet import signin
from gpool.wallet.moments import Moment
from gpool.wallet.signing import WalletKey
from tests.server.server_desk import Desk

PASSWORD = "a long enough password"


@dataclass
class Somebody:
    """Signed in. `headers` are what every request of theirs carries."""

    desk: Desk
    id: str
    name: str
    tokens: dict[str, Any] = field(repr=False)

    @property
    def headers(self) -> dict[str, str]:
        return bearer(self.tokens["access_token"])

    @property
    def user(self) -> UserId:
        return UserId(decode("user", self.id))

    async def ask(self, method: str, path: str, document: Any = None, **more: Any) -> Any:
        """The answer, whatever it is."""
        headers = {**self.headers, **more.pop("headers", {})}
        return await self.desk.bare.request(method, path, json=document, headers=headers, **more)

    async def refresh(self) -> httpx2.Response:
        token = {"refresh_token": self.tokens["refresh_token"]}
        answer = await self.desk.bare.post("/v1/auth/refresh", json=token)
        if answer.status_code == 200:
            self.tokens = answer.json()
        return answer


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


async def registered(desk: Desk, name: str, password: str = PASSWORD, **more: Any) -> Somebody:
    answer = await desk.bare.post("/v1/users", json={"name": name, "password": password, **more})
    assert answer.status_code == 201, answer.text
    return await signed_in(desk, name, password)


async def signed_in(desk: Desk, name: str, password: str = PASSWORD) -> Somebody:
    answer = await desk.bare.post("/v1/auth/password", json={"name": name, "password": password})
    assert answer.status_code == 200, answer.text
    return await _somebody(desk, answer.json())


async def _somebody(desk: Desk, tokens: dict[str, Any]) -> Somebody:
    me = await desk.bare.get("/v1/me", headers=bearer(tokens["access_token"]))
    assert me.status_code == 200, me.text
    return Somebody(desk, me.json()["id"], me.json()["name"], tokens)


async def joins(owner: Somebody, team: str, person: Somebody, role: str = "member") -> None:
    """The owner invites the person by name, who accepts."""
    wanted = {"user": person.name, "role": role}
    invited = await owner.ask("POST", f"/v1/teams/{team}/members", wanted)
    assert invited.status_code == 202, invited.text
    joined = await person.ask("POST", "/v1/teams/join", {"team": team})
    assert (joined.status_code, joined.json()["role"]) == (200, role), joined.text


# ---- wallets


def wallet(number: int) -> WalletKey:
    return WalletKey(number.to_bytes(32, "big"))


async def signed(
    desk: Desk, key: WalletKey, purpose: str = "sign_in", account: str = "", **changes: Any
) -> dict[str, str]:
    """A fresh message for this purpose and its signature."""
    asked = (await desk.bare.post("/v1/auth/wallet/nonce", json={"purpose": purpose})).json()
    message = signin.SignIn(
        **{
            "domain": asked["domain"],
            "address": key.address,
            "uri": asked["uri"],
            "chain_id": asked["chain_id"],
            "nonce": asked["nonce"],
            "issued_at": Moment.of(desk.clock.now()),
            "statement": signin.statement_of(signin.WalletPurpose(purpose), account),
            **changes,
        }
    )
    text = signin.format(message)
    return {"message": text, "signature": str(key.sign(text.encode()))}


async def signed_in_by(desk: Desk, key: WalletKey, **more: Any) -> Somebody:
    answer = await desk.bare.post("/v1/auth/wallet", json={**await signed(desk, key), **more})
    assert answer.status_code == 200, answer.text
    return await _somebody(desk, answer.json())
