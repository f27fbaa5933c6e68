"""A browser without a window: keeps cookies, sends the headers that browsers send, reads form tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import httpx2

from tests.server.identity_routes.people_desk import PASSWORD
from tests.server.server_desk import Desk

ORIGIN = "http://127.0.0.1:8642"
_TOKEN = re.compile(r'name="csrf" value="([^"]+)"')


@dataclass
class Browser:
    desk: Desk
    origin: str = ORIGIN
    address: str = "127.0.0.1"
    cookies: dict[str, str] = field(default_factory=dict)

    async def get(self, path: str, **headers: str) -> httpx2.Response:
        return await self._send("GET", path, None, {"sec-fetch-site": "none"} | _named(headers))

    async def post(self, path: str, fields: dict[str, object], **headers: str) -> httpx2.Response:
        usual = {"origin": self.origin, "sec-fetch-site": "same-origin"}
        return await self._send("POST", path, fields, usual | _named(headers))

    async def submit(self, path: str, **fields: object) -> httpx2.Response:
        """Send a form with the session's token."""
        return await self.post(path, {"csrf": await self.token(), **fields})

    async def token(self) -> str:
        found = _TOKEN.search((await self.get("/account")).text)
        assert found is not None, "no form token on the page"
        return found[1]

    async def sign_in(self, name: str, password: str = PASSWORD, **more: str) -> httpx2.Response:
        return await self.post("/sign-in", {"name": name, "password": password, **more})

    async def _send(
        self, method: str, path: str, fields: dict[str, object] | None, headers: dict[str, str]
    ) -> httpx2.Response:
        transport = httpx2.ASGITransport(
            app=self.desk.app, raise_app_exceptions=False, client=(self.address, 1)
        )
        headers = {"accept": "text/html", **headers}
        if self.cookies:
            pairs = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
            headers.setdefault("cookie", pairs)
        async with httpx2.AsyncClient(transport=transport, base_url=self.origin) as client:
            answer = await client.request(method, path, data=fields, headers=headers)
        for header in answer.headers.get_list("set-cookie"):
            name, _, rest = header.partition("=")
            value = rest.partition(";")[0]
            self.cookies.pop(name, None)
            if value not in ("", '""'):
                self.cookies[name] = value
        return answer


def _named(headers: dict[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in headers.items()}
