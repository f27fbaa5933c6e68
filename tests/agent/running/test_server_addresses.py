"""An agent with several server addresses: it goes elsewhere when one is away or asks it to, and its tasks go on."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gpool.agent.addresses import FIRST_DELAY_S, LONGEST_DELAY_S, ServerAddresses
from gpool.agent.app import run_agent
from gpool.agent.channel import AgentChannel, AgentCredentials, NodeIdentity
from gpool.agent.services import NodeServices
from gpool.agent.settings import AgentSettings
from gpool.core.errors import Forbidden
from gpool.core.model import Instant, Offer, TaskKind, TaskSpec
from gpool.server.clock import SystemClock
from gpool.server.identity.certificates import own
from gpool.testing.fake_runtime import FakeRun, FakeRuntime
from gpool.transfer.node_proofs import NodeKey
from gpool.transfer.requests import Address
from gpool.wire.frames import Hold, Lease, Refused, Started, Stop, StopReason
from tests.agent.desk import Desk, settings_for
from tests.tools.runtimes import PATIENCE_S

URLS = ("https://a.example", "https://b.example", "https://c.example")


def addresses(count: int, seed: int = 1) -> ServerAddresses:
    return ServerAddresses([Address(url) for url in URLS[:count]], Random(seed))


# ---- the choice of an address


@given(st.integers(0, 1000), st.integers(1, 3))
def test_each_address_is_tried_before_one_is_tried_again(seed: int, count: int) -> None:
    tried, now_s, servers = [], 0.0, addresses(count, seed)
    for _ in range(count):
        tried.append(servers.current.url)
        pause_s = servers.failed(now_s)
        assert FIRST_DELAY_S / 2 <= pause_s <= FIRST_DELAY_S * 2
        now_s += pause_s
    assert sorted(tried) == list(URLS[:count])


@given(st.integers(0, 1000))
def test_an_address_is_not_asked_before_its_retry_after_and_the_others_are(seed: int) -> None:
    servers, now_s = addresses(3, seed), 0.0
    away = servers.current.url
    now_s += servers.failed(now_s, 20.0)
    others: set[str] = set()
    while servers.current.url != away:
        others.add(servers.current.url)
        now_s += servers.failed(now_s)
    assert now_s >= 20.0
    assert others == set(URLS) - {away}


@given(st.integers(0, 1000))
def test_pauses_double_up_to_a_limit_and_begin_anew_after_a_connection(seed: int) -> None:
    servers, now_s, pauses = addresses(1, seed), 0.0, []
    for _ in range(12):
        pauses.append(servers.failed(now_s))
        now_s += pauses[-1]
    assert max(pauses) <= LONGEST_DELAY_S
    assert pauses[-1] >= LONGEST_DELAY_S / 2
    servers.connected()
    assert servers.failed(now_s) <= FIRST_DELAY_S


def test_agents_begin_with_any_of_the_addresses() -> None:
    assert {addresses(3, seed).current.url for seed in range(50)} == set(URLS)


def test_a_recommended_address_is_used_only_if_the_owner_named_it() -> None:
    servers = addresses(3)
    assert not servers.moved("https://evil.example")
    assert servers.moved("https://b.example/")
    assert servers.current.url == "https://b.example"


# ---- the setting


@pytest.mark.parametrize("text", ["", " , ", "pool.example:8642", "https://a.example,ftp://b"])
def test_a_list_with_something_else_than_addresses_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="https://HOST:PORT"):
        settings(text, tmp_path)


def test_a_list_of_addresses_has_one_fingerprint(tmp_path: Path) -> None:
    made = settings("https://a.example, https://b.example,https://a.example", tmp_path)
    assert [each.url for each in made.addresses] == ["https://a.example", "https://b.example"]
    assert {each.fingerprint for each in made.addresses} == {"f" * 64}


def settings(urls: str, folder: Path) -> AgentSettings:
    return AgentSettings(
        server_url=urls,
        fingerprint="f" * 64,
        node="n-1",
        server_name="pool-x",
        key_file=folder / "key",
        data_dir=folder,
    )


# ---- a running agent


@contextlib.asynccontextmanager
async def agent_of(first: Desk, second: Desk, folder: Path) -> AsyncIterator[None]:
    values = folder / "values"
    values.mkdir()
    given_ = settings_for(first, folder)
    both = given_.model_copy(update={"server_url": f"{first.url},{second.url}"})
    stop, runtime = asyncio.Event(), FakeRuntime(values, {("wait",): FakeRun(waits=True)})
    running = asyncio.create_task(
        run_agent(
            both,
            NodeServices([runtime]),
            Offer(2000, 1 << 30, 1 << 30),
            stop=stop,
            random=Random(1),
        )
    )
    try:
        yield
    finally:
        stop.set()
        async with asyncio.timeout(PATIENCE_S):
            await running


async def connected(*desks: Desk) -> tuple[Desk, Desk]:
    """The desk that has the agent, and the other one."""
    waiting = [asyncio.create_task(desk.until(lambda desk=desk: desk.hellos)) for desk in desks]
    done, rest = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in rest:
        task.cancel()
    [index] = [number for number, task in enumerate(waiting) if task in done]
    return desks[index], desks[1 - index]


@pytest.mark.anyio
@pytest.mark.parametrize("cause", ["it ends", "it asks the agent to move"])
async def test_a_running_task_goes_on_when_the_agent_goes_to_another_server(
    cause: str, tmp_path: Path
) -> None:
    async with Desk() as left, Desk() as right, agent_of(left, right, tmp_path):
        here, there = await connected(left, right)
        spec = TaskSpec(TaskKind.COMMAND, "wait", command=("wait",))
        await here.grant(spec, [Lease(1, 1)])
        await here.until(lambda: Started(1, 1) in here.items)
        if cause == "it ends":
            await here.__aexit__()
        else:
            await here.say(Refused("unreachable", "move", retry=True, to=there.url))
        await there.until(lambda: there.hellos)
        assert there.hellos[0].holds == (Hold(1, 1),)
        assert not here.ends()
        await there.say(Stop((Hold(1, 1),), StopReason.CANCELLED))
        await there.until(lambda: 1 in there.ends())


@pytest.mark.anyio
async def test_another_certificate_at_every_address_ends_an_agent_that_never_connected(
    tmp_path: Path,
) -> None:
    """At one of them it does not: the next one may be the pool's."""
    made = own(tmp_path, ["localhost"], SystemClock().now())
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(made.file)
    other = await asyncio.start_server(lambda _, out: out.close(), "127.0.0.1", 0, ssl=context)
    async with other, Desk() as desk:
        [socket] = other.sockets
        pinned = Address(f"https://127.0.0.1:{socket.getsockname()[1]}", "0" * 64)
        with pytest.raises(Forbidden, match="certificate"):
            async with asyncio.timeout(PATIENCE_S):
                await channel([pinned]).run()
        running = asyncio.create_task(channel([pinned, Address(desk.url)]).run())
        async with asyncio.timeout(PATIENCE_S):
            await desk.until(lambda: desk.proofs)
        running.cancel()
        await asyncio.wait([running])


def channel(servers: list[Address]) -> AgentChannel:
    credentials = AgentCredentials(
        NodeKey(b"k" * 32), NodeIdentity("n-0000000000001", "pool"), lambda: Instant(0)
    )
    return AgentChannel(ServerAddresses(servers, Random(1)), credentials, lambda _: None)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
