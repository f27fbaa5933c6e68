"""A server's own PostgreSQL connections over TLS: `verify-full` checks authority and name, on every connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from urllib.parse import quote, urlencode

import pytest

from gpool.core.errors import Unreachable
from gpool.core.model import SECOND, Span
from gpool.server.replicas.membership import Membership, database_of
from gpool.server.store import open_store
from gpool.server.store.operations.identity import users
from tests.tools.tls_postgres import PASSWORD, USER, Authority, authority, tls_postgres


@pytest.fixture(scope="module")
def trusted() -> Authority:
    return authority("the pool's authority")


@pytest.fixture(scope="module")
def port(require: Callable[[str], None], trusted: Authority) -> Iterator[int]:
    require("postgres with TLS")
    with tls_postgres(trusted, "localhost") as port:
        yield port


def url(port: int, host: str, mode: str, root: Path | None = None) -> str:
    options = {"sslmode": mode} | ({"sslrootcert": str(root)} if root else {})
    return f"postgresql://{USER}:{quote(PASSWORD)}@{host}:{port}/postgres?{urlencode(options)}"


async def _used(address: str) -> list[bool]:
    """Open the store as a server does, use it, and return whether each of its connections is encrypted."""
    membership = Membership(
        database_of(address), 1, "https://pool.example", "test", Span(8 * SECOND)
    )
    store = await membership.open_store()
    try:
        await membership.start(lambda: None)
        assert await store.read(users.user_by_name("nobody")) is None
        connection = await import_module("asyncpg").connect(address)
        rows = await connection.fetch(
            "SELECT s.ssl FROM pg_stat_ssl s JOIN pg_stat_activity a ON a.pid = s.pid "
            "WHERE a.usename IS NOT NULL AND a.datname IS NOT NULL"
        )
        await connection.close()
    finally:
        await membership.stop()
        await store.close()
    return [row["ssl"] for row in rows]


def test_every_connection_of_a_server_is_encrypted_and_verified(
    port: int, trusted: Authority, tmp_path: Path
) -> None:
    root = trusted.write(tmp_path / "root.crt")
    found = asyncio.run(_used(url(port, "localhost", "verify-full", root)))
    assert len(found) >= 4  # lock, writer, reader, and this test's own
    assert all(found)


def test_a_database_of_another_authority_is_refused(port: int, tmp_path: Path) -> None:
    root = authority("somebody else").write(tmp_path / "root.crt")
    with pytest.raises(Unreachable, match="certificate verify failed"):
        asyncio.run(open_store(url(port, "localhost", "verify-full", root)))
    # the control: without the check the same database is opened
    asyncio.run(_used(url(port, "localhost", "require")))


def test_a_database_of_another_name_is_refused(
    port: int, trusted: Authority, tmp_path: Path
) -> None:
    root = trusted.write(tmp_path / "root.crt")
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1"):
        asyncio.run(open_store(url(port, "127.0.0.1", "verify-full", root)))
    # the control: without the check of the name the same database is opened
    asyncio.run(_used(url(port, "127.0.0.1", "verify-ca", root)))
