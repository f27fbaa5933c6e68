"""The command line over the SDK's stand-in pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gpool import Client
from gpool.cli.main import cli
from tests.client.standin import Pool

Gpool = Callable[..., Result]


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
def client(pool: Pool) -> Iterator[Client]:
    with Client("http://pool.test", "gpk_test", transport=pool) as made:
        yield made


@pytest.fixture
def gpool(client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gpool:
    """`gpool("ps", "--json")` in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *args: CliRunner().invoke(cli, list(args), obj=client)
