"""Stores that encrypt, in place of those of `tests/store`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpool.server.encryption.account_keys import AccountKeys
from gpool.server.identity.envelope import master
from tests.store.store_pool import Database


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    made = Database(url, AccountKeys(lambda: (master(b"k" * 32),), is_on=True))
    yield made
    made.close()
