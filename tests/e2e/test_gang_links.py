"""Gangs over each link, end to end: a server and two real agents on machines of their own, joined by one bridge."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.test_gangs import PATIENCE_S, TALK, Site
from tests.tools.processes import eventually

HOSTS = ("first", "second")
LINKS = {"direct": ("--trusted-link",), "wireguard": ()}


@pytest.fixture(params=LINKS)
def site(
    request: pytest.FixtureRequest, tmp_path: Path, require: Callable[[str], None]
) -> Iterator[tuple[Site, str]]:
    link = str(request.param)
    for component in ("network namespaces", "bubblewrap"):
        require(component)
    if link == "wireguard":
        require("wireguard")
    made = Site(tmp_path, None)
    with contextlib.ExitStack() as stack:
        stack.callback(made.clear)
        made.lay()
        stack.callback(made.pool.stop)
        made.pool.start(agents=())
        for name in HOSTS:
            within = ("nsenter", f"--net=/run/netns/{made.space(name)}")
            flags = ("--site", "lab", "--address", made.address(name), *LINKS[link])
            made.pool.joining(name, *flags, within=within)
        eventually("both are online", lambda: set(HOSTS) <= set(made.pool.online()), PATIENCE_S)
        yield made, link


@pytest.mark.slow
def test_members_of_a_gang_meet_over_the_link_their_owners_chose(site: tuple[Site, str]) -> None:
    made, link = site
    outside = (f"{made.network}.1", made.address("first"), made.address("second"))
    wanted = {
        "command": ["python", "-c", TALK, *outside],
        "env": {"PORT": str(made.pool.port)},
        "nodes": 2,
    }
    task = made.pool.ask("POST", "/v1/tasks", wanted).json()["ids"][0]
    assert made.ended(task)["status"] == "succeeded", made.printed(task)
    said = made.printed(task)
    assert "heard from rank 1" in said
    assert "reached" not in said
    for address in outside:
        assert f"[1] nothing at {address}" in said
    for name in HOSTS:
        log = (made.pool.directory / f"{name}.log").read_text()
        assert "members=2" in log
        assert f"link={link}" in log
