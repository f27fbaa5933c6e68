"""A real PostgreSQL server, as the store's tests have it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.store.conftest import postgres, postgres_server

__all__ = ["postgres", "postgres_server", "url"]


@pytest.fixture
def url(postgres: Callable[[], str]) -> str:
    return postgres()
