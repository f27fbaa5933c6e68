"""Encryption at rest: planted words are in no file, row or object; rows cannot be swapped; a deleted account's are lost."""

from __future__ import annotations

import base64
import hashlib
import secrets
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from gpool.core.errors import InternalFault
from gpool.core.ids import TaskId, decode, encode
from gpool.core.model import EndReason
from gpool.server.app import close_server
from gpool.server.scheduling.loops import PruneStore, RetainTasks
from gpool.server.store.generated_rows import ArtifactsRecord
from gpool.server.store.operations.identity import sealed_fields
from gpool.server.store.operations.tasks import artifacts, tasks
from gpool.server.store.protocol import Operation, Statement, operation
from gpool.server.store.rows import select
from gpool.server.store.sealing import account_keys
from gpool.wire.frames import Finished, LogChunk, Progressed
from tests.server.identity_routes.people_desk import Somebody, registered
from tests.server.server_desk import (
    FUNCTION,
    FUNCTION_SHA256,
    Agent,
    Desk,
    StoppedClock,
    an_offer,
    open_desk,
)

pytestmark = pytest.mark.anyio

PLACES = (
    "argument",
    "variable",
    "payload",
    "value",
    "error",
    "detail",
    "log",
    "file",
    "part",
    "progress",
)
DAY_S = 86_400


def words() -> dict[str, bytes]:
    """A word for each place, none of which occurs anywhere by chance."""
    return {place: f"planted-{place}-{secrets.token_hex(8)}".encode() for place in PLACES}


async def plant(who: Somebody, agent: Agent, planted: Mapping[str, bytes]) -> dict[str, str]:
    """Leave the words in a command, a call, their ends, logs, an upload and an unfinished one; return the tasks."""
    desk = who.desk
    text = {place: word.decode() for place, word in planted.items()}
    file = planted["file"] * 20_000
    named = hashlib.sha256(file).hexdigest()
    put = await desk.bare.put(f"/v1/artifacts/{named}", content=file, headers=who.headers)
    assert put.status_code == 201, put.text
    part = planted["part"] * 1000
    unfinished = hashlib.sha256(part).hexdigest()
    sent = await desk.bare.put(
        f"/v1/artifacts/{unfinished}",
        content=part[:5000],
        headers={**who.headers, "content-range": f"bytes 0-4999/{len(part)}"},
    )
    assert sent.status_code == 202, sent.text
    await desk.bare.put(f"/v1/artifacts/{FUNCTION_SHA256}", content=FUNCTION, headers=who.headers)
    command = {
        "command": ["train", text["argument"]],
        "env": {"WORD": text["variable"]},
        "inputs": [{"path": "in", "sha256": named, "size_bytes": len(file)}],
        "retries": 1,
    }
    call = {
        "function": {"sha256": FUNCTION_SHA256, "python": "3.11"},
        "calls": [base64.b64encode(planted["payload"]).decode()],
    }
    found: dict[str, str] = {}
    for name, document in (("command", command), ("call", call)):
        answer = await who.ask("POST", "/v1/tasks", document)
        assert answer.status_code == 202, answer.text
        [found[name]] = answer.json()["ids"]
        await desk.schedule()
    by_task = {encode("task", lease.task): lease for lease in agent.leases()}
    one, other = by_task[found["command"]], by_task[found["call"]]
    assert other.payload == planted["payload"]
    failed = EndReason.EXITED
    await agent.report(
        LogChunk(one.task, one.epoch, 0, 1, planted["log"] + b"\n"),
        Finished(one.task, one.epoch, failed, exit_code=1, error_text=text["detail"]),
        Finished(other.task, other.epoch, EndReason.RETURNED, value=planted["value"]),
    )
    await desk.schedule()
    again = agent.leases()[-1]
    assert (again.task, again.epoch) == (one.task, 2)
    await agent.report(
        Progressed(again.task, again.epoch, 400_000, text["progress"]),
        Finished(again.task, again.epoch, failed, exit_code=1, error_text=text["error"]),
    )
    return found


