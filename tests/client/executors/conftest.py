"""A real pool with one node that runs its calls at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpool import Client
from tests.client.inprocess import RealPool


@pytest.fixture(scope="module")
def busy_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPool]:
    pool = RealPool(tmp_path_factory.mktemp("data"))
    joined = pool.join(cpus=16)
    yield pool
    joined.close()
    pool.close()


@pytest.fixture
def sdk(busy_pool: RealPool) -> Iterator[Client]:
    with Client("http://pool.test", busy_pool.key, transport=busy_pool.transport) as client:
        yield client
