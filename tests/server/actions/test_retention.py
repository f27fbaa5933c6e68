"""Thirty days of use in simulated time: what expired or was deleted is gone from database and folders."""

from __future__ import annotations

import hashlib
import random
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest

from gpool.core.ids import encode
from gpool.core.model import EndReason, OutputFile
from gpool.server.scheduling.loops import PruneStore, RetainTasks, RotateKeys
from gpool.server.store.operations.identity import teams
from gpool.wire.frames import Checkpointed, Finished, LogChunk
from tests.server.identity_routes.people_desk import Somebody, registered, signed_in
from tests.server.server_desk import Agent, Desk, StoppedClock, an_offer, open_desk

pytestmark = pytest.mark.anyio

DAY_S = 86_400
DATA_DAYS, TASK_DAYS = 7, 14


@pytest.fixture
async def desk(data: Path) -> AsyncIterator[Desk]:
    kept = {
        "keep_task_data_days": DATA_DAYS,
        "keep_tasks_days": TASK_DAYS,
        "keep_checkpoints_s": 3600,
    }
    desk = await open_desk(data, StoppedClock(), **kept)
    async with desk.http, desk.bare:
        yield desk
    await desk.server.store.close()


async def maintain(desk: Desk) -> None:
    await PruneStore(desk.server).run_once(desk.server.now)
    await RetainTasks(desk.server).run_once(desk.server.now)
    await PruneStore(desk.server).run_once(desk.server.now)


async def a_day_of(who: Somebody, agent: Agent, day: int) -> str:
    """An upload, a task with input, log, checkpoint and output; returns the task."""
    desk, dice = who.desk, random.Random(f"{who.id} {day}")
    content = dice.randbytes(5000)
    sha256 = hashlib.sha256(content).hexdigest()
    await desk.bare.put(f"/v1/artifacts/{sha256}", content=content, headers=who.headers)
    wanted = {
        "command": ["train", str(day)],
        "inputs": [{"path": "in", "sha256": sha256, "size_bytes": len(content)}],
        "outputs": ["out"],
        "checkpoint": "save/",
    }
    answer = await who.ask("POST", "/v1/tasks", wanted)
    assert answer.status_code == 202, answer.text
    await desk.schedule()
    lease = agent.leases()[-1]
    output = dice.randbytes(3000)
    named = hashlib.sha256(output).hexdigest()
    async with desk.http_of(agent, f"{encode('task', lease.task)}:{lease.epoch}") as node:
        assert (await node.put(f"/v1/artifacts/{named}", content=output)).status_code == 201
    saved = OutputFile("save/1", named, len(output))
    await agent.report(
        LogChunk(lease.task, lease.epoch, 0, 1, dice.randbytes(2000)),
        Checkpointed(lease.task, lease.epoch, (saved,)),
        Finished(
            lease.task,
            lease.epoch,
            EndReason.EXITED,
            exit_code=0,
            outputs=(OutputFile("out", named, len(output)),),
            duration_us=1000,
        ),
    )
    return str(answer.json()["ids"][0])


def count(data: Path, table: str) -> int:
    with closing(sqlite3.connect(data / "gpool.db")) as connection:
        [(found,)] = connection.execute(f"SELECT COUNT(*) FROM {table}").fetchall()  # noqa: S608
    return int(found)


def files(data: Path) -> int:
    return sum(path.is_file() for path in (data / "artifacts").rglob("*"))


