"""The door out: what users name is resolved and refused when it is not public."""

from __future__ import annotations

import asyncio

import pytest

from gpool.core.errors import Invalid, Unreachable
from gpool.core.model import Instant
from gpool.server.outbound import (
    FAILED_FOR,
    KEPT_FOR,
    MAX_ANSWER_BYTES,
    Outbound,
    checked,
    is_public,
)
from tests.server.identity_routes.socket_server import answering
from tests.tools.processes import PATIENCE_S

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.0.0.1",
        "172.16.5.4",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "::1",
        "fe80::1",
        "fc00::1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "64:ff9b::7f00:1",
        "2002:7f00:1::",
        "::127.0.0.1",
        "fec0::1",
    ],
)
def test_private_addresses_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111"])
def test_public_addresses_are(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/",
        "http://localhost:8642/",
        "http://[::1]/",
        "http://2130706433/",
        "http://0x7f.1/",
        "ftp://8.8.8.8/",
        "http://user@8.8.8.8/",
        "http:///",
        "http://[",
        "file:///etc/passwd",
    ],
)
async def test_a_users_destination_that_is_not_public_is_refused(url: str) -> None:
    with pytest.raises(Invalid):
        await checked(url)


async def test_a_public_destination_is_dialled_at_the_checked_address() -> None:
    found = await checked("https://8.8.8.8/hook")
    assert (found.address, found.port, found.host) == ("8.8.8.8", 443, "8.8.8.8")


async def test_an_answer_without_end_is_cut() -> None:
    outbound = Outbound(timeout_s=PATIENCE_S)
    async with answering(lambda *_: (200, b"x" * (MAX_ANSWER_BYTES + 1))) as url:
        with pytest.raises(Unreachable):
            await outbound.get(url)
    await outbound.close()


async def test_redirects_are_not_followed() -> None:
    outbound = Outbound(timeout_s=PATIENCE_S)
    async with answering(lambda *_: (302, b"{}")) as url:
        assert (await outbound.get(url)).status == 302
    await outbound.close()


@pytest.mark.parametrize(("status", "life"), [(200, KEPT_FOR), (503, FAILED_FOR)])
async def test_a_provider_is_asked_once_however_many_sign_ins_begin(status: int, life: int) -> None:
    asked = []

    def answer(line: str, _: bytes) -> tuple[int, bytes]:
        asked.append(line)
        return status, b"{}"

    outbound = Outbound(timeout_s=PATIENCE_S)
    async with answering(answer) as url:
        await asyncio.gather(*(outbound.get_cached(url, Instant(0)) for _ in range(50)))
        assert len(asked) == 1
        assert (await outbound.get_cached(url, Instant(life - 1))).status == status
        assert len(asked) == 1
        await outbound.get_cached(url, Instant(life))
        assert len(asked) == 2
        await asyncio.gather(*(outbound.get(url) for _ in range(10)))  # the control
        assert len(asked) == 12
    await outbound.close()


async def test_a_provider_that_does_not_respond_is_not_asked_by_every_request() -> None:
    outbound = Outbound(timeout_s=PATIENCE_S)
    async with answering(lambda *_: (200, b"{}")) as url:
        pass  # closed again
    for _ in range(3):
        with pytest.raises(Unreachable, match="does not respond"):
            await outbound.get_cached(url, Instant(0))
    await outbound.close()
