"""The lanes' name server, on loopback, against upstream servers that are honest, silent, lying or short of room."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from gpool.agent.network import dns_messages
from gpool.agent.network.dns_resolver import (
    BURST,
    MAX_STREAMS,
    Allowance,
    Names,
    Resolver,
    Server,
    configured_servers,
)
from gpool.agent.network.firewall_rules import RefusedConnection
from gpool.agent.network.policy import is_refused
from gpool.agent.network.sandbox_network import MOST_REPORTED, OpenSandboxNetwork
from gpool.agent.runtime.protocol import SandboxNetwork
from tests.tools.processes import PATIENCE_S

T = TypeVar("T")
PUBLIC, INSIDE = IPv4Address("11.22.33.44"), IPv4Address("192.168.77.20")
Reply = Callable[[bytes], Sequence[bytes]]


def within(work: Callable[[], Awaitable[T]]) -> T:
    """Under asyncio's own loop and under the one agents use."""

    async def patient() -> T:
        async with asyncio.timeout(PATIENCE_S):
            return await work()

    asyncio.run(patient())
    return uvloop.run(patient())


def answer(message: bytes, *addresses: IPv4Address, flags: int = 0, number: int = 0) -> bytes:
    """As an upstream server writes it."""
    question = dns_messages.read_question(message)
    said = dns_messages.write_answer(question, dns_messages.NO_ERROR, addresses, 60)
    head = struct.pack("!HH", question.number ^ number, dns_messages.RESPONSE | flags)
    return head + said[4:]


