"""120 URLs that try to reach services beside the server: none of them reaches a listening sink.

A control with the operator's permission shows that the sinks listen.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack

import pytest

from gpool.core.errors import GpoolError, Invalid
from gpool.server.events.settings import NoticeSettings
from gpool.server.outbound import checked, post_checked
from tests.server.events.events_desk import Receiver, receiving

pytestmark = pytest.mark.anyio
PORT = "PORT"

LOOPBACK_HOSTS = [
    "127.0.0.1",
    "127.1",
    "127.0.1",
    "127.255.255.254",
    "127.0.0.2",
    "2130706433",
    "017700000001",
    "0177.0.0.1",
    "0177.0.0.01",
    "0177.1",
    "0x7f000001",
    "0x7f.0.0.1",
    "0x7f.1",
    "0X7F000001",
    "0x7F.0x0.0x0.0x1",
    "127.0x1",
    "0",
    "0.0.0.0",
    "0x0",
    "00",
    "localhost",
    "LOCALHOST",
    "LocalHost",
    "localhost.",
    "[::1]",
    "[0:0:0:0:0:0:0:1]",
    "[::0001]",
    "[::]",
    "[::ffff:127.0.0.1]",
    "[::ffff:7f00:1]",
    "[0:0:0:0:0:ffff:127.0.0.1]",
    "[::127.0.0.1]",
    "[64:ff9b::127.0.0.1]",
    "[64:ff9b::7f00:1]",
    "[2002:7f00:1::]",
    "[2002:7f00:0001::1]",
    "[fe80::1]",
    "[fe80::1%25lo]",
    "[::1%25lo]",
    "[::1%lo]",
    "①②⑦.⓪.⓪.①",
    "127。0。0。1",
    "127.0.0.1%00.example.org",
    "127.0.0.1%2f",
    "%31%32%37.0.0.1",
]
PRIVATE_HOSTS = [
    "10.0.0.1",
    "10.255.255.255",
    "012.0.0.1",
    "0xa.0.0.1",
    "167772161",
    "172.16.0.1",
    "172.31.255.254",
    "2886729729",
    "192.168.0.1",
    "192.168.1.254",
    "0xc0a80001",
    "3232235521",
    "100.64.0.1",
    "100.127.255.254",
    "169.254.169.254",
    "169.254.169.253",
    "0xa9fea9fe",
    "2852039166",
    "0251.0376.0251.0376",
    "[fd00:ec2::254]",
    "[::ffff:169.254.169.254]",
    "[::ffff:a9fe:a9fe]",
    "[64:ff9b::a9fe:a9fe]",
    "[2002:a9fe:a9fe::]",
    "[fc00::1]",
    "[fdff::1]",
    "[fec0::1]",
    "[ff02::1]",
    "[2001:db8::1]",
    "192.0.2.1",
    "198.51.100.1",
    "203.0.113.1",
    "198.18.0.1",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "192.0.0.1",
]
WHOLE = [
    f"http://user@127.0.0.1:{PORT}/",
    f"http://user:secret@127.0.0.1:{PORT}/",
    f"http://example.org@127.0.0.1:{PORT}/",
    f"http://127.0.0.1:{PORT}@8.8.8.8/",
    f"http://8.8.8.8@127.0.0.1:{PORT}/",
    f"http://@127.0.0.1:{PORT}/",
    f"http://127.0.0.1:{PORT}\\@8.8.8.8/",
    f"http://8.8.8.8\\@127.0.0.1:{PORT}/",
    f"http://8.8.8.8 @127.0.0.1:{PORT}/",
    f"http:// 127.0.0.1:{PORT}/",
    f"http://127.0.0.1:{PORT}\t/",
    f"http://127.0.0.1\t:{PORT}/",
    f"ht\ntp://127.0.0.1:{PORT}/",
    f"http://127.0.0.1:{PORT}/\r\nhost: x",
    f"http:/127.0.0.1:{PORT}/",
    f"http:127.0.0.1:{PORT}/",
    f"http:///127.0.0.1:{PORT}/",
    f"//127.0.0.1:{PORT}/",
    f"\\\\127.0.0.1:{PORT}\\",
    f"HTTP://127.0.0.1:{PORT}/",
    f"hTTps://127.0.0.1:{PORT}/",
    f"ftp://127.0.0.1:{PORT}/",
    f"gopher://127.0.0.1:{PORT}/_GET",
    f"dict://127.0.0.1:{PORT}/info",
    f"unix://127.0.0.1:{PORT}/",
    f"ws://127.0.0.1:{PORT}/",
    "file:///etc/passwd",
    "unix:///var/run/docker.sock",
    "data:text/plain,x",
    "javascript:alert(1)",
    f"http://127.0.0.1:{PORT}#@8.8.8.8/",
    f"http://8.8.8.8#@127.0.0.1:{PORT}/",
    f"http://127.0.0.1:{PORT}?@8.8.8.8/",
    f"http://[::1]:{PORT}@8.8.8.8/",
    "http://[::1",
    "http://[]/",
    "http://:80/",
    "http://127.0.0.1:99999/",
]
URLS = [f"http://{host}:{PORT}/" for host in (*LOOPBACK_HOSTS, *PRIVATE_HOSTS)] + WHOLE


@pytest.fixture
async def sinks() -> AsyncIterator[Sequence[Receiver]]:
    """Services on loopback, IPv4 and (where the machine has it) IPv6, on one port."""
    async with AsyncExitStack() as opened:
        first = await opened.enter_async_context(receiving())
        found = [first]
        if socket.has_ipv6:
            try:
                second = Receiver(first.port)
                listening = await asyncio.start_server(second.serve, "::1", first.port)
            except OSError:
                pass
            else:
                opened.push_async_callback(listening.wait_closed)
                opened.callback(listening.close)
                found.append(second)
        yield found


async def test_there_are_120_urls_and_none_reaches_a_sink(sinks: Sequence[Receiver]) -> None:
    assert len(URLS) >= 120
    assert len(set(URLS)) == len(URLS)
    for template in URLS:
        url = template.replace(PORT, str(sinks[0].port))
        with pytest.raises(GpoolError):
            await post_checked(url, b"{}", {}, timeout_s=1.0)
    assert [sink.got for sink in sinks] == [[]] * len(sinks)


async def test_with_permission_the_same_sinks_are_reached(sinks: Sequence[Receiver]) -> None:
    allowed = NoticeSettings(webhook_networks="127.0.0.0/8, ::1/128").webhook_allowed
    port = sinks[0].port
    await post_checked(f"http://127.0.0.1:{port}/", b"{}", {}, allowed)
    if len(sinks) > 1:
        await post_checked(f"http://[::1]:{port}/", b"{}", {}, allowed)
    assert all(len(sink.got) == 1 for sink in sinks)


async def test_a_name_that_changes_its_address_is_dialled_at_the_checked_one(
    sinks: Sequence[Receiver],
) -> None:
    """DNS rebinding: the first answer is public, the second one is the sink's."""
    answers = iter([["8.8.8.8"], ["127.0.0.1"]])
    asked = []

    async def resolve(host: str, port: int) -> Sequence[str]:
        asked.append(host)
        return next(answers)

    found = await checked(f"http://rebinding.example:{sinks[0].port}/", (), resolve)
    assert found.address == "8.8.8.8"
    with pytest.raises(Invalid):  # the next delivery resolves again, and refuses
        await post_checked(
            f"http://rebinding.example:{sinks[0].port}/", b"{}", {}, (), resolve=resolve
        )
    assert asked == ["rebinding.example"] * 2
    assert not any(sink.got for sink in sinks)


async def test_one_private_address_among_public_ones_refuses_the_name() -> None:
    async def resolve(host: str, port: int) -> Sequence[str]:
        return ["8.8.8.8", "10.0.0.1"]

    with pytest.raises(Invalid, match=r"10\.0\.0\.1"):
        await checked("http://mixed.example/", (), resolve)


async def test_a_name_is_resolved_once_for_a_delivery_and_sent_in_the_host_header(
    sinks: Sequence[Receiver],
) -> None:
    asked = []

    async def resolve(host: str, port: int) -> Sequence[str]:
        asked.append(host)
        return ["127.0.0.1"]

    allowed = NoticeSettings(webhook_networks="127.0.0.0/8").webhook_allowed
    url = f"http://hooks.example:{sinks[0].port}/x?y=1"
    answer = await post_checked(url, b"{}", {"webhook-id": "1"}, allowed, resolve=resolve)
    assert answer.status == 200
    assert asked == ["hooks.example"]
    [got] = sinks[0].got
    assert (got.path, got.headers["host"]) == ("/x?y=1", f"hooks.example:{sinks[0].port}")