async def check(who: Somebody, found: Mapping[str, str], planted: Mapping[str, bytes]) -> None:
    """Everything is shown to its owner."""
    desk = who.desk
    task = (await who.ask("GET", f"/v1/tasks/{found['command']}")).json()
    assert task["command"][1].encode() == planted["argument"]
    assert planted["error"].decode() in [*task.values()]
    assert task["progress"]["text"].encode() == planted["progress"]
    assert (
        planted["detail"] in (await who.ask("GET", f"/v1/tasks/{found['command']}/events")).content
    )
    value = (await who.ask("GET", f"/v1/tasks/{found['call']}/result")).content
    assert base64.b64encode(planted["value"]) in value or planted["value"] in value
    logs = (await who.ask("GET", f"/v1/tasks/{found['command']}/logs")).json()["items"]
    assert planted["log"].decode() in "".join(item["text"] for item in logs)
    exported = (await who.ask("GET", "/v1/me/export")).content
    assert base64.b64encode(planted["payload"]) in exported
    assert planted["variable"] in exported
    file = planted["file"] * 20_000
    path = f"/v1/artifacts/{hashlib.sha256(file).hexdigest()}"
    assert (await desk.bare.get(path, headers=who.headers)).content == file
    some = {**who.headers, "range": "bytes=70000-140000"}
    assert (await desk.bare.get(path, headers=some)).content == file[70_000:140_001]
    part = planted["part"] * 1000
    path = f"/v1/artifacts/{hashlib.sha256(part).hexdigest()}"
    head = await desk.bare.head(path, headers=who.headers)
    assert head.headers["upload-offset"] == "5000"


async def continue_upload(who: Somebody, planted: Mapping[str, bytes]) -> None:
    part = planted["part"] * 1000
    path = f"/v1/artifacts/{hashlib.sha256(part).hexdigest()}"
    rest = {**who.headers, "content-range": f"bytes 5000-{len(part) - 1}/{len(part)}"}
    assert (await who.desk.bare.put(path, content=part[5000:], headers=rest)).status_code == 201
    assert (await who.desk.bare.get(path, headers=who.headers)).content == part


def in_folder(folder: Path, planted: Mapping[str, bytes]) -> set[str]:
    """Places whose word is in a file, as it is or in base64."""
    found = set()
    for path in folder.rglob("*"):
        if path.is_file() and path.name != "postmaster.pid":
            content = path.read_bytes()
            found |= {place for place, word in planted.items() if _holds(content, word)}
    return found


def _holds(content: bytes, word: bytes) -> bool:
    return word in content or any(
        base64.b64encode(b"\0" * shift + word)[4:-4] in content for shift in range(3)
    )


async def in_postgres(url: str, planted: Mapping[str, bytes]) -> set[str]:
    """Places whose word is in a file of the database or in the newest of its log."""
    connection = await import_module("asyncpg").connect(url)
    try:
        await connection.execute("CHECKPOINT")
        root = Path(await connection.fetchval("SHOW data_directory"))
        number = await connection.fetchval(
            "SELECT oid FROM pg_database WHERE datname = current_database()"
        )
    finally:
        await connection.close()
    logs = sorted((root / "pg_wal").glob("0*"), key=lambda path: path.stat().st_mtime)[-2:]
    found = in_folder(root / "base" / str(number), planted)
    for log in logs:
        content = log.read_bytes()
        found |= {place for place, word in planted.items() if _holds(content, word)}
    return found


async def searched(
    desk: Desk, database: Mapping[str, Any], planted: Mapping[str, bytes]
) -> set[str]:
    found = in_folder(desk.server.settings.data, planted)
    if database:
        found |= await in_postgres(database["database_url"], planted)
    return found


