"""Join links and a node's identity on disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gpool import Invalid
from gpool.cli.lending.join import (
    JoinLink,
    agent_variables,
    enrol,
    identity_file,
    load_identity,
    parse_link,
    rejoin,
    require_same_certificate,
)
from gpool.cli.lending.terms import LendingTerms
from gpool.client.transport import ApiTransport
from gpool.core.errors import Conflict, Forbidden
from gpool.transfer.requests import Address
from tests.server.server_desk import Live, serving

PRINT = "a" * 64
LINK = JoinLink(Address("http://pool.example:8642"), "t", "pool-x")


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
    link = parse_link(f"gpool://pool.example:8642/join/gpi_a-b_c/pool-x#sha256={PRINT}")
    assert link == JoinLink(Address("https://pool.example:8642", PRINT), "gpi_a-b_c", "pool-x")
    assert "gpi_a" not in repr(link)


@pytest.mark.parametrize(
    ("link", "plain", "url"),
    [
        ("gpool://127.0.0.1:8642/join/t/pool-x", False, "http://127.0.0.1:8642"),
        ("gpool://127.0.0.1:8642/join/t/pool-x#tls", False, "https://127.0.0.1:8642"),
        ("gpool://localhost:1/join/t/pool-x", False, "http://localhost:1"),
        ("gpool://[::1]:1/join/t/pool-x", False, "http://[::1]:1"),
        ("gpool://10.0.0.7:8642/join/t/pool-x", False, "https://10.0.0.7:8642"),
        ("gpool://10.0.0.7:8642/join/t/pool-x", True, "http://10.0.0.7:8642"),
        ("gpool://pool.example/join/t/pool-x#tls", True, "https://pool.example"),
        (f"gpool://pool.example/join/t/pool-x#sha256={PRINT}", True, "https://pool.example"),
    ],
)
def test_beyond_loopback_only_the_owner_can_disable_encryption(
    link: str, plain: bool, url: str
) -> None:
    assert parse_link(link, plain=plain).address.url == url


def test_a_link_with_half_a_fingerprint_is_refused() -> None:
    with pytest.raises(Invalid, match="64 hexadecimal digits"):
        parse_link(f"gpool://pool.example:8642/join/t/pool-x#sha256={PRINT[:32]}")


@pytest.mark.parametrize(
    "text",
    ["", "gpool://h/x/y", "http://h/join/t/pool-x", "gpool:///join/t/pool-x", "gpool://h/join/"],
)
def test_a_malformed_link_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(Invalid, match="gpool node invite"):
        parse_link(text)


def test_a_link_that_names_no_pool_enrols_no_machine(tmp_path: Path) -> None:
    """A machine that has joined may still be started with its old link."""
    link = parse_link("gpool://pool.example:8642/join/gpi_t#tls")
    desk = Desk()
    with pytest.raises(Invalid, match="names no pool"):
        enrol(ApiTransport(link.address, "", desk), tmp_path / "a.json", name="x", link=link)
    assert (desk.nonces, desk.asked) == (0, [])


def test_a_proof_is_signed_for_the_pool_of_the_link_only(tmp_path: Path) -> None:
    """Finding 3: the client signed for whatever pool the challenge named."""
    desk = Desk()
    api = ApiTransport("http://pool.example:8642", "", desk)
    other = JoinLink(LINK.address, "t", "pool-y")
    with pytest.raises(Forbidden, match="the link is for pool-y"):
        enrol(api, tmp_path / "a.json", name="first", link=other)
    assert (desk.nonces, desk.asked) == (1, [])  # no signature left this machine
    assert not (tmp_path / "a.json").exists()
    assert enrol(api, tmp_path / "a.json", name="first", link=LINK).server == "pool-x"  # control


def test_an_identity_is_saved_and_loaded(tmp_path: Path) -> None:
    file = identity_file(tmp_path, "http://pool.example:8642")
    assert load_identity(file) is None
    api = ApiTransport("http://pool.example:8642", "", Desk())
    made = enrol(api, file, name="first", link=LINK)
    assert load_identity(file) == made
    assert made.key_file.stat().st_mode & 0o777 == 0o600
    told = agent_variables(made, tmp_path / "d", LendingTerms(2, "H100"))
    assert made.key_file.read_text().strip() not in str(told)


def test_each_attempt_to_join_has_a_new_challenge_and_the_same_key(tmp_path: Path) -> None:
    desk = Desk()
    desk.names.append("taken")
    api = ApiTransport("http://pool.example:8642", "", desk)
    with pytest.raises(Conflict):
        enrol(api, tmp_path / "a.json", name="taken", link=LINK)
    enrol(api, tmp_path / "a.json", name="free", link=LINK)
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
    enrol(api, tmp_path / "a.json", name=None)
    second = enrol(api, tmp_path / "b.json", name=None)
    assert second.name.endswith("-2")
    with pytest.raises(Conflict):
        enrol(api, tmp_path / "c.json", name=desk.names[0])


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    with serving(tmp_path / "server") as live:
        yield live


def invited(live: Live, key: str = "") -> JoinLink:
    api = ApiTransport(live.url, key or live.key)
    made = api.send_json("POST", "/v1/nodes/invites", {})
    api.close()
    return parse_link(made["link"], plain=True)


def test_a_removed_node_joins_again_with_a_new_link(
    live: Live, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, api = tmp_path / "a.json", ApiTransport(live.url, "")
    used = invited(live)
    first = rejoin(api, file, None, name="box", link=used)
    assert rejoin(api, file, load_identity(file), name=None, link=used) == first
    assert "Already a node" in capsys.readouterr().err
    operator = ApiTransport(live.url, live.key)
    operator.send("DELETE", f"/v1/nodes/{first.id}")
    with pytest.raises(Forbidden, match="used already"):
        rejoin(api, file, first, name=None, link=used)
    again = rejoin(api, file, load_identity(file), name="box", link=invited(live))
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
    first = rejoin(api, file, None, name="box", link=invited(live))
    account = {"name": "bob", "password": "correct horse battery staple"}
    api.send_json("POST", "/v1/users", account)
    bob: str = api.send_json("POST", "/v1/auth/password", account)["access_token"]
    link = invited(live, bob)
    assert rejoin(api, file, first, name="other", link=link) == first
    said = capsys.readouterr().err
    assert "the node 'box' of operator" in said
    assert "was not used" in said
    second = rejoin(api, tmp_path / "b.json", None, name="spare", link=link)  # still good
    assert second.id != first.id
    api.close()
