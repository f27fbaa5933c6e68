"""A client and the stand-in pool behind its door."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpool import Client
from tests.client.standin import Pool


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
def client(pool: Pool) -> Iterator[Client]:
    with Client("http://pool.test", "gpk_test", transport=pool) as made:
        yield made
