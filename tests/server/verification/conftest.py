"""Both databases; on PostgreSQL the stored data is encrypted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.store.conftest import postgres, postgres_server

__all__ = ["postgres", "postgres_server"]


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Settings that name the store."""
    if request.param == "sqlite":
        return {}
    fresh: Callable[[], str] = request.getfixturevalue("postgres")
    return {"database_url": fresh(), "encrypt_data": True}
