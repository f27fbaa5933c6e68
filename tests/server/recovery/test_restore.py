"""Backup of a serving pool and restore on an empty machine, on both databases and between them."""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpool.core.errors import Conflict, Invalid, NotFound
from gpool.core.ids import decode
from gpool.server.recovery.archive import (
    ArchivedKey,
    ArchiveEnd,
    ArchiveWriter,
    ArtifactHead,
    BackupManifest,
    Record,
    TableHead,
)
from gpool.server.recovery.backup import LEFT_OUT
from gpool.server.store.drivers.opening import lock_for_serving
from gpool.server.store.migrations import newest_migration
from gpool.server.store.migrations.upgrade import upgrade_sqlite
from gpool.server.store.operations.recovery import EPOCH_JUMP, TERM_JUMP
from gpool.server.store.protocol import Operation, Statement, operation
from gpool.wire.frames import Hold, Recorded, Started, Stop
from tests.server.recovery.recovery_pool import CHEAP, SECRET, Site, contents
from tests.server.server_desk import Agent, Desk, exited, returned

pytestmark = pytest.mark.anyio
NewSite = Callable[[str, str], Site]
BLOB = b"an uploaded file " * 100_000  # several pieces
BLOB_SHA256 = hashlib.sha256(BLOB).hexdigest()
CHANGED_BY_RESTORE = {"scheduler_term", "audit", "audit_head", "rules", "sessions", "tasks", "attempts", "storage", "usage_totals"}  # fmt: skip


@operation
def forget_the_restore() -> Operation[None]:
    yield Statement("DELETE FROM rules WHERE kind = 'restored'")


async def some_work(desk: Desk) -> tuple[str, str, str]:
    """Ids of three tasks: finished, running, queued; with an artifact and a log."""
    put = await desk.http.put(f"/v1/artifacts/{BLOB_SHA256}", content=BLOB)
    assert put.status_code in (200, 201), put.text
    done, running, queued = [
        await desk.command(name=name) for name in ("done", "running", "queued")
    ]
    agent = await desk.agent()
    await desk.schedule()
    leases = {lease.task: lease for lease in agent.leases()}
    first, second = (leases[decode("task", each)] for each in (done, running))
    await agent.report(Started(first.task, first.epoch), exited(first))
    await agent.report(Started(second.task, second.epoch))
    return done, running, queued


async def restored_elsewhere(
    site: Site, other: Site, folder: Path
) -> tuple[dict[str, object], dict[str, object]]:
    await site.backed_up(folder / "pool.backup")
    before = await site.rows()
    other.clock.instant = site.clock.instant
    await other.restored(folder / "pool.backup")
    return dict(before), dict(await other.rows())


@pytest.mark.parametrize("target", ["sqlite", "postgresql"])
async def test_a_pool_restored_on_an_empty_machine_has_the_same_rows_files_and_keys(
    new_site: NewSite, database: str, target: str, tmp_path: Path
) -> None:
    site, other = new_site("site", database), new_site("other", target)
    async with site.serving() as desk:
        ids = await some_work(desk)
        shown = [(await desk.get(f"/v1/tasks/{each}")).json() for each in ids]
        before, after = await restored_elsewhere(site, other, tmp_path)  # while it serves
        name, key = desk.server.gate.name, desk.key
    for table in before.keys() - LEFT_OUT - CHANGED_BY_RESTORE:
        assert after[table] == before[table], table
    for table in LEFT_OUT - {"alembic_version"}:
        assert not after[table], table
    async with other.serving() as desk:
        assert desk.server.gate.name == name  # nodes know it by its root key
        assert desk.key == key
        now = [(await desk.get(f"/v1/tasks/{each}")).json() for each in ids]
        assert now[0] == shown[0]
        assert [each["status"] for each in now] == ["succeeded", "queued", "queued"]
        found = await desk.get(f"/v1/artifacts/{BLOB_SHA256}")
        assert found.content == BLOB


