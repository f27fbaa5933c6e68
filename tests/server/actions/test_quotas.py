"""Quotas: what waits, what is stored and what runs, for users and teams."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace

import httpx2
import pytest

from gpool.core.ids import UserId, decode
from gpool.core.model import Permission
from gpool.server.actions.quotas import QueuedBound, most_queued, set_quota
from gpool.server.actions.tasks.outputs import ArtifactUpload
from gpool.server.actions.tasks.outputs import put as put_by
from gpool.server.store.identity_values import GivenQuota
from gpool.server.store.operations.identity import teams, users
from gpool.server.store.values import User
from gpool.wire.frames import Hold
from tests.server.server_desk import Desk, an_offer, exited

pytestmark = pytest.mark.anyio


async def operator(desk: Desk) -> User:
    user = await desk.server.store.read(users.user_by_name("operator"))
    assert user is not None
    return user


async def give(desk: Desk, **quota: int | None) -> User:
    user = await operator(desk)
    await set_quota(desk.server, user, ("user", user.id), GivenQuota(**quota))
    return user


async def put(desk: Desk, data: bytes, **options: object) -> httpx2.Response:
    sha256 = hashlib.sha256(data).hexdigest()
    return await desk.http.put(f"/v1/artifacts/{sha256}", content=data, **options)  # type: ignore[arg-type]


async def test_nobody_queues_more_than_the_quota(desk: Desk) -> None:
    await give(desk, queued_tasks=3)
    assert (await desk.post("/v1/tasks", {"command": ["true"], "copies": 2})).status_code == 202
    refused = await desk.post("/v1/tasks", {"command": ["true"], "copies": 2})
    assert refused.status_code == 429
    assert "may have 3 tasks waiting and has 2" in refused.json()["detail"]
    assert (await desk.post("/v1/tasks", {"command": ["true"]})).status_code == 202
    other = await desk.person("dave", Permission.CONSUMER)
    answer = await desk.bare.post("/v1/tasks", json={"command": ["true"]}, headers=other)
    assert answer.status_code == 202


async def test_many_at_once_never_pass_the_quota_together(desk: Desk) -> None:
    await give(desk, queued_tasks=50)
    answers = await asyncio.gather(
        *(desk.post("/v1/tasks", {"command": ["true"], "copies": 7}) for _ in range(20))
    )
    assert sorted(answer.status_code for answer in answers) == [202] * 7 + [429] * 13


async def test_the_queue_of_others_does_not_make_a_user_be_counted(desk: Desk) -> None:
    """Counting costs time in proportion to the account's queue."""
    other = await desk.person("dave", Permission.CONSUMER)
    body = {"command": ["true"], "copies": 40}
    assert (await desk.bare.post("/v1/tasks", json=body, headers=other)).status_code == 202
    assert (await desk.post("/v1/tasks", {"command": ["true"], "copies": 3})).status_code == 202
    user = (await operator(desk)).id
    bound = most_queued(desk.server, [user])
    assert bound is not None
    assert bound.is_within(("user", user), 3)
    assert not bound.is_within(("user", user), 2)
    assert not bound.is_within(("team", 1), 42)
    assert bound.is_within(("team", 1), 43)


def test_a_replica_leaves_room_for_submissions_at_others() -> None:
    bound = QueuedBound(0, {UserId(1): 500_000}, unseen=0.5)
    assert bound.is_within(("user", 1), 1_000_000)
    assert not bound.is_within(("user", 1), 999_999)
    assert not QueuedBound(0, {UserId(1): 1}, unseen=0.5).is_within(("user", 1), 1000)


async def test_nobody_stores_more_than_the_quota(desk: Desk) -> None:
    await give(desk, storage_bytes=1000)
    assert (await put(desk, b"a" * 600)).status_code == 201
    refused = await put(desk, b"b" * 600)
    assert refused.status_code == 403
    assert "may store only 400 more" in refused.json()["detail"]
    assert (await put(desk, b"a" * 600)).status_code == 201  # stored already: costs nothing

    async def unmeasured() -> object:
        for _ in range(10):
            yield b"c" * 100

    sha256 = hashlib.sha256(b"c" * 1000).hexdigest()
    refused = await desk.http.put(f"/v1/artifacts/{sha256}", content=unmeasured())  # type: ignore[arg-type]
    assert refused.status_code == 403
    assert (await desk.http.head(f"/v1/artifacts/{sha256}")).status_code == 404
    assert not desk.files_of(sha256)
    assert (await put(desk, b"d" * 400)).status_code == 201


async def test_a_node_never_stores_more_than_the_task_s_owner_may(desk: Desk) -> None:
    agent = await desk.agent()
    task = await desk.command()
    await desk.schedule()
    used = await desk.server.store.read(teams.usage_of("user", (await operator(desk)).id))
    await give(desk, storage_bytes=used.storage_bytes + 100)
    answer = await desk.post("/v1/nodes", {"name": "second"})
    assert answer.status_code == 201

    async def body() -> object:
        yield b"x" * 101

    upload = ArtifactUpload("0" * 64, None, Hold(decode("task", task), 1))
    with pytest.raises(Exception, match="may store only 100 more"):
        await put_by(desk.server, agent.credentials, upload, body())  # type: ignore[arg-type]


async def test_running_gpus_stay_within_the_quota_and_explain_says_so(desk: Desk) -> None:
    await give(desk, running_gpu_milli=2000)
    agent = await desk.agent(offer=an_offer(cpus=8, gpus=4))
    tasks = [await desk.command(gpu=1) for _ in range(3)]
    assert await desk.schedule() == 2
    told = await desk.get(f"/v1/tasks/{tasks[2]}/explain")
    assert "You may run 2 GPUs at once and 2 are in use" in told.json()["sentence"]
    await agent.report(exited(agent.leases()[0]))
    assert await desk.schedule() == 1
    await desk.server.picture.rebuild(desk.server.now)
    assert await desk.schedule() == 0


async def test_a_default_holds_for_whoever_was_given_nothing(desk: Desk) -> None:
    changed = desk.server.settings.model_copy(update={"user_queued": 1})
    desk.app.state.server = replace(desk.server, settings=changed)
    assert (await desk.post("/v1/tasks", {"command": ["true"]})).status_code == 202
    assert (await desk.post("/v1/tasks", {"command": ["true"]})).status_code == 429


async def test_setting_a_quota_is_noted(desk: Desk) -> None:
    user = await give(desk, queued_tasks=3)
    [noted] = (await desk.get("/v1/audit")).json()["items"]
    assert noted["action"] == "quota.set"
    assert noted["facts"]["queued_tasks"] == "3"
    assert decode("user", noted["actor"]) == user.id
