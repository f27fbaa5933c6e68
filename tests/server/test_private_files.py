"""Files of the server are closed to other users of its machine, however the directory came about."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import pytest

from gpool.cli.lending.children import ChildProcess, Program
from gpool.server.app import open_server, private_directory
from gpool.server.settings import Settings


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def modes_in(data: Path) -> dict[str, int]:
    return {path.name: mode(path) for path in data.iterdir() if path.is_file()}


async def opened(data: Path) -> dict[str, int]:
    server = await open_server(Settings(data=data))
    try:
        return modes_in(data)
    finally:
        await server.identity.close()
        await server.store.close()


@pytest.mark.parametrize("before", ["new", "empty", "used"])
def test_database_and_directory_are_the_servers_alone(before: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    if before != "new":
        data.mkdir(mode=0o755)
        data.chmod(0o755)
    if before == "used":
        asyncio.run(opened(data))
        for path in data.glob("gpool.db*"):
            path.chmod(0o644)
        data.chmod(0o755)
    modes = asyncio.run(opened(data))
    assert mode(data) == 0o700
    assert {"gpool.db", "gpool.db-wal"} <= set(modes)
    assert {
        name: each for name, each in modes.items() if name.startswith("gpool.db") and each & 0o77
    } == {}


def test_a_directory_of_other_things_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    tmp_path.chmod(0o755)
    private_directory(tmp_path)
    assert mode(tmp_path) == 0o755


def test_the_logs_of_gpool_up_are_closed_to_others(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("of an earlier version\n")
    log.chmod(0o644)
    child = ChildProcess(Program("server", "this", {}, log))
    child.start()
    try:
        assert mode(log) == 0o600
    finally:
        child.stop()
