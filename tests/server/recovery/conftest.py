"""Both databases for a pool that is backed up and restored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.server.recovery.recovery_pool import Site
from tests.store.conftest import postgres, postgres_server

__all__ = ["postgres", "postgres_server"]


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def new_site(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[str, str], Site]:
    """Makes an empty machine of a name: a data directory and a database of the given kind."""
    urls: list[str] = []
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if "postgresql" in parameters.values():
        fresh: Callable[..., str] = request.getfixturevalue("postgres")
        urls = [fresh("template0") for _ in range(2)]

    def made(name: str, kind: str) -> Site:
        return Site(tmp_path / name, urls.pop() if kind == "postgresql" else None)

    return made