async def test_planted_words_are_in_no_file_of_folder_and_database(
    sealed_desk: Desk, database: dict[str, Any]
) -> None:
    desk, planted = sealed_desk, words()
    agent, ada = await desk.agent(offer=an_offer(cpus=8)), await registered(desk, "ada")
    found = await plant(ada, agent, planted)
    await check(ada, found, planted)
    assert await searched(desk, database, planted) == set()
    desk.clock.advance(3700)  # logs become a file
    await PruneStore(desk.server).run_once(desk.server.now)
    ada = await registered_again(desk, ada)
    await check(ada, found, planted)
    assert await searched(desk, database, planted) == set()
    await continue_upload(ada, planted)
    assert await searched(desk, database, planted) == set()


async def registered_again(desk: Desk, who: Somebody) -> Somebody:
    """The same account with a new token: hours have passed."""
    await who.refresh()
    return who


async def test_without_the_setting_every_word_is_found(
    data: Path, database: dict[str, Any]
) -> None:
    """The control."""
    desk, planted = await open_desk(data, StoppedClock(), **database), words()
    async with desk.http, desk.bare:
        agent, ada = await desk.agent(offer=an_offer(cpus=8)), await registered(desk, "ada")
        found = await plant(ada, agent, planted)
        await check(ada, found, planted)
        assert await searched(desk, database, planted) == set(PLACES)
    await close_server(desk.server)


async def test_planted_words_are_in_no_object_of_the_bucket(
    data: Path, bucket: dict[str, Any]
) -> None:
    planted = words()
    kept: dict[bool, set[str]] = {}
    uses: dict[bool, object] = {}
    for is_on in (True, False):
        folder = data if is_on else data.parent / "plain"
        desk = await open_desk(folder, StoppedClock(), encrypt_data=is_on, **bucket)
        assert (desk.server.blobs.direct is None) is is_on
        async with desk.http, desk.bare:
            agent, ada = await desk.agent(offer=an_offer(cpus=8)), await registered(desk, "ada")
            found = await plant(ada, agent, planted)
            await check(ada, found, planted)
            await continue_upload(ada, planted)
            desk.clock.advance(3700)
            await PruneStore(desk.server).run_once(desk.server.now)
            ada = await registered_again(desk, ada)
            kept[is_on] = await _in_bucket(desk, planted)
            items = (await ada.ask("GET", "/v1/artifacts")).json()["items"]
            assert {each["used_as"] for each in items} == {"log", "spec", "upload"}
            uses[is_on] = (await ada.ask("GET", "/v1/storage")).json()
        await close_server(desk.server)
    assert kept == {True: set(), False: {"file", "part"}}  # the log is compressed
    assert uses[True] == uses[False]  # charged by the size of the contents


async def _in_bucket(desk: Desk, planted: Mapping[str, bytes]) -> set[str]:
    found: set[str] = set()
    blobs = desk.server.blobs
    for shard in range(256):
        for each in await blobs.listed(f"{shard:02x}"):
            assert "/" in each.key
            content = b"".join(
                [piece async for piece in blobs._store_of(each.key).read(each.key, 0, each.size)]
            )
            found |= {place for place, word in planted.items() if _holds(content, word)}
    return found


# ---- moved rows


async def two_calls(who: Somebody, agent: Agent) -> list[str]:
    """Two ended calls with arguments and values, and two files."""
    desk = who.desk
    await desk.bare.put(f"/v1/artifacts/{FUNCTION_SHA256}", content=FUNCTION, headers=who.headers)
    payloads = [base64.b64encode(b"args %d" % number).decode() for number in range(2)]
    document = {"function": {"sha256": FUNCTION_SHA256, "python": "3.11"}, "calls": payloads}
    ids: list[str] = (await who.ask("POST", "/v1/tasks", document)).json()["ids"]
    await desk.schedule()
    for lease in agent.leases():
        await agent.report(
            Finished(lease.task, lease.epoch, EndReason.RETURNED, value=b"value of %d" % lease.task)
        )
    return ids


