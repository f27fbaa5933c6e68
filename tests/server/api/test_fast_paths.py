"""The short way past the framework answers as the long way does, errors and limits included."""

from __future__ import annotations

from typing import Any

import pytest

from gpool.server.api.routing import FastPaths
from gpool.server.identity.throttle import CLASS_RATES, RouteClass
from tests.server.server_desk import Desk

pytestmark = pytest.mark.anyio
SHORT, LONG = "/v1/tasks", "/v1/tasks?wait=00000"


def told(answer: Any) -> tuple[int, str, Any]:
    document = answer.json()
    kept = {name: document.get(name) for name in ("code", "title", "detail", "errors", "instance")}
    return answer.status_code, answer.headers["content-type"], kept


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b'{"command": []}',
        b'{"command": ["true"], "colour": "red"}',
        b'{"command": ["true"], "gpu": "A100::"}',
        b'{"command": ["true"], "team": "tm-0000000000009"}',
        b'{"command": ["true"], "batch": "b-0000000000009"}',
        b"[" * 100_000,
    ],
    ids=str,
)
async def test_what_is_wrong_is_said_alike_on_both_ways(desk: Desk, body: bytes) -> None:
    short, long = [await desk.http.post(path, content=body) for path in (SHORT, LONG)]
    assert told(short) == told(long)
    assert short.status_code >= 400


async def test_a_stranger_is_refused_alike_on_both_ways(desk: Desk) -> None:
    for headers in ({}, {"authorization": "Bearer gp_nobody"}, {"authorization": "Basic eDp5"}):
        short, long = [
            await desk.bare.post(path, json={"command": ["true"]}, headers=headers)
            for path in (SHORT, LONG)
        ]
        assert told(short) == told(long)
        assert short.status_code == 401
        assert short.headers["www-authenticate"] == long.headers["www-authenticate"]


async def test_a_submission_and_its_repetition_are_one_on_both_ways(desk: Desk) -> None:
    headers = {"idempotency-key": "once"}
    answers = [
        await desk.post(path, {"command": ["true"]}, headers=headers) for path in (SHORT, LONG)
    ]
    assert [answer.status_code for answer in answers] == [202, 202]
    assert answers[0].content == answers[1].content


async def test_the_short_way_counts_against_the_same_limit(desk: Desk) -> None:
    burst = CLASS_RATES[RouteClass.SUBMIT].address.burst
    for _ in range(burst):
        assert (await desk.bare.post(SHORT, json={})).status_code == 401
    assert (await desk.bare.post(SHORT, json={})).status_code == 429


async def test_what_has_no_short_way_takes_the_long_one() -> None:
    taken = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        taken.append((scope["type"], scope.get("method"), scope.get("path")))

    for scope in (
        {"type": "lifespan"},
        {"type": "websocket", "path": "/v1/other"},
        {"type": "http", "method": "GET", "path": SHORT, "query_string": b""},
        {"type": "http", "method": "POST", "path": SHORT, "query_string": b"wait=1&wait=2"},
        {"type": "http", "method": "POST", "path": "/submit_task", "query_string": b""},
    ):
        await FastPaths(app)(scope, None, None)  # type: ignore[arg-type]
    assert len(taken) == 5
