"""`Retry-After`: pauses are longer than asked, spread, and bounded; then the server's own error is raised."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from random import Random

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.client.transport import ApiTransport
from gpool.core.errors import Overloaded, TooMany, Unreachable
from gpool.transfer import senders
from gpool.transfer.requests import JITTER, Address, AskedPauses, Reply, error_from
from gpool.transfer.senders import AsyncSender, Sender

OVERLOADED = {"code": "overloaded", "detail": "the server is overloaded", "retry_after": 1}
ADDRESS = Address("http://pool.test", plain=True)


class Refusing(httpx2.BaseTransport):
    """Refuses so many requests with 429, then answers."""

    def __init__(self, times: int, after: int = 1) -> None:
        self.left, self.after = times, after
        self.keys: list[str | None] = []

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        self.keys.append(request.headers.get("idempotency-key"))
        if self.left:
            self.left -= 1
            return httpx2.Response(429, json={**OVERLOADED, "retry_after": self.after})
        return httpx2.Response(200, json={"batch": "b-1", "ids": ["t-1"], "items": []})


@given(st.floats(0, 100), st.lists(st.integers(-5, 60), max_size=50), st.integers())
def test_pauses_are_as_long_as_asked_spread_and_together_within_the_patience(
    total_s: float, asked: list[int], seed: int
) -> None:
    pauses, found = AskedPauses(total_s, Random(seed)), []
    for seconds in asked:
        pause = pauses.after(TooMany("too fast", retry_after=seconds))
        if pause is not None:
            assert seconds <= pause <= seconds * (1 + JITTER)
            found.append(pause)
    assert sum(found) <= total_s * (1 + JITTER)
    assert all(pause > 0 for pause in found)


def test_clients_refused_together_do_not_come_back_together() -> None:
    refusal = Overloaded("busy", retry_after=4)
    pauses = [AskedPauses(60, Random(seed)).after(refusal) for seed in range(200)]
    spread = sorted(pause for pause in pauses if pause is not None)
    assert spread[-1] - spread[0] > 1.5


def test_a_refusal_without_a_document_names_its_time_in_the_header() -> None:
    assert error_from(Reply(429, {"retry-after": "5"})).members["retry_after"] == 5
    away = error_from(Reply(503, {"retry-after": "7"}, b"<html>proxy</html>"))
    assert isinstance(away, Unreachable)
    assert away.members["retry_after"] == 7
    assert "retry_after" not in error_from(Reply(429, {"retry-after": "Mon, 1 Jan"})).members


def test_a_submission_is_repeated_with_its_key_after_an_overload() -> None:
    transport = Refusing(1)
    with closing(ApiTransport(ADDRESS, "gpk_test", transport)) as api:
        api.send_json("POST", "/v1/tasks", {"command": ["true"]})
    assert len(transport.keys) == 2
    assert transport.keys[0] is not None
    assert transport.keys[0] == transport.keys[1]


def test_the_servers_error_is_raised_when_its_time_is_beyond_the_patience() -> None:
    transport = Refusing(9, after=3600)
    with (
        closing(ApiTransport(ADDRESS, "gpk_test", transport)) as api,
        pytest.raises(Overloaded, match="the server is overloaded"),
    ):
        api.get_json("/v1/tasks")
    assert len(transport.keys) == 1


def test_a_stream_is_opened_again_after_the_time_that_a_refusal_names() -> None:
    transport = Refusing(1)
    with (
        closing(ApiTransport(ADDRESS, "gpk_test", transport)) as api,
        api.open("/v1/batches/b-1/results") as response,
    ):
        assert json.loads(response.read())["batch"] == "b-1"
    assert len(transport.keys) == 2


def test_a_transfer_goes_on_after_a_refusal(tmp_path: Path) -> None:
    transport = Refusing(1)
    file = tmp_path / "file"
    file.write_bytes(b"x")
    sender = Sender(ADDRESS, "gpk_test", Random(1), transport=transport)
    sender.upload(file, "0" * 64, 1)
    assert len(transport.keys) == 2


@pytest.mark.anyio
async def test_an_agents_transfer_goes_on_after_a_refusal_and_ends_with_it(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x")
    refusing = Refusing(1)
    answers = httpx2.MockTransport(refusing.handle_request)
    sender = AsyncSender(ADDRESS, "gpk_test", Random(1), transport=answers)
    await sender.upload(file, "0" * 64, 1)
    assert len(refusing.keys) == 2
    refusing.left, refusing.after = 9, round(senders.ASKED_S) + 1
    with pytest.raises(Overloaded):
        await sender.upload(file, "0" * 64, 1)
    assert len(refusing.keys) == 3
    await sender.close()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