async def test_a_value_moved_to_another_row_does_not_decrypt(data: Path) -> None:
    desk = await open_desk(data, StoppedClock(), encrypt_data=True)
    async with desk.http, desk.bare:
        agent, ada = await desk.agent(offer=an_offer(cpus=8)), await registered(desk, "ada")
        ids = await two_calls(ada, agent)
        first, second = (TaskId(decode("task", id_)) for id_ in ids)
        assert (await desk.server.store.read(tasks.task(first, None))).value  # type: ignore[union-attr]
        with closing(sqlite3.connect(data / "gpool.db")) as raw:
            raw.execute(
                "UPDATE tasks SET value = (SELECT o.value FROM tasks o WHERE o.id = ?) WHERE id = ?",
                (second, first),
            )
            raw.commit()
        with pytest.raises(InternalFault, match=r"tasks\.value of row"):
            await desk.server.store.read(tasks.task(first, None))
        assert (await desk.server.store.read(tasks.task(second, None))).value  # type: ignore[union-attr]
        assert (await ada.ask("GET", f"/v1/tasks/{ids[0]}/result")).status_code == 500
        # a column of the same row
        with closing(sqlite3.connect(data / "gpool.db")) as raw:
            raw.execute("UPDATE tasks SET value = payload WHERE id = ?", (first,))
            raw.commit()
        with pytest.raises(InternalFault, match=r"tasks\.value of row"):
            await desk.server.store.read(tasks.task(first, None))
        # the key of another file
        for content in (b"one", b"two"):
            name = hashlib.sha256(content).hexdigest()
            put = desk.bare.put(f"/v1/artifacts/{name}", content=content, headers=ada.headers)
            assert (await put).status_code == 201
        one, two = (hashlib.sha256(content).hexdigest() for content in (b"one", b"two"))
        with closing(sqlite3.connect(data / "gpool.db")) as raw:
            raw.execute(
                "UPDATE artifacts SET (object, key_sealed) = (SELECT o.object, o.key_sealed FROM artifacts o "
                "WHERE o.sha256 = ?) WHERE sha256 = ?",
                (two, one),
            )
            raw.commit()
        with pytest.raises(InternalFault, match=r"artifacts\.key_sealed"):
            await desk.server.store.read(artifacts.location_of(one))
    await close_server(desk.server)


# ---- turning it on and off, keys


async def test_rows_from_before_and_after_the_setting_are_read_side_by_side(
    data: Path, database: dict[str, Any]
) -> None:
    clock, planted = StoppedClock(), [words(), words(), words()]
    found: list[dict[str, str]] = []
    for turn, is_on in enumerate((False, True, False)):
        desk = await open_desk(data, clock, encrypt_data=is_on, **database)
        async with desk.http, desk.bare:
            agent = await desk.agent(f"node {turn}", offer=an_offer(cpus=8))
            ada = await registered(desk, f"ada{turn}")
            found.append(await plant(ada, agent, planted[turn]))
            for earlier, of_turn in zip(planted, found, strict=False):
                view = await desk.get(f"/v1/tasks/{of_turn['command']}")
                assert view.json()["command"][1].encode() == earlier["argument"]
            await agent.channel.close()
        await close_server(desk.server)
        clock.advance(60)


async def test_a_plain_value_that_looks_sealed_is_kept_as_it_is(data: Path) -> None:
    desk = await open_desk(data, StoppedClock())
    async with desk.http, desk.bare:
        agent, ada = await desk.agent(offer=an_offer(cpus=8)), await registered(desk, "ada")
        odd = {
            **words(),
            "value": b"\x1agpool:12345678",
            "log": b"\x1agpool=x",
            "error": b"\x1agpool",
        }
        found = await plant(ada, agent, odd)
        await check(ada, found, odd)
    await close_server(desk.server)