async def test_thirty_days_of_use_leave_what_the_settings_keep(desk: Desk, data: Path) -> None:
    agent = await desk.agent(offer=an_offer(cpus=8))
    ada, bob = await registered(desk, "ada"), await registered(desk, "bob")
    tasks: dict[str, list[str]] = {"ada": [], "bob": []}
    most_files = 0
    for day in range(30):
        ada, bob = await signed_in(desk, "ada"), await signed_in(desk, "bob")
        for who in (ada, bob):
            tasks[who.name].append(await a_day_of(who, agent, day))
        gone = tasks["bob"][-1]
        assert (await bob.ask("DELETE", f"/v1/tasks/{gone}/record")).status_code == 204
        desk.clock.advance(DAY_S)
        await maintain(desk)
        most_files = max(most_files, files(data))
    ada, bob = await signed_in(desk, "ada"), await signed_in(desk, "bob")
    # bob deleted every day what he had done: nothing of it is left
    assert (await bob.ask("GET", "/v1/tasks")).json()["items"] == []
    usage = await desk.server.store.read(teams.usage_of("user", bob.user))
    assert usage.storage_bytes == 0
    # ada kept everything: data of the last week, summaries of two
    shown = (await ada.ask("GET", "/v1/tasks?limit=200")).json()["items"]
    assert [one["id"] for one in shown] == tasks["ada"][: -TASK_DAYS - 1 : -1]
    whole = [one["id"] for one in shown if one["expired_at"] is None]
    assert whole == tasks["ada"][: -DATA_DAYS - 1 : -1]
    old = tasks["ada"][-DATA_DAYS - 1]
    expired = await ada.ask("GET", f"/v1/tasks/{old}/result")
    assert (expired.status_code, "expired on" in expired.json()["detail"]) == (404, True)
    assert (await ada.ask("GET", f"/v1/tasks/{old}/logs")).json()["items"] == []
    summary = (await ada.ask("GET", f"/v1/tasks/{old}")).json()
    assert (summary["status"], summary["exit_code"]) == ("succeeded", 0)
    assert summary["command"][0] == "train"
    assert (await ada.ask("GET", f"/v1/tasks/{tasks['ada'][0]}")).status_code == 404
    # database and folders hold that and no more: input, output and log of each whole task
    assert count(data, "tasks") == count(data, "specs") == count(data, "batches") == TASK_DAYS
    assert files(data) == 3 * DATA_DAYS == most_files
    assert count(data, "artifacts") == 3 * DATA_DAYS
    for table in ("log_chunks", "log_heads", "checkpoints", "uploads"):
        assert count(data, table) == 0
    # both gone: nothing is left
    desk.clock.advance(TASK_DAYS * DAY_S)
    await maintain(desk)
    for table in ("tasks", "specs", "batches", "artifacts", "artifact_refs", "stored", "attempts"):
        assert count(data, table) == 0, table
    assert files(data) == 0
    usage = await desk.server.store.read(teams.usage_of("user", ada.user))
    assert usage.storage_bytes == 0


async def test_with_zero_days_everything_is_kept(data: Path) -> None:
    """The control: the same month without retention."""
    kept = {"keep_task_data_days": 0, "keep_tasks_days": 0}
    desk = await open_desk(data, StoppedClock(), **kept)
    agent, ada = await desk.agent(), await registered(desk, "ada")
    for day in range(3):
        await a_day_of(ada, agent, day)
    desk.clock.advance(300 * DAY_S)
    await maintain(desk)
    assert (count(data, "tasks"), files(data)) == (3, 9)
    await desk.server.store.close()


async def test_expired_audit_entries_leave_a_chain_that_verifies(data: Path) -> None:
    """A log that was cut by hand does not verify: the control."""
    desk = await open_desk(data, StoppedClock(), keep_audit_days=7)
    async with desk.http, desk.bare:
        for day in range(20):
            await registered(desk, f"user{day}")
            desk.clock.advance(DAY_S)
            await RetainTasks(desk.server).run_once(desk.server.now)
        listed = (await desk.get("/v1/audit?limit=200")).json()["items"]
        assert 8 <= len([each for each in listed if each["action"] != "audit.expire"]) <= 36
        assert any(each["action"] == "audit.expire" for each in listed)
        checked = (await desk.get("/v1/audit?verify=true")).json()
        assert checked["whole"], checked
        head = checked["head"]
        assert (await desk.get(f"/v1/audit?verify=true&anchor={head}")).json()["whole"]
        with closing(sqlite3.connect(data / "gpool.db")) as raw:
            [(number, hashed)] = raw.execute(
                "SELECT number, hash FROM audit ORDER BY number LIMIT 1 OFFSET 2"
            ).fetchall()
            raw.execute("DELETE FROM audit WHERE number <= ?", (number,))
            raw.commit()
            assert not (await desk.get("/v1/audit?verify=true")).json()["whole"]
            raw.execute("UPDATE audit_head SET number = ?, hash = ? WHERE id = 2", (number, hashed))
            raw.commit()
        broken = (await desk.get("/v1/audit?verify=true")).json()
        assert not broken["whole"], broken
    await desk.server.store.close()


async def test_a_data_key_is_retired_when_no_process_seals_with_it_any_more(data: Path) -> None:
    desk = await open_desk(data, StoppedClock())
    async with desk.http, desk.bare:
        await registered(desk, "ada")
        for _ in range(4):
            desk.clock.advance(32 * DAY_S)
            await registered(desk, f"user{desk.clock.instant}")
            for _ in range(2):
                await RotateKeys(desk.server).run_once(desk.server.now)
                desk.clock.advance(3600)
        assert count(data, "data_keys") <= 2
    await desk.server.store.close()