async def test_tasks_leased_at_the_backup_are_queued_again_and_late_reports_are_refused(
    new_site: NewSite, database: str, tmp_path: Path
) -> None:
    site, other = new_site("site", database), new_site("other", database)
    async with site.serving() as desk:
        task = await desk.command()
        agent = await desk.agent()
        await desk.schedule()
        [lease] = agent.leases()
        await agent.report(Started(lease.task, lease.epoch))
        await restored_elsewhere(site, other, tmp_path)
        control = await agent.report(returned(lease))  # the lost pool took it
        assert isinstance(control, Recorded)
        assert not control.refused
    async with other.serving() as desk:
        back = Agent(desk.server, agent.credentials, agent.offer, agent.badge, beat=99)
        await back.connect(Hold(lease.task, lease.epoch))
        assert (
            Hold(lease.task, lease.epoch)
            in [hold for frame in back.frames(Stop) for hold in frame.holds]
            or not back.leases()
        )
        told = await back.report(returned(lease))
        assert isinstance(told, Recorded)
        assert [(each.task, each.epoch) for each in told.refused] == [(lease.task, lease.epoch)]
        await desk.schedule()
        [again] = [each for each in back.leases() if each.task == lease.task]
        assert again.epoch == lease.epoch + EPOCH_JUMP + 1
        await back.report(Started(again.task, again.epoch), exited(again))
        shown = (await desk.get(f"/v1/tasks/{task}")).json()
        assert (shown["status"], shown.get("losses", 0)) == ("succeeded", 0)


async def test_a_task_queued_at_the_backup_and_run_since_gets_an_epoch_that_was_never_given(
    new_site: NewSite, database: str, tmp_path: Path
) -> None:
    site, other = new_site("site", database), new_site("other", database)
    async with site.serving() as desk:
        await desk.command()
        agent = await desk.agent()
        await restored_elsewhere(site, other, tmp_path)
        await desk.schedule()
        [lease] = agent.leases()  # after the backup
    async with other.serving() as desk:
        back = Agent(desk.server, agent.credentials, agent.offer, agent.badge, beat=99)
        await back.connect(Hold(lease.task, lease.epoch))
        told = await back.report(returned(lease))
        assert isinstance(told, Recorded)
        assert told.refused
        await desk.schedule()
        assert [each.epoch for each in back.leases()] == [EPOCH_JUMP + 1]


async def test_the_term_is_raised_past_those_of_the_backup_and_of_the_replaced_database(
    new_site: NewSite, database: str, tmp_path: Path
) -> None:
    site = new_site("site", database)
    async with site.serving() as desk:
        old = desk.server.picture.term
        await site.backed_up(tmp_path / "pool.backup")
    for _ in range(3):
        async with site.serving() as desk:
            newest = desk.server.picture.term
    assert newest > old  # control
    done = await site.restored(tmp_path / "pool.backup", force=True)
    assert done.fenced.term == newest + TERM_JUMP


async def test_sessions_and_unused_invitations_end_and_the_restore_is_audited(
    new_site: NewSite, database: str, tmp_path: Path
) -> None:
    site, other = new_site("site", database), new_site("other", database)
    async with site.serving(registration="open") as desk:
        account = {"name": "ann", "password": "a long password"}
        await desk.bare.post("/v1/users", json=account)
        signed = await desk.bare.post("/v1/auth/password", json=account)
        token = signed.json()["access_token"]
        link = await desk.post("/v1/nodes/invites", {"expires_in_s": 86_400})
        assert (signed.status_code, link.status_code) == (200, 201), (signed.text, link.text)
        await site.backed_up(tmp_path / "pool.backup")
    other.clock.instant = site.clock.instant
    done = await other.restored(tmp_path / "pool.backup")
    assert (done.fenced.sessions, done.fenced.invitations) == (1, 1)
    async with other.serving() as desk:
        headers = {"authorization": f"Bearer {token}"}
        assert (await desk.bare.get("/v1/me", headers=headers)).status_code == 401
        newest = (await desk.get("/v1/audit?limit=1")).json()["items"][0]
        assert newest["action"] == "pool.restore"
        assert newest["facts"]["tasks"] == "0"
        assert (await desk.get("/v1/audit?verify=true")).json()["whole"]