async def test_a_new_master_key_wraps_account_keys_and_touches_no_data(
    sealed_desk: Desk, database: dict[str, Any]
) -> None:
    desk, planted = sealed_desk, words()
    agent, ada = await desk.agent(offer=an_offer(cpus=8)), await registered(desk, "ada")
    found = await plant(ada, agent, planted)
    [before] = await desk.server.store.read(account_keys([("user", ada.user)]))
    old = (desk.server.settings.data / "master.key").read_bytes()
    assert await desk.server.sealer.rotate_master() >= 1
    [after] = await desk.server.store.read(account_keys([("user", ada.user)]))
    assert before.key_id == after.key_id
    assert before.wrapped != after.wrapped
    assert (desk.server.settings.data / "master.key").read_bytes() != old
    await check(ada, found, planted)
    if database:  # another replica, with the new master key only
        again = await open_desk(
            desk.server.settings.data, desk.clock, encrypt_data=True, **database
        )
        async with again.http:
            view = await again.get(f"/v1/tasks/{found['command']}")
            assert view.json()["command"][1].encode() == planted["argument"]
        await close_server(again.server)


async def test_deleting_an_account_destroys_its_key_and_spares_files_of_others(
    sealed_desk: Desk,
) -> None:
    desk, planted = sealed_desk, words()
    agent = await desk.agent(offer=an_offer(cpus=8))
    ada, bob = await registered(desk, "ada"), await registered(desk, "bob")
    await plant(ada, agent, planted)
    shared = planted["file"] * 20_000
    path = f"/v1/artifacts/{hashlib.sha256(shared).hexdigest()}"
    again = await desk.bare.put(path, content=shared, headers=bob.headers)
    assert again.status_code == 201
    only = hashlib.sha256(b"only ada's").hexdigest()
    mine = await desk.bare.put(f"/v1/artifacts/{only}", content=b"only ada's", headers=ada.headers)
    assert mine.status_code == 201
    copied = await desk.server.store.read(_row_of(only))
    gone = await ada.ask("DELETE", "/v1/me", {"password": "a long enough password"})
    assert gone.status_code == 204, gone.text
    await RetainTasks(desk.server).run_once(desk.server.now)
    assert await desk.server.store.read(account_keys([("user", ada.user)])) == []
    assert (await desk.bare.get(path, headers=bob.headers)).content == shared
    assert await desk.server.store.read(sealed_fields.keys_without_account(10)) == ()
    # a copy of the deleted row, as of a backup of another table, names a key that is gone
    await desk.server.store.write(_restore(copied))
    with pytest.raises(InternalFault, match="key was destroyed"):
        await desk.server.store.read(artifacts.location_of(only))


@operation
def _row_of(sha256: str) -> Operation[ArtifactsRecord]:
    [row] = yield from select(
        ArtifactsRecord, "SELECT * FROM artifacts WHERE sha256 = :sha256", {"sha256": sha256}
    )
    return row


@operation
def _restore(row: ArtifactsRecord) -> Operation[None]:
    yield Statement(
        "INSERT INTO artifacts (sha256, size_bytes, touched_at, object, key_sealed) "
        "VALUES (:sha256, :size_bytes, :touched_at, :object, :key_sealed)",
        row._asdict(),
    )


async def test_the_key_of_a_deleted_team_goes_with_its_last_task(sealed_desk: Desk) -> None:
    desk = sealed_desk
    agent, ada = await desk.agent(offer=an_offer(cpus=8)), await registered(desk, "ada")
    made = await ada.ask("POST", "/v1/teams", {"name": "lab"})
    assert made.status_code == 201, made.text
    team = made.json()["id"]
    number = decode("team", team)
    task = await ada.ask("POST", "/v1/tasks", {"command": ["true"], "team": team})
    assert task.status_code == 202, task.text
    await desk.schedule()
    [lease] = agent.leases()
    await agent.report(Finished(lease.task, lease.epoch, EndReason.EXITED, exit_code=0))
    assert (await ada.ask("DELETE", f"/v1/teams/{team}")).status_code == 204
    await RetainTasks(desk.server).run_once(desk.server.now)
    assert len(await desk.server.store.read(account_keys([("team", number)]))) == 1
    desk.clock.advance(400 * DAY_S)
    await RetainTasks(desk.server).run_once(desk.server.now)
    assert await desk.server.store.read(account_keys([("team", number)])) == []
