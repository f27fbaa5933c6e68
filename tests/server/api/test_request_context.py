"""Request ids: accepted or drawn, answered, in every log line; trace contexts reach the node in the task's spec."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator

import pytest
from starlette.requests import Request
from starlette.routing import Route

from gpool.observability.logs import LogSource, log_handler
from gpool.observability.redaction import Redactor
from gpool.wire.frames import Grants
from tests.server.server_desk import Desk, an_offer
from tests.tools.ecs import problems

pytestmark = pytest.mark.anyio

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Lines(logging.Handler):
    """Keeps each record as JSON, formatted where it was logged: its fields depend on the work at hand."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[dict[str, object]] = []
        self._form = log_handler("json", LogSource("gpool-server", "1"), Redactor())

    def emit(self, record: logging.LogRecord) -> None:
        line = self._form.format(record)
        assert problems(line) == []
        self.kept.append(json.loads(line))


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler, logger = Lines(), logging.getLogger("gpool")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


@pytest.mark.parametrize("given", ["r-1", "A.b_c~d:e+f/g=h-i", "x" * 128])
async def test_a_caller_s_request_id_is_used(desk: Desk, lines: Lines, given: str) -> None:
    answer = await desk.get("/v1/me", headers={"X-Request-Id": given})
    assert answer.headers["X-Request-Id"] == given
    [line] = [each for each in lines.kept if each["message"] == "request"]
    assert line["http.request.id"] == given
    assert line["http.response.status_code"] == 200
    assert line["url.path"] == "/v1/me"
    assert str(line["user.id"]).startswith("u-")


@pytest.mark.parametrize("given", ["", "x" * 129, "two words", 'quote"', "naïve"])
async def test_another_request_id_is_replaced(desk: Desk, given: str) -> None:
    answer = await desk.get("/v1/me", headers={"X-Request-Id": given.encode("latin-1")})
    assert re.fullmatch("[0-9a-f]{16}", answer.headers["X-Request-Id"])


async def test_errors_have_an_id_too(desk: Desk) -> None:
    for path, status in (("/v1/nothing", 404), ("/v1/tasks/t-0000000000007", 404)):
        answer = await desk.get(path)
        assert answer.status_code == status
        assert answer.headers["X-Request-Id"]


async def test_an_internal_fault_is_found_by_the_id_in_its_answer(desk: Desk, lines: Lines) -> None:
    async def broken(request: Request) -> None:
        raise ZeroDivisionError("spoon")

    desk.app.router.routes.insert(0, Route("/v1/broken", broken))
    answer = await desk.get("/v1/broken")
    id_ = answer.headers["X-Request-Id"]
    assert answer.status_code == 500
    assert id_ in answer.json()["detail"]
    [line] = [each for each in lines.kept if each["message"] == "internal fault"]
    assert line["http.request.id"] == id_
    assert line["error.type"] == "ZeroDivisionError"
    assert "broken" in str(line["error.stack_trace"])


async def test_a_line_about_a_lease_names_its_task(desk: Desk, lines: Lines) -> None:
    agent = await desk.agent()
    task = await desk.command()
    await desk.schedule()
    async with desk.http_of(agent, f"{task}:1") as http:
        await http.get("/v1/artifacts/" + "0" * 64)
    line = [each for each in lines.kept if each["message"] == "request"][-1]
    assert line["gpool.task.id"] == task
    assert line["gpool.task.epoch"] == 1
    assert str(line["gpool.node.id"]).startswith("n-")


@pytest.mark.parametrize(
    ("header", "stored"),
    [
        (f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-01"),
        (f"00-{TRACE}-{SPAN}-00", ""),  # not sampled
        (f"00-{'0' * 32}-{SPAN}-01", ""),
        (f"00-{TRACE}-{SPAN}-01\x7f", ""),
        (f"cc-{TRACE}-{SPAN}-01-more", ""),
    ],
)
async def test_a_sampled_context_reaches_the_node_with_the_spec(
    desk: Desk, header: str, stored: str
) -> None:
    agent = await desk.agent()
    body = {"command": ["true"]}
    answer = await desk.post("/v1/tasks", body, headers={"traceparent": header})
    assert answer.status_code == 202
    await desk.schedule()
    [grants] = agent.frames(Grants)
    [(_, spec)] = grants.specs
    assert spec.trace == stored


async def test_submissions_without_a_trace_share_one_spec(desk: Desk) -> None:
    agent = await desk.agent(offer=an_offer(cpus=4))
    for headers in ({}, {}, {"traceparent": f"00-{TRACE}-{SPAN}-01"}):
        await desk.post("/v1/tasks", {"command": ["true"]}, headers=headers)
    await desk.schedule()
    specs = {id_: spec.trace for grants in agent.frames(Grants) for id_, spec in grants.specs}
    assert sorted(specs.values()) == ["", f"00-{TRACE}-{SPAN}-01"]