async def test_proofs_of_nodes_made_before_the_restore_are_not_accepted(
    new_site: NewSite, database: str, tmp_path: Path
) -> None:
    """The backup has no used proofs: without the fence a recorded request would be accepted a second time."""
    site, other = new_site("site", database), new_site("other", database)
    async with site.serving() as desk:
        agent = await desk.agent()
        await site.backed_up(tmp_path / "pool.backup")
        async with desk.http_of(agent) as http:
            sent = http.build_request("GET", f"/v1/artifacts/{BLOB_SHA256}")
            assert (
                await http.send(sent)
            ).status_code == 404  # authenticated: there is no such artifact
        recorded = dict(sent.headers)
    other.clock.instant = site.clock.instant + 20_000_000  # within the life of a proof
    await other.restored(tmp_path / "pool.backup")
    async with other.serving() as desk:
        replayed = await desk.bare.get(f"/v1/artifacts/{BLOB_SHA256}", headers=recorded)
        assert replayed.status_code == 401
        async with desk.http_of(agent) as http:  # with a proof made now
            assert (await http.get(f"/v1/artifacts/{BLOB_SHA256}")).status_code == 404
        await desk.server.store.write(forget_the_restore())
    async with other.serving() as desk:  # control: without the fence the replay is accepted
        replayed = await desk.bare.get(f"/v1/artifacts/{BLOB_SHA256}", headers=recorded)
        assert replayed.status_code == 404


async def test_a_target_that_is_not_empty_is_refused_and_unchanged(
    new_site: NewSite, database: str, tmp_path: Path
) -> None:
    site, other = new_site("site", database), new_site("other", database)
    async with site.serving():
        await site.backed_up(tmp_path / "pool.backup")
    async with other.serving() as desk:
        await desk.command(name="precious")
    before = await other.rows()
    with pytest.raises(Conflict, match="--force"):
        await other.restored(tmp_path / "pool.backup")
    if database == "postgresql":  # another machine's directory is empty, the database is not
        elsewhere = Site(tmp_path / "third", other.url)
        with pytest.raises(Conflict, match="--force"):
            await elsewhere.restored(tmp_path / "pool.backup")
    assert await other.rows() == before
    done = await other.restored(tmp_path / "pool.backup", force=True)
    assert done.tasks == 0
    assert not (await other.rows())["tasks"]
    assert done.replaced is not None
    assert (done.replaced / "master.key").exists()


async def test_a_restore_beside_a_running_server_is_refused(
    new_site: NewSite, database: str, tmp_path: Path
) -> None:
    site = new_site("site", database)
    async with site.serving():
        await site.backed_up(tmp_path / "pool.backup")
        before = await site.rows()
        if database == "sqlite":
            async with lock_for_serving(site.settings().store_url):  # as `gpool server` does
                with pytest.raises(Conflict, match="stop that server"):
                    await site.restored(tmp_path / "pool.backup", force=True)
        else:
            with pytest.raises(Conflict, match="stop every server"):
                await site.restored(tmp_path / "pool.backup", force=True)
        assert await site.rows() == before


