"""Submissions that come at once are written together, and each is answered as if it had come alone."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from gpool.core.errors import TooMany
from gpool.core.model import EndReason, Permission
from gpool.server.actions.quotas import set_quota
from gpool.server.actions.tasks.repeated import WantedTasks
from gpool.server.actions.tasks.submit import submit
from gpool.server.scheduling.picture import StatePicture
from gpool.server.scheduling.scheduler import Scheduler
from gpool.server.store.identity_values import Caller, GivenQuota
from gpool.server.store.operations.identity import users
from gpool.server.store.operations.tasks.submissions import Submission, SubmittedTasks
from gpool.server.store.protocol import Operation, Store
from gpool.wire.documents import SubmittedDocument, TaskRequest
from gpool.wire.frames import Finished
from tests.server.server_desk import Desk, calls_document

pytestmark = pytest.mark.anyio
TRUE: dict[str, Any] = {"command": ["true"]}


class Counting:
    """The store, and how often it was written to."""

    def __init__(self, real: Store) -> None:
        self._real = real
        self.writes = 0

    async def write(self, operation: Operation[Any]) -> Any:
        self.writes += 1
        return await self._real.write(operation)

    async def read(self, operation: Operation[Any]) -> Any:
        return await self._real.read(operation)

    async def close(self) -> None:
        await self._real.close()


async def test_those_that_come_meanwhile_are_one_write_and_all_of_them_wait(desk: Desk) -> None:
    store = Counting(desk.server.store)
    server = replace(desk.server, store=store)
    user = await desk.server.credentials.who(desk.key)
    assert isinstance(user, Caller)
    asked = [TaskRequest(command=["echo", str(number % 5)]) for number in range(30)]
    accepted = await asyncio.gather(
        *(submit(server, user, WantedTasks(each), None) for each in asked)
    )
    assert store.writes == 2, "the first alone, and then all the others"
    assert len({each.tasks for each in accepted}) == 30
    assert desk.server.picture.state.queued_count == 30
    assert desk.server.picture.arriving == 0
    page = (await desk.get("/v1/tasks?limit=100")).json()["items"]
    assert {task["id"] for task in page} == {
        text for each in accepted for text in _ids(each.body)
    }, "each was told of its own task"


def _ids(body: bytes) -> list[str]:
    found: list[str] = SubmittedDocument.model_validate_json(body).ids
    return found


async def test_a_key_used_many_times_at_once_submits_once(desk: Desk) -> None:
    await desk.command()
    headers = {"idempotency-key": "once"}
    answers = await asyncio.gather(
        *(desk.post("/v1/tasks", TRUE, headers=headers) for _ in range(12)),
        *(desk.post("/v1/tasks", TRUE) for _ in range(3)),
    )
    assert [answer.status_code for answer in answers] == [202] * 15
    assert len({answer.content for answer in answers[:12]}) == 1
    assert desk.server.picture.state.queued_count == 1 + 1 + 3


async def test_a_key_used_for_something_else_is_refused_among_others(desk: Desk) -> None:
    keys = [{"idempotency-key": key} for key in ("a", "b", "a", "c")]
    bodies = [TRUE, TRUE, {"command": ["false"]}, TRUE]
    answers = await asyncio.gather(
        *(desk.post("/v1/tasks", body, headers=key) for body, key in zip(bodies, keys, strict=True))
    )
    assert [answer.status_code for answer in answers] == [202, 202, 409, 202]
    assert answers[2].json()["code"] == "key_reused"


async def test_what_is_wrong_with_one_is_told_to_that_one_alone(desk: Desk) -> None:
    stranger = await desk.person("dave", Permission.CONSUMER)
    bodies = [
        TRUE,
        calls_document(1),
        TRUE | {"batch": "b-0000000000009"},
        TRUE | {"copies": 90},
        TRUE | {"inputs": {"in": "c" * 64}},
        TRUE,
    ]
    together = await asyncio.gather(
        *(desk.post("/v1/tasks", body) for body in bodies),
        desk.bare.post("/v1/tasks", json=TRUE, headers=stranger),
    )
    alone = [await desk.post("/v1/tasks", body) for body in bodies]
    for one, other in zip(together, alone, strict=False):
        assert one.status_code == other.status_code
        if one.status_code != 202:
            assert one.json() == other.json()
    assert [each.status_code for each in together].count(202) == 4


async def test_many_with_one_quota_never_pass_it_however_they_come(desk: Desk) -> None:
    user = await desk.person("dave", Permission.CONSUMER)
    dave, operator = [
        await desk.server.store.read(users.user_by_name(name)) for name in ("dave", "operator")
    ]
    assert dave is not None
    assert operator is not None
    await set_quota(desk.server, operator, ("user", dave.id), GivenQuota(queued_tasks=5))
    answers = await asyncio.gather(
        *(
            desk.bare.post("/v1/tasks", json=TRUE, headers=headers)
            for _ in range(10)
            for headers in (user, {"authorization": f"Bearer {desk.key}"})
        )
    )
    assert [each.status_code for each in answers[0::2]].count(202) == 5
    assert [each.status_code for each in answers[1::2]] == [202] * 10


async def test_a_refused_submission_uses_no_quota_of_its_group(desk: Desk) -> None:
    user = await desk.person("dave", Permission.CONSUMER)
    dave, operator = [
        await desk.server.store.read(users.user_by_name(name)) for name in ("dave", "operator")
    ]
    assert dave is not None
    assert operator is not None
    await set_quota(desk.server, operator, ("user", dave.id), GivenQuota(queued_tasks=2))
    missing = calls_document(1)  # its function was not uploaded
    answers = await asyncio.gather(
        *(
            desk.bare.post("/v1/tasks", json=body, headers=user)
            for body in (TRUE, missing, missing, missing, TRUE)
        )
    )
    codes = [each.status_code for each in answers]
    assert codes[0] == codes[-1] == 202
    assert {*codes[1:-1]} <= {422, 429}  # decided before or after the quota was used up


async def test_a_key_of_a_refused_submission_serves_another_one_of_its_group(desk: Desk) -> None:
    await desk.command()
    missing = calls_document(1)  # its function was not uploaded
    headers = {"idempotency-key": "once"}
    answers = await asyncio.gather(
        desk.post("/v1/tasks", TRUE),
        desk.post("/v1/tasks", missing, headers=headers),
        desk.post("/v1/tasks", TRUE, headers=headers),
    )
    assert [each.status_code for each in answers] == [202, 422, 202]


async def test_what_was_submitted_together_runs_like_any_other(desk: Desk) -> None:
    agent = await desk.agent()
    answers = await asyncio.gather(*(desk.post("/v1/tasks", TRUE) for _ in range(6)))
    ids = [answer.json()["ids"][0] for answer in answers]
    for _ in range(6):
        await desk.schedule()
        await agent.finish(len(agent.leases()))
    for task in ids:
        assert (await desk.get(f"/v1/tasks/{task}")).json()["status"] == "succeeded"


class FailsOnce(StatePicture):
    """Fails to fold the second submission."""

    came = 0

    def add_submission(
        self, submitted: SubmittedTasks, submission: Submission, *, is_queued: bool = False
    ) -> None:
        self.came += 1
        if self.came == 2:
            raise LookupError("not this one")
        super().add_submission(submitted, submission, is_queued=is_queued)


async def test_one_that_cannot_be_folded_hides_none_of_the_others(desk: Desk) -> None:
    server = desk.server
    picture = FailsOnce(
        server.store,
        server.nodes,
        server.picture.policy,
        server.hub,
        server.metrics,
        server.clock.now,
    )
    scheduler = Scheduler(picture, server.sealer, server.metrics)
    desk.server = replace(server, picture=picture, scheduler=scheduler)
    await desk.schedule()
    user = await desk.server.credentials.who(desk.key)
    assert isinstance(user, Caller)
    asked = [TaskRequest(command=["echo", str(number)]) for number in range(5)]
    told = await asyncio.gather(
        *(submit(desk.server, user, WantedTasks(each), None) for each in asked),
        return_exceptions=True,
    )
    assert [isinstance(each, LookupError) for each in told] == [False, True, True, True, True]
    await desk.schedule()
    assert picture.state.queued_count == 5, "they are committed"


async def test_what_is_heavy_has_a_write_of_its_own(desk: Desk) -> None:
    """Together they would be more than PostgreSQL takes in one statement, and all of them would fail, again and again."""
    store = Counting(desk.server.store)
    server = replace(desk.server, store=store)
    user = await desk.server.credentials.who(desk.key)
    assert isinstance(user, Caller)
    heavy = {"command": ["echo", "x" * 100_000], "env": {"MORE": "y" * 100_000}}
    asked = [TaskRequest.model_validate(heavy) for _ in range(4)]
    await asyncio.gather(*(submit(server, user, WantedTasks(each), None) for each in asked))
    assert store.writes == 4
    assert desk.server.picture.state.queued_count == 4


async def test_who_goes_away_while_they_wait_passes_no_quota(desk: Desk) -> None:
    who = await desk.server.credentials.who(desk.key)
    assert isinstance(who, Caller)
    await desk.schedule()
    await set_quota(desk.server, who.user, ("user", who.user.id), GivenQuota(queued_tasks=3))
    asked = [TaskRequest(command=["true"]) for _ in range(8)]
    gone = [
        asyncio.create_task(submit(desk.server, who, WantedTasks(each), None)) for each in asked
    ]
    await asyncio.sleep(0)
    assert desk.server.picture.arriving == len(asked)
    for each in gone[1:]:
        each.cancel()
    await asyncio.gather(*gone, return_exceptions=True)
    await desk.command()  # after those that were gathered
    await desk.schedule()
    assert desk.server.picture.state.queued_count <= 3


async def test_a_full_queue_is_never_passed_by_what_comes_at_once(desk: Desk) -> None:
    small = desk.server.settings.model_copy(update={"max_queued": 7})
    server = replace(desk.server, settings=small)
    who = await desk.server.credentials.who(desk.key)
    assert isinstance(who, Caller)
    asked = [TaskRequest(command=["true"], copies=2) for _ in range(12)]
    told = await asyncio.gather(
        *(submit(server, who, WantedTasks(each), None) for each in asked), return_exceptions=True
    )
    assert [isinstance(each, TooMany) for each in told].count(False) == 3
    assert desk.server.picture.state.queued_count == 6
    assert desk.server.picture.arriving == 0


async def test_who_goes_away_before_the_writing_began_has_submitted_nothing(desk: Desk) -> None:
    who = await desk.server.credentials.who(desk.key)
    assert isinstance(who, Caller)
    await desk.schedule()
    asked = [TaskRequest(command=["true"]) for _ in range(8)]
    all_of_them = [
        asyncio.create_task(submit(desk.server, who, WantedTasks(each), None)) for each in asked
    ]
    await asyncio.sleep(0)
    for each in all_of_them[3:]:
        each.cancel()
    await asyncio.gather(*all_of_them, return_exceptions=True)
    await desk.server.picture.rebuild(desk.server.now)
    assert desk.server.picture.state.queued_count == 3
    assert desk.server.picture.arriving == 0


async def test_what_comes_back_while_more_is_submitted_passes_no_quota(desk: Desk) -> None:
    who = await desk.server.credentials.who(desk.key)
    assert isinstance(who, Caller)
    agent = await desk.agent()
    await desk.command(copies=2)
    assert await desk.schedule() == 2
    await set_quota(desk.server, who.user, ("user", who.user.id), GivenQuota(queued_tasks=2))
    back = [
        Finished(lease.task, lease.epoch, EndReason.HANDED_BACK) for lease in await agent.granted(2)
    ]
    asked = [TaskRequest(command=["true"]) for _ in range(2)]
    told = await asyncio.gather(
        agent.report(*back),
        *(submit(desk.server, who, WantedTasks(each), None) for each in asked),
        return_exceptions=True,
    )
    assert [isinstance(each, TooMany) for each in told[1:]] == [True, True]
    assert desk.server.picture.state.queued_count == 2
