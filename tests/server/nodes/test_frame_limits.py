"""No frame is larger than an agent takes: one that is ends the connection, and again after every reconnect."""

from __future__ import annotations

import pytest

from gpool.core.ids import BatchId, SpecId, UserId
from gpool.core.model import InputFile, Requirements, TaskKind, TaskSpec
from gpool.server.store.operations.tasks.submissions import Submission, SubmittedTasks
from gpool.wire.frames import MAX_FRAME_BYTES, encode
from tests.server.server_desk import Desk, an_offer

pytestmark = pytest.mark.anyio

LONG = "x" * 120_000


async def test_specs_that_are_large_together_are_sent_in_several_frames(desk: Desk) -> None:
    agent = await desk.agent(offer=an_offer(cpus=2))
    for number in range(100):
        await desk.command(command=["true", LONG, str(number)], cpus=0.01, memory="1MB")
    assert await desk.schedule() == 100
    assert len(agent.leases()) == 100
    assert max(len(encode(frame)) for frame in agent.sent) < MAX_FRAME_BYTES
    again = agent.again()
    await again.connect()
    assert len(again.leases()) == 100
    assert max(len(encode(frame)) for frame in again.sent) < MAX_FRAME_BYTES


async def test_a_task_too_large_for_any_frame_is_refused_before_it_is_queued(desk: Desk) -> None:
    sha256 = "0" * 64
    folder = "/".join(["y" * 250] * 3)
    inputs = [
        {"path": f"{folder}/{number:0250}", "sha256": sha256, "size_bytes": 1}
        for number in range(10_000)
    ]
    answer = await desk.post("/v1/tasks", {"command": ["true"], "inputs": inputs})
    assert answer.status_code in (400, 413), answer.text
    assert "archive" in answer.json()["detail"]


async def test_ten_thousand_inputs_with_ordinary_names_are_taken(desk: Desk) -> None:
    content = b"one"
    sha256 = "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed"
    put = await desk.http.put(f"/v1/artifacts/{sha256}", content=content)
    assert put.status_code == 201, put.text
    inputs = [
        {"path": f"data/part-{number:05}/image.jpeg", "sha256": sha256, "size_bytes": 3}
        for number in range(10_000)
    ]
    agent = await desk.agent()
    answer = await desk.post("/v1/tasks", {"command": ["true"], "inputs": inputs})
    assert answer.status_code == 202, answer.text
    await desk.schedule()
    assert len(agent.leases()) == 1
    assert max(len(encode(frame)) for frame in agent.sent) < MAX_FRAME_BYTES


async def test_specs_with_many_inputs_are_not_remembered_for_ever(desk: Desk) -> None:
    """The scheduler keeps specs at hand; thousands of heavy ones would fill the server's memory."""
    picture = desk.server.picture
    inputs = tuple(InputFile(f"{number}", "0" * 64, 3, False) for number in range(10_000))
    spec = TaskSpec(TaskKind.COMMAND, "heavy", Requirements(), ("true",), inputs=inputs)
    for number in range(51):
        picture.drop_unused_specs()
        assert not picture.is_stale
        batch, id_ = BatchId(number), SpecId(number)
        asked = Submission(batch, True, True, id_, spec, UserId(1), (), desk.server.now)
        picture.add_submission(SubmittedTasks(batch, id_, 0, ()), asked)
    picture.drop_unused_specs()
    assert picture.is_stale
    await desk.schedule()
    picture.drop_unused_specs()
    assert not picture.is_stale
