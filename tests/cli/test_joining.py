"""Join links and a node's identity on disk."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest

from gpool import Invalid
from gpool.cli.joining import enrol, identity_file, load_identity, parse_link
from gpool.cli.terms import Terms, agent_variables
from gpool.client.door import Door
from gpool.core.errors import Conflict


class Desk(httpx2.BaseTransport):
    """Answers `POST /v1/nodes` once for each name."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        name = httpx2.Response(200, content=request.read()).json()["name"]
        if name in self.names:
            return httpx2.Response(409, json={"code": "conflict", "detail": "the name is taken"})
        self.names.append(name)
        return httpx2.Response(
            201, json={"id": "n-0000000000001", "name": name, "secret": "gpn_secret"}
        )


def test_a_link_is_taken_apart() -> None:
    link = parse_link("gpool://pool.example:8642/join/gpi_a-b_c")
    assert (link.url, link.token) == ("http://pool.example:8642", "gpi_a-b_c")
    assert "gpi_a" not in repr(link)


@pytest.mark.parametrize(
    "text", ["", "gpool://h/x/y", "http://h/join/t", "gpool:///join/t", "gpool://h/join/"]
)
def test_what_is_no_link_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(Invalid, match="gpool node invite"):
        parse_link(text)


def test_an_identity_is_kept_and_found_again(tmp_path: Path) -> None:
    file = identity_file(tmp_path, "http://pool.example:8642")
    assert load_identity(file) is None
    door = Door("http://pool.example:8642", "", Desk())
    made = enrol(door, file, name="first", token="t")
    assert load_identity(file) == made
    assert made.secret_file.read_text() == "gpn_secret"
    assert made.secret_file.stat().st_mode & 0o777 == 0o600
    told = agent_variables(made, made.url, tmp_path / "d", Terms(2, "H100"))
    assert "gpn_secret" not in str(told)


def test_a_taken_host_name_gets_a_number_and_a_chosen_one_does_not(tmp_path: Path) -> None:
    desk = Desk()
    door = Door("http://pool.example:8642", "", desk)
    enrol(door, tmp_path / "a.json", name=None, token=None)
    second = enrol(door, tmp_path / "b.json", name=None, token=None)
    assert second.name.endswith("-2")
    with pytest.raises(Conflict):
        enrol(door, tmp_path / "c.json", name=desk.names[0], token=None)
