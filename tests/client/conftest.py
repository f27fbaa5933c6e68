"""A client and the stand-in pool behind its door."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpool import Client
from tests.client.inprocess import Node, RealPool
from tests.client.standin import Pool


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
def client(pool: Pool) -> Iterator[Client]:
    with Client("http://pool.test", "gpk_test", transport=pool) as made:
        yield made


@pytest.fixture
def real(tmp_path: Path) -> Iterator[RealPool]:
    """The real application, without a socket."""
    pool = RealPool(tmp_path / "data")
    yield pool
    pool.close()


@pytest.fixture
def node(real: RealPool) -> Iterator[Node]:
    """A node that belongs to the operator."""
    joined = real.join()
    yield joined
    joined.close()
