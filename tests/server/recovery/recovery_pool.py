"""A machine with a data directory and a database, on which a server is opened, backed up and restored."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpool.server.app import close_server
from gpool.server.recovery.archive import ArchiveReader
from gpool.server.recovery.backup import BackupRequest, BackupSummary, back_up
from gpool.server.recovery.restore import RestoreRequest, RestoreSummary, restore
from gpool.server.recovery.snapshots import open_snapshot
from gpool.server.settings import Settings
from tests.server.server_desk import Desk, StoppedClock, open_desk
from tests.tools.processes import PATIENCE_S

SECRET = "correct horse battery staple"
CHEAP = (4, 8, 1)
"""Cost of scrypt in tests."""


@dataclass
class Site:
    data: Path
    url: str | None
    clock: StoppedClock = field(default_factory=StoppedClock)

    def settings(self, **given: Any) -> Settings:
        return Settings(data=self.data, database_url=self.url, **given)

    @asynccontextmanager
    async def serving(self, **given: Any) -> AsyncIterator[Desk]:
        """A server whose loops the test calls."""
        replicated = {} if self.url is None else {"replica_timeout_s": PATIENCE_S}
        desk = await open_desk(
            self.data, self.clock, database_url=self.url, **{**replicated, **given}
        )
        try:
            async with desk.http, desk.bare:
                yield desk
        finally:
            await close_server(desk.server)

    async def backed_up(self, file: Path, **given: Any) -> BackupSummary:
        options = {name: given.pop(name) for name in ("with_bucket",) if name in given}
        request = BackupRequest(self.settings(**given), file, SECRET, cost=CHEAP, **options)
        return await back_up(request, self.clock.now)

    async def restored(
        self, file: Path, *, force: bool = False, secret: str = SECRET, **given: Any
    ) -> RestoreSummary:
        request = RestoreRequest(self.settings(**given), file, secret, force)
        return await restore(request, self.clock.now)

    def artifact_file(self, sha256: str) -> Path:
        """File of the artifact, whose name has a random suffix."""
        [found] = self.settings().folder.glob(f"*/*/{sha256}*")
        return found

    async def rows(self) -> dict[str, list[Sequence[Any]]]:
        """All rows of the database, by table, sorted."""
        snapshot = await open_snapshot(self.settings().store_url)
        try:
            found: dict[str, list[Sequence[Any]]] = {}
            for table in await snapshot.tables():
                pages = [page async for page in snapshot.rows(table)]
                found[table.name] = sorted((tuple(row) for page in pages for row in page), key=repr)
            return found
        finally:
            await snapshot.close()


def contents(file: Path, secret: str = SECRET) -> list[Any]:
    with file.open("rb") as opened:
        return list(ArchiveReader(opened, secret).records())