async def test_a_damaged_backup_changes_nothing(
    new_site: NewSite, database: str, tmp_path: Path
) -> None:
    site, other = new_site("site", database), new_site("other", database)
    async with site.serving() as desk:
        await some_work(desk)
        await site.backed_up(tmp_path / "pool.backup")
    whole = (tmp_path / "pool.backup").read_bytes()
    (tmp_path / "cut").write_bytes(whole[:-1000])
    changed = bytearray(whole)
    changed[len(whole) // 2] ^= 1
    (tmp_path / "changed").write_bytes(changed)
    for name, secret, why in (
        ("cut", SECRET, "ends early"),
        ("changed", SECRET, "damaged"),
        ("pool.backup", "another passphrase", "passphrase is wrong"),
    ):
        with pytest.raises(Invalid, match=why):
            await other.restored(tmp_path / name, secret=secret)
        assert not other.data.exists()
    await other.restored(tmp_path / "pool.backup")  # control


async def test_a_backup_of_a_newer_schema_is_refused(new_site: NewSite, tmp_path: Path) -> None:
    with (tmp_path / "pool.backup").open("wb") as file:
        writer = ArchiveWriter(file, SECRET, CHEAP)
        writer.add(BackupManifest("99.0", "9999", "sqlite", 0, [], True, False))
        writer.close()
    other = new_site("other", "sqlite")
    with pytest.raises(Invalid, match=r"schema 9999 of gpool 99\.0.*or newer"):
        await other.restored(tmp_path / "pool.backup")
    assert not other.data.exists()


@pytest.mark.parametrize(
    "record",
    [
        TableHead("users; DROP TABLE users", ["id"]),
        TableHead("users", ['id") VALUES (1); --']),
        ArtifactHead("../../../etc/cron.d/gpool", 0),
        ArchivedKey("../authorized_keys", b""),
    ],
)
async def test_names_in_a_backup_that_somebody_else_made_become_neither_sql_nor_paths(
    new_site: NewSite, tmp_path: Path, record: Record
) -> None:
    with (tmp_path / "pool.backup").open("wb") as file:
        writer = ArchiveWriter(file, SECRET, CHEAP)
        writer.add(BackupManifest("0", newest_migration(), "sqlite", 0, [], True, False))
        writer.add(record)
        writer.add(ArchiveEnd({}, 0, []))
        writer.close()
    other = new_site("other", "sqlite")
    with pytest.raises(Invalid, match="cannot be used"):
        await other.restored(tmp_path / "pool.backup")
    assert not other.data.exists()


async def test_a_newer_database_is_not_backed_up(new_site: NewSite, tmp_path: Path) -> None:
    site = new_site("site", "sqlite")
    async with site.serving():
        pass
    with sqlite3.connect(site.data / "gpool.db") as raw:
        raw.execute("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(Invalid, match="use the version of the server"):
        await site.backed_up(tmp_path / "pool.backup")
    assert os.listdir(tmp_path) == ["site"]


async def test_a_backup_of_an_older_schema_is_migrated(
    new_site: NewSite, database: str, tmp_path: Path
) -> None:
    """As a server one release back made it: the columns of the last migration are not there."""
    site, other = new_site("site", "sqlite"), new_site("other", database)
    site.data.mkdir()
    upgrade_sqlite(site.data / "gpool.db", "0013")
    (site.data / "master.key").write_text("A" * 43 + "=\n")
    (site.data / "master.key").chmod(0o600)
    file = site.data / "artifacts" / BLOB_SHA256[:2] / BLOB_SHA256[2:4] / BLOB_SHA256
    file.parent.mkdir(parents=True)
    file.write_bytes(BLOB)
    with sqlite3.connect(site.data / "gpool.db") as raw:
        raw.execute("INSERT INTO artifacts VALUES (?, ?, 1)", (BLOB_SHA256, len(BLOB)))
    await site.backed_up(tmp_path / "pool.backup")
    done = await other.restored(tmp_path / "pool.backup")
    assert done.manifest.revision == "0013"
    rows = await other.rows()
    assert rows["alembic_version"] == [(newest_migration(),)]
    assert rows["artifacts"] == [(BLOB_SHA256, len(BLOB), 1, "", None)]


async def test_the_archive_leaves_out_processes_and_holds_the_keys(
    new_site: NewSite, database: str, tmp_path: Path
) -> None:
    site = new_site("site", database)
    async with site.serving() as desk:
        await desk.agent()
        done = await site.backed_up(tmp_path / "pool.backup")
    found = contents(tmp_path / "pool.backup")
    tables = {record.name for record in found if hasattr(record, "columns")}
    assert not tables & LEFT_OUT
    assert {"tasks", "server_secrets", "audit"} <= tables
    keys = {record.name for record in found if isinstance(record, ArchivedKey)}
    assert {"master.key", "server.key", "operator.key"} <= keys
    assert done.has_master_key
    assert (tmp_path / "pool.backup").stat().st_mode & 0o077 == 0


async def test_a_master_key_from_outside_is_not_in_the_backup_and_is_asked_for(
    new_site: NewSite, database: str, tmp_path: Path
) -> None:
    site, other = new_site("site", database), new_site("other", database)
    given, another = "ab" * 32, "cd" * 32
    async with site.serving(master_key=given):
        done = await site.backed_up(tmp_path / "pool.backup", master_key=given)
    assert not done.has_master_key
    found = contents(tmp_path / "pool.backup")
    assert not [
        each for each in found if isinstance(each, ArchivedKey) and each.name == "master.key"
    ]
    for settings in ({}, {"master_key": another}):
        with pytest.raises(Invalid, match="GPOOL_SERVER_MASTER_KEY"):
            await other.restored(tmp_path / "pool.backup", **settings)
        assert not other.data.exists()
    await other.restored(tmp_path / "pool.backup", master_key=given)
    async with other.serving(master_key=given) as desk:
        assert (await desk.get("/v1/me")).status_code == 200


async def test_a_backup_never_creates_a_master_key(new_site: NewSite, tmp_path: Path) -> None:
    site = new_site("site", "sqlite")
    async with site.serving():
        pass
    (site.data / "master.key").unlink()
    with pytest.raises(NotFound, match="no master key"):
        await site.backed_up(tmp_path / "pool.backup")
    assert not (site.data / "master.key").exists()


async def test_a_backup_replaces_no_file(new_site: NewSite, tmp_path: Path) -> None:
    site = new_site("site", "sqlite")
    async with site.serving():
        await site.backed_up(tmp_path / "pool.backup")
        before = (tmp_path / "pool.backup").read_bytes()
        with pytest.raises(Conflict, match="exists"):
            await site.backed_up(tmp_path / "pool.backup")
    assert (tmp_path / "pool.backup").read_bytes() == before


async def test_a_lost_artifact_is_named_and_links_of_a_killed_backup_are_removed(
    new_site: NewSite, tmp_path: Path
) -> None:
    site = new_site("site", "sqlite")
    left = site.data / "artifacts" / "backup-of-a-killed-process"
    async with site.serving() as desk:
        await desk.http.put(f"/v1/artifacts/{BLOB_SHA256}", content=BLOB)
        left.mkdir()
        site.artifact_file(BLOB_SHA256).unlink()
        done = await site.backed_up(tmp_path / "pool.backup")
    assert done.lost == (BLOB_SHA256,)
    assert not [
        each for each in contents(tmp_path / "pool.backup") if isinstance(each, ArtifactHead)
    ]
    assert not left.exists()
    assert sorted(os.listdir(site.data / "artifacts"))[-1] == "incoming"


async def test_artifacts_of_a_bucket_stay_there_or_are_read_into_the_backup(
    new_site: NewSite, tmp_path: Path, bucket: dict[str, Any]
) -> None:
    site, other, third = (new_site(name, "sqlite") for name in ("site", "other", "third"))
    async with site.serving(**bucket) as desk:
        await desk.http.put(f"/v1/artifacts/{BLOB_SHA256}", content=BLOB)
        short = await site.backed_up(tmp_path / "short", **bucket)
        whole = await site.backed_up(tmp_path / "whole", with_bucket=True, **bucket)
    assert (short.artifacts, short.in_bucket) == (0, 1)
    assert (whole.artifacts, whole.in_bucket) == (1, 0)
    await other.restored(tmp_path / "short", **bucket)
    async with other.serving(**bucket) as desk:  # the bucket is still there
        assert (await desk.get(f"/v1/artifacts/{BLOB_SHA256}")).content == BLOB
    await third.restored(tmp_path / "whole")
    async with third.serving() as desk:  # and here it is not
        assert (await desk.get(f"/v1/artifacts/{BLOB_SHA256}")).content == BLOB