class Upstream(asyncio.DatagramProtocol):
    """A name server that replies what it is told to."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.asked: list[str] = []
        self.transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self.asked.append(dns_messages.read_question(data).name)
        for each in self.reply(data):
            assert self.transport is not None
            self.transport.sendto(each, addr)


@contextlib.asynccontextmanager
async def upstream(reply: Reply) -> AsyncIterator[tuple[Upstream, Server]]:
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(
        lambda: Upstream(reply), local_addr=("127.0.0.1", 0)
    )
    yield server, transport.get_extra_info("sockname")
    transport.close()


@contextlib.asynccontextmanager
async def resolver(*servers: Server, **changed: Any) -> AsyncIterator[Resolver]:
    changed = {"within_s": PATIENCE_S, **changed}
    names = Names(lambda a: not is_refused(a), 20, servers, **changed)
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.bind(("127.0.0.1", 0))
    streams = socket.create_server(("127.0.0.1", 0))
    made = Resolver(datagrams, streams, names)
    made.start()
    yield made
    made.close()


async def ask(made: Resolver, name: str, kind: int = dns_messages.A) -> bytes:
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.setblocking(False)
        asking.connect(made.datagrams.getsockname())
        labels = b"".join(bytes((len(p),)) + p.encode() for p in name.split("."))
        head = dns_messages.HEADER.pack(7, dns_messages.WANTED, 1, 0, 0, 0)
        await loop.sock_sendall(asking, head + labels + b"\0" + struct.pack("!HH", kind, 1))
        return await loop.sock_recv(asking, 4096)


def read(message: bytes, name: str) -> tuple[int, tuple[IPv4Address, ...]]:
    said = dns_messages.read_answer(message, 7, name)
    return said.code, said.addresses


def test_only_addresses_a_lane_may_reach_are_told() -> None:
    async def work() -> None:
        async with (
            upstream(lambda m: [answer(m, INSIDE, PUBLIC)]) as (_, server),
            resolver(server) as made,
        ):
            said = read(await ask(made, "a.example"), "a.example")
            assert said == (dns_messages.NO_ERROR, (PUBLIC,))
            assert made.tally.stripped == 1

    within(work)


def test_a_name_inside_looks_like_one_that_is_not_there() -> None:
    async def work() -> None:
        async with (
            upstream(lambda m: [answer(m, INSIDE)]) as (_, server),
            resolver(server) as made,
            upstream(lambda m: [answer(m, flags=dns_messages.NO_NAME)]) as (_, other),
            resolver(other) as absent,
        ):
            assert await ask(made, "a.example") == await ask(absent, "a.example")

    within(work)


def test_a_task_is_told_of_five_names_that_did_not_resolve_and_of_the_number_of_others() -> None:
    """The control: a name that resolves gives no line. Names of refused addresses and absent names give the same line."""

    async def lines_of(reply: Reply, *names: str) -> list[str]:
        said: list[str] = []
        async with upstream(reply) as (_, server), resolver(server) as made:
            opened = OpenSandboxNetwork(
                SandboxNetwork((), "127.0.0.53"), made, nothing, no_connections
            )
            opened.report_to(said.append)
            for name in names:
                await ask(made, name)
            await opened.close()
        return said

    async def work() -> None:
        assert await lines_of(lambda m: [answer(m, PUBLIC)], "a.example") == []
        inside = await lines_of(lambda m: [answer(m, INSIDE)], "a.example", "a.example")
        absent = await lines_of(
            lambda m: [answer(m, flags=dns_messages.NO_NAME)], "a.example", "a.example"
        )
        assert inside == absent
        assert [line.partition(";")[0] for line in inside] == [
            "the name 'a.example' has no address that may be reached, or does not exist"
        ]
        many = await lines_of(
            lambda m: [answer(m, INSIDE)], *(f"n{number}.example" for number in range(9))
        )
        assert len(many) == MOST_REPORTED + 1
        assert many[-1] == "4 further lookups or connections were refused"

    within(work)


async def nothing() -> None: ...


async def no_connections() -> list[RefusedConnection]:
    return []


def test_a_silent_server_is_passed_over_and_nobody_waits_behind_it() -> None:
    async def work() -> None:
        async with (
            upstream(lambda m: []) as (silent, first),
            upstream(lambda m: [answer(m, PUBLIC)]) as (_, second),
            resolver(first, *[second] * 3, within_s=1.0) as made,  # any of them may come too late
        ):
            slow = asyncio.create_task(ask(made, "slow.example"))
            ticks = 0
            while not slow.done():
                await asyncio.sleep(0)
                ticks += 1
            assert read(await slow, "slow.example") == (dns_messages.NO_ERROR, (PUBLIC,))
            assert silent.asked == ["slow.example"]
            assert ticks > 100  # the loop went round meanwhile

    within(work)


def test_when_no_server_answers_the_lane_is_told_so() -> None:
    async def work() -> None:
        async with upstream(lambda m: []) as (_, first), resolver(first, within_s=0.1) as made:
            assert read(await ask(made, "a.example"), "a.example") == (
                dns_messages.SERVER_FAILURE,
                (),
            )

    within(work)


def test_an_answer_with_another_number_or_name_is_passed_over() -> None:
    def replies(message: bytes) -> list[bytes]:
        other = message.replace(b"\x01a", b"\x01b")
        forged = IPv4Address("66.66.66.66")
        return [
            b"",
            b"\0" * 12,
            answer(message, forged, number=1),
            answer(other, forged),
            answer(message, PUBLIC),
        ]

    async def work() -> None:
        async with upstream(replies) as (_, server), resolver(server) as made:
            assert read(await ask(made, "a.example"), "a.example") == (
                dns_messages.NO_ERROR,
                (PUBLIC,),
            )

    within(work)


def test_an_answer_cut_short_is_asked_again_by_tcp() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        (length,) = struct.unpack("!H", await reader.readexactly(2))
        said = answer(await reader.readexactly(length), PUBLIC)
        writer.write(struct.pack("!H", len(said)) + said)
        await writer.drain()
        writer.close()

    async def work() -> None:
        async with upstream(lambda m: [answer(m, flags=dns_messages.TRUNCATED)]) as (_, server):
            streams = await asyncio.start_server(serve, *server)
            async with streams, resolver(server) as made:
                assert read(await ask(made, "a.example"), "a.example") == (
                    dns_messages.NO_ERROR,
                    (PUBLIC,),
                )

    within(work)


def test_fixed_names_are_answered_and_no_other_ever_goes_upstream() -> None:
    private = IPv4Address("10.9.9.9")

    async def work() -> None:
        async with upstream(lambda m: [answer(m, PUBLIC)]) as (server, at):
            names = Names(
                lambda a: a == private, 20, (at,), {"index.example": (private, PUBLIC)}, asks=False
            )
            async with resolver(at) as made:
                made.names = names
                said = read(await ask(made, "index.example"), "index.example")
                assert said == (dns_messages.NO_ERROR, (private,))
                assert read(await ask(made, "x.example"), "x.example") == (dns_messages.NO_NAME, ())
            assert server.asked == []

    within(work)


def test_only_addresses_are_asked_for_upstream() -> None:
    async def work() -> None:
        async with (
            upstream(lambda m: [answer(m, PUBLIC)]) as (server, at),
            resolver(at) as made,
        ):
            for kind in (dns_messages.AAAA, 16, 10, 65, 255):
                said = await ask(made, "a.example", kind)
                assert dns_messages.HEADER.unpack_from(said)[3] == 0
            assert server.asked == []

    within(work)


def test_a_lane_that_asks_too_much_is_refused() -> None:
    async def work() -> None:
        async with (
            upstream(lambda m: [answer(m, PUBLIC)]) as (server, at),
            resolver(at) as made,
        ):
            loop = asyncio.get_running_loop()
            began = loop.time()
            codes: list[int] = []
            while codes.count(dns_messages.REFUSED) < 100:
                name = f"n{len(codes)}.example"
                codes.append(read(await ask(made, name), name)[0])
            assert len(server.asked) == codes.count(dns_messages.NO_ERROR)
            assert len(server.asked) <= 20 * (BURST + loop.time() - began)

    within(work)


def test_names_that_carry_data_run_out_sooner() -> None:
    """The control is the same number of plain names, all answered."""

    async def work() -> int:
        async with (
            upstream(lambda m: [answer(m, PUBLIC)]) as (_, at),
            resolver(at) as plain,
            resolver(at) as tunnel,
        ):
            data = "mzxw6ytboi4dkmrrgq2tmnzyha3tqojq"
            asked = 0
            while tunnel.tally.refused < 20:
                await ask(plain, f"n{asked}.example")
                await ask(tunnel, f"{asked}{data}.example")
                asked += 1
            return plain.tally.refused

    assert within(work) == 0


def test_idle_streams_never_keep_others_out_for_long() -> None:
    async def work() -> None:
        async with resolver() as made:
            at = made.streams.getsockname()
            idle = [await asyncio.open_connection(*at) for _ in range(MAX_STREAMS)]
            reader, writer = await asyncio.open_connection(*at)
            assert await reader.read() == b""  # closed at once, not queued
            for _, each in [*idle, (reader, writer)]:
                each.close()

    within(work)


def test_rubbish_gets_no_answer_and_does_no_harm() -> None:
    async def work() -> None:
        async with upstream(lambda m: [answer(m, PUBLIC)]) as (_, at), resolver(at) as made:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sending:
                for rubbish in (b"", b"x", b"\xff" * 600, b"\0" * 5000):
                    sending.sendto(rubbish, made.datagrams.getsockname())
            assert read(await ask(made, "a.example"), "a.example") == (
                dns_messages.NO_ERROR,
                (PUBLIC,),
            )
            assert made.tally.refused == 4

    within(work)


def test_a_flood_is_not_even_listened_to_for_long() -> None:
    """2,000 messages at once, then 200 a second: whatever more comes waits in the kernel, which drops it."""

    async def work() -> None:
        async with resolver() as made:
            loop = asyncio.get_running_loop()
            until = loop.time() + 0.5
            sent = 0
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sending:
                while loop.time() < until or sent < 5000:
                    for _ in range(50):
                        sending.sendto(b"x", made.datagrams.getsockname())
                    sent += 50
                    await asyncio.sleep(0)
            took_s = loop.time() - until + 0.5
            assert made.tally.refused <= 2000 + 200 * took_s + 1

    within(work)


def test_an_allowance_fills_with_time_and_no_further_than_its_brim() -> None:
    some = Allowance(per_s=2, most=4, now=0)
    assert [some.take(1, 0) for _ in range(5)] == [True, True, True, True, False]
    assert [some.take(1, 1) for _ in range(3)] == [True, True, False]
    assert [some.take(1, 1000) for _ in range(5)] == [True, True, True, True, False]


def test_the_hosts_servers_are_read(tmp_path: Path) -> None:
    file = tmp_path / "resolv.conf"
    file.write_text("# mine\nsearch lan\nnameserver 192.168.1.1\nnameserver fd00::1\noptions x\n")
    assert configured_servers(file) == (("192.168.1.1", 53), ("fd00::1", 53))
    assert configured_servers(tmp_path / "none") == ()
