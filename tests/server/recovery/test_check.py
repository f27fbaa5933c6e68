"""`gpool admin check`: a sound pool is clean while it serves; lost files, keys and a changed audit record are found."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable

import pytest

from gpool.core.errors import Invalid
from gpool.server.identity.audit import AuditAnchor
from gpool.server.recovery.anchors import LogAuditAnchors
from gpool.server.recovery.check import CheckReport, check_pool, parse_anchor
from gpool.server.store.protocol import Operation, Statement, operation
from tests.server.recovery.recovery_pool import Site
from tests.server.recovery.test_restore import BLOB, BLOB_SHA256, some_work
from tests.tools.ledger_charges import charged

pytestmark = pytest.mark.anyio
ANCHOR = re.compile(r"\d+:[0-9a-f]{64}")
NewSite = Callable[[str, str], Site]


@operation
def changed(sql: str) -> Operation[None]:
    yield Statement(sql)


def failing(report: CheckReport) -> dict[str, str]:
    return {each.check: each.id for each in report.violations}


async def test_a_serving_pool_is_clean_and_planted_faults_are_named(
    new_site: NewSite, database: str
) -> None:
    site = new_site("site", database)
    async with site.serving() as desk:
        _, running, _ = await some_work(desk)
        report = await check_pool(site.settings())
        assert (report.violations, report.truncated) == ((), ())
        assert report.checks > 30
        number, _, digest = report.audit_head.partition(":")
        assert (int(number) > 0, len(digest)) == (True, 64)
        site.artifact_file(BLOB_SHA256).unlink()
        await desk.server.store.write(
            changed("UPDATE tasks SET holding = 0 WHERE status = 'running'")
        )
        found = failing(await check_pool(site.settings()))
        assert found == {"leased_task": running, "artifact_files": BLOB_SHA256}


async def test_a_changed_or_shortened_audit_record_is_found_by_its_chain_or_an_anchor(
    new_site: NewSite, database: str
) -> None:
    site = new_site("site", database)
    async with site.serving() as desk:
        for _ in range(2):
            await desk.post("/v1/nodes/invites", {"expires_in_s": 60})
        head = parse_anchor((await check_pool(site.settings())).audit_head)
        assert failing(await check_pool(site.settings(), [head])) == {}  # control
        other = AuditAnchor(head.sequence, hashlib.sha256(b"another").digest())
        later = AuditAnchor(head.sequence + 1, other.hash)
        for anchor in (other, later):
            assert "audit" in failing(await check_pool(site.settings(), [anchor]))
        write = desk.server.store.write
        # shortened, with a head that fits: only an anchor from outside shows it
        await write(changed(f"DELETE FROM audit WHERE number = {head.sequence}"))  # noqa: S608
        last = "SELECT number FROM audit ORDER BY number DESC LIMIT 1"
        await write(
            changed(
                f"UPDATE audit_head SET number = ({last}), hash = (SELECT hash FROM audit WHERE number = ({last}))"  # noqa: S608
            )
        )
        assert failing(await check_pool(site.settings())) == {}
        assert "audit" in failing(await check_pool(site.settings(), [head]))
        await write(changed("UPDATE audit SET actor = 'nobody' WHERE number = 1"))
        assert failing(await check_pool(site.settings())) == {"audit": "1"}


async def test_a_changed_entry_of_the_ledger_is_named(new_site: NewSite, database: str) -> None:
    site = new_site("site", database)
    async with site.serving() as desk:
        me = (await desk.get("/v1/me")).json()["id"]
        await charged(desk.server, me, 100)
        assert failing(await check_pool(site.settings())) == {}  # control
        await desk.server.store.write(
            changed("UPDATE ledger_entries SET amount = 101 WHERE amount = 100")
        )
        report = await check_pool(site.settings())
        assert set(failing(report)) == {"ledger"}
        assert "transfer charge" in {each.id for each in report.violations}


async def test_a_lost_master_key_and_a_lost_data_key_are_found(
    new_site: NewSite, database: str
) -> None:
    site = new_site("site", database)
    async with site.serving() as desk:
        key = (site.data / "master.key").read_bytes()
        (site.data / "master.key").write_text("A" * 43 + "=\n")
        assert set(failing(await check_pool(site.settings()))) == {"data_keys"}
        (site.data / "master.key").unlink()
        assert failing(await check_pool(site.settings())) == {"data_keys": "master key"}
        (site.data / "master.key").write_bytes(key)
        (site.data / "master.key").chmod(0o600)
        assert failing(await check_pool(site.settings())) == {}
        await desk.server.store.write(changed("DELETE FROM data_keys"))
        assert set(failing(await check_pool(site.settings()))) == {"sealed_fields"}


async def test_the_list_is_bounded_and_says_so(new_site: NewSite) -> None:
    site = new_site("site", "sqlite")
    async with site.serving() as desk:
        for _ in range(5):
            await desk.command()
        await desk.server.store.write(changed("UPDATE tasks SET holding = 1"))
        report = await check_pool(site.settings(), most=2)
        assert report.truncated == ("queued_task", "lease_place")
        assert len(report.violations) == 4


async def test_an_anchor_that_is_none_is_refused() -> None:
    with pytest.raises(Invalid, match="no anchor"):
        parse_anchor("12")


async def test_an_artifact_deleted_during_the_check_is_no_violation(new_site: NewSite) -> None:
    site = new_site("site", "sqlite")
    async with site.serving() as desk:
        await desk.http.put(f"/v1/artifacts/{BLOB_SHA256}", content=BLOB)
        assert (await desk.http.delete(f"/v1/artifacts/{BLOB_SHA256}")).status_code == 204
        assert failing(await check_pool(site.settings())) == {}


async def test_anchors_in_the_log_are_those_that_the_check_takes(
    new_site: NewSite, caplog: pytest.LogCaptureFixture
) -> None:
    site = new_site("site", "sqlite")
    caplog.set_level(logging.INFO)
    async with site.serving() as desk:
        loop = LogAuditAnchors(desk.server)
        await loop.run_once(site.clock.now())
        assert anchors(caplog) == []  # no entry yet
        for _ in range(2):
            await desk.post("/v1/nodes/invites", {"expires_in_s": 60})
            await loop.run_once(site.clock.now())
            await loop.run_once(site.clock.now())  # nothing new
        first, second = anchors(caplog)
        assert failing(await check_pool(site.settings(), [first, second])) == {}
        await desk.server.store.write(changed("UPDATE audit SET actor = 'u' WHERE number = 1"))
        report = await check_pool(site.settings(), [first])
        assert failing(report) == {"audit": "1"}


def anchors(caplog: pytest.LogCaptureFixture) -> list[AuditAnchor]:
    lines = [str(record.__dict__) for record in caplog.records if "audit anchor" in str(record.msg)]
    return [parse_anchor(found[0]) for line in lines if (found := ANCHOR.search(line))]
