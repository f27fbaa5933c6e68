"""Join links and a node's identity on disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gpool import Invalid
from gpool.cli.lending.join import (
    LendingTerms,
    agent_variables,
    enrol,
    identity_file,
    load_identity,
    parse_link,
    rejoin,
    require_same_certificate,
)
from gpool.client.transport import ApiTransport
from gpool.core.errors import Conflict, Forbidden
from gpool.transfer.requests import Address
from tests.server.server_desk import Live, serving

PRINT = "a" * 64


class Desk(httpx2.BaseTransport):
    """Answers `POST /v1/nodes` once for each name."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.asked: list[dict[str, Any]] = []
        self.nonces = 0

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/v1/nodes/challenges":
            self.nonces += 1
            answer = {"nonce": f"nonce-{self.nonces}", "server": "pool-x", "expires_in_s": 30}
            return httpx2.Response(200, json=answer)
        asked = httpx2.Response(200, content=request.read()).json()
        self.asked.append(asked)
        name = asked["name"]
        if name in self.names:
            return httpx2.Response(409, json={"code": "conflict", "detail": "the name is taken"})
        self.names.append(name)
        return httpx2.Response(
            201, json={"id": "n-0000000000001", "name": name, "server": "pool-x"}
        )


def test_a_join_link_is_parsed() -> None:
    link = parse_link(f"gpool://pool.example:8642/join/gpi_a-b_c#sha256={PRINT}")
    assert (link.address, link.token) == (Address("https://pool.example:8642", PRINT), "gpi_a-b_c")
    assert "gpi_a" not in repr(link)


@pytest.mark.parametrize(
    ("link", "plain", "url"),
    [
        ("gpool://127.0.0.1:8642/join/t", False, "http://127.0.0.1:8642"),
        ("gpool://127.0.0.1:8642/join/t#tls", False, "https://127.0.0.1:8642"),
        ("gpool://localhost:1/join/t", False, "http://localhost:1"),
        ("gpool://[::1]:1/join/t", False, "http://[::1]:1"),
        ("gpool://10.0.0.7:8642/join/t", False, "https://10.0.0.7:8642"),
        ("gpool://10.0.0.7:8642/join/t", True, "http://10.0.0.7:8642"),
        ("gpool://pool.example/join/t#tls", True, "https://pool.example"),
        (f"gpool://pool.example/join/t#sha256={PRINT}", True, "https://pool.example"),
    ],
)
def test_beyond_loopback_only_the_owner_can_disable_encryption(
    link: str, plain: bool, url: str
) -> None:
    assert parse_link(link, plain=plain).address.url == url


def test_a_link_with_half_a_fingerprint_is_refused() -> None:
    with pytest.raises(Invalid, match="64 hexadecimal digits"):
        parse_link(f"gpool://pool.example:8642/join/t#sha256={PRINT[:32]}")


@pytest.mark.parametrize(
    "text", ["", "gpool://h/x/y", "http://h/join/t", "gpool:///join/t", "gpool://h/join/"]
)
def test_a_malformed_link_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(Invalid, match="gpool node invite"):
        parse_link(text)


def test_an_identity_is_saved_and_loaded(tmp_path: Path) -> None:
    file = identity_file(tmp_path, "http://pool.example:8642")
    assert load_identity(file) is None
    api = ApiTransport("http://pool.example:8642", "", Desk())
    made = enrol(api, file, name="first", token="t")
    assert load_identity(file) == made
    assert made.key_file.stat().st_mode & 0o777 == 0o600
    told = agent_variables(made, tmp_path / "d", LendingTerms(2, "H100"))
    assert made.key_file.read_text().strip() not in str(told)


def test_each_attempt_to_join_has_a_new_challenge_and_the_same_key(tmp_path: Path) -> None:
    desk = Desk()
    desk.names.append("taken")
    api = ApiTransport("http://pool.example:8642", "", desk)
    with pytest.raises(Conflict):
        enrol(api, tmp_path / "a.json", name="taken", token="t")
    enrol(api, tmp_path / "a.json", name="free", token="t")
    first, second = desk.asked
    assert first["public_key"] == second["public_key"]
    assert first["proof"]["nonce"] != second["proof"]["nonce"]


def test_a_node_without_a_key_joins_again(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"url": "http://127.0.0.1:1", "id": "n-0000000000001", "name": "old"}')
    assert load_identity(file) is None


def test_a_link_with_another_certificate_is_refused(tmp_path: Path) -> None:
    known, linked = Address("https://a", PRINT), Address("https://a", "b" * 64)
    with pytest.raises(Forbidden, match="another certificate"):
        require_same_certificate(known, linked, tmp_path)
    require_same_certificate(known, known, tmp_path)


def test_a_host_name_in_use_gets_a_number_and_a_chosen_name_does_not(tmp_path: Path) -> None:
    desk = Desk()
    api = ApiTransport("http://pool.example:8642", "", desk)
    enrol(api, tmp_path / "a.json", name=None, token=None)
    second = enrol(api, tmp_path / "b.json", name=None, token=None)
    assert second.name.endswith("-2")
    with pytest.raises(Conflict):
        enrol(api, tmp_path / "c.json", name=desk.names[0], token=None)


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    with serving(tmp_path / "server") as live:
        yield live


def invited(live: Live, key: str = "") -> str:
    api = ApiTransport(live.url, key or live.key)
    token: str = api.send_json("POST", "/v1/nodes/invites", {})["token"]
    api.close()
    return token


def test_a_removed_node_joins_again_with_a_new_link(
    live: Live, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, api = tmp_path / "a.json", ApiTransport(live.url, "")
    used = invited(live)
    first = rejoin(api, file, None, name="box", token=used)
    assert rejoin(api, file, load_identity(file), name=None, token=used) == first
    assert "Already a node" in capsys.readouterr().err
    operator = ApiTransport(live.url, live.key)
    operator.send("DELETE", f"/v1/nodes/{first.id}")
    with pytest.raises(Forbidden, match="used already"):
        rejoin(api, file, first, name=None, token=used)
    again = rejoin(api, file, load_identity(file), name="box", token=invited(live))
    assert again.id != first.id
    assert load_identity(file) == again
    assert f"{first.id}) was removed" in capsys.readouterr().err
    known = operator.get_json("/v1/nodes")["items"]
    assert [node["id"] for node in known] == [again.id]
    api.close()
    operator.close()


def test_a_link_of_somebody_else_is_not_used_and_the_owner_is_named(
    live: Live, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, api = tmp_path / "a.json", ApiTransport(live.url, "")
    first = rejoin(api, file, None, name="box", token=invited(live))
    account = {"name": "bob", "password": "correct horse battery staple"}
    api.send_json("POST", "/v1/users", account)
    bob: str = api.send_json("POST", "/v1/auth/password", account)["access_token"]
    token = invited(live, bob)
    assert rejoin(api, file, first, name="other", token=token) == first
    said = capsys.readouterr().err
    assert "the node 'box' of operator" in said
    assert "was not used" in said
    second = rejoin(api, tmp_path / "b.json", None, name="spare", token=token)  # still good
    assert second.id != first.id
    api.close()
