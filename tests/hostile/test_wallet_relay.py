"""A hostile pool passes on the nonce of an honest one, to be signed in there as its own user (finding 3)."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import pytest
from click.testing import CliRunner, Result

from gpool.cli.main import cli
from gpool.wallet import signin
from gpool.wallet.moments import Moment
from gpool.wallet.signing import WalletKey
from tests.server.server_desk import Live, serving

KEY = WalletKey((11).to_bytes(32, "big"))
EXCHANGE = {"domain": "app.exchange.example", "uri": "https://app.exchange.example"}


@dataclass
class Relay:
    """Server that answers sign-ins with the honest pool's nonces, and posts what it is sent to the honest pool."""

    honest: str
    url: str = ""
    named: dict[str, str] = field(default_factory=dict)  # members of the challenge it replaces
    received: list[dict[str, Any]] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)

    def challenge(self, asked: Any) -> dict[str, Any]:
        found = httpx2.post(f"{self.honest}/v1/auth/wallet/nonce", json=asked).json()
        return {**found, **self.named}

    def passed_on(self, signed: dict[str, Any]) -> httpx2.Response:
        self.received.append(signed)
        answer = httpx2.post(f"{self.honest}/v1/auth/wallet", json=signed)
        self.answers.append(answer.status_code)
        return answer


@contextmanager
def relaying(honest: str) -> Iterator[Relay]:
    relay = Relay(honest)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers.get("content-length", "0"))
            document = json.loads(self.rfile.read(length) or b"{}")
            if self.path == "/v1/auth/wallet/nonce":
                status, content = 200, json.dumps(relay.challenge(document)).encode()
            else:
                answer = relay.passed_on(document)
                status, content = answer.status_code, answer.content
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    relay.url = f"http://127.0.0.1:{listening.server_address[1]}"
    worker = threading.Thread(target=listening.serve_forever)
    worker.start()
    try:
        yield relay
    finally:
        listening.shutdown()
        worker.join()
        listening.server_close()


@pytest.fixture
def honest(tmp_path: Path) -> Iterator[Live]:
    with serving(tmp_path / "data") as live:
        yield live


@pytest.fixture
def relay(honest: Live) -> Iterator[Relay]:
    with relaying(honest.url) as found:
        yield found


def login(url: str, folder: Path) -> Result:
    file = folder / "wallet.key"
    file.write_text((11).to_bytes(32, "big").hex())
    file.chmod(0o600)
    home = {"GPOOL_HOME": str(folder / "home"), "GPOOL_KEY": "", "GPOOL_URL": url}
    return CliRunner().invoke(cli, ["login", "--wallet-key", str(file)], env=home)


def test_the_command_line_signs_for_the_server_it_dialled_only(
    honest: Live, relay: Relay, tmp_path: Path
) -> None:
    result = login(relay.url, tmp_path)
    assert result.exit_code == 3, result.output
    assert "nothing was signed" in result.output
    assert honest.url in result.output
    assert relay.received == []
    # The control: a client that signs what it is told signs the relay in at the honest pool.
    signed = relay.passed_on(obedient(relay)).json()
    me = httpx2.get(
        f"{honest.url}/v1/me", headers={"authorization": f"Bearer {signed['access_token']}"}
    )
    assert me.json()["wallets"] == [KEY.address]


def test_a_message_in_the_relays_own_name_is_worth_nothing_at_the_honest_pool(
    relay: Relay, tmp_path: Path
) -> None:
    relay.named = {"domain": relay.url.removeprefix("http://"), "uri": relay.url}
    result = login(relay.url, tmp_path)
    assert "wants you to sign in with your Ethereum account" in result.output  # shown, then signed
    assert relay.answers == [401]
    assert result.exit_code == 3


@pytest.mark.parametrize("named", [EXCHANGE, {"domain": EXCHANGE["domain"]}, {"uri": "https://a"}])
def test_no_other_site_gets_a_signature(
    relay: Relay, tmp_path: Path, named: dict[str, str]
) -> None:
    relay.named = {"domain": relay.url.removeprefix("http://"), "uri": relay.url, **named}
    result = login(relay.url, tmp_path)
    assert (result.exit_code, relay.received) == (3, [])


def test_the_same_verb_signs_in_at_the_honest_pool(honest: Live, tmp_path: Path) -> None:
    result = login(honest.url, tmp_path)
    assert result.exit_code == 0, result.output
    assert f"URI: {honest.url}" in result.output


def obedient(relay: Relay) -> dict[str, str]:
    """Message with domain and URI as the server says them: the client before the finding."""
    told = httpx2.post(f"{relay.url}/v1/auth/wallet/nonce", json={}).json()
    text = signin.format(
        signin.SignIn(
            domain=told["domain"],
            address=KEY.address,
            uri=told["uri"],
            chain_id=told["chain_id"],
            nonce=told["nonce"],
            statement=signin.statement_of(signin.WalletPurpose.SIGN_IN),
            issued_at=Moment(told["issued_at"]),
        )
    )
    return {"message": text, "signature": str(KEY.sign(text.encode()))}
