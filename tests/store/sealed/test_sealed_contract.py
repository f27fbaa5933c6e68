"""The store's contract of logs, reports, views and gangs again, with encryption."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.store.test_checkpoints import *  # noqa: F403
from tests.store.test_gang_story import *  # noqa: F403
from tests.store.test_logs import *  # noqa: F403
from tests.store.test_node_history import *  # noqa: F403
from tests.store.test_reports import *  # noqa: F403
from tests.store.test_tasks import *  # noqa: F403


@pytest.fixture
def url(migrated_file: Path, tmp_path: Path) -> str:
    """SQLite only: what differs between the databases is tested in `tests/server/encryption`."""
    shutil.copy(migrated_file, tmp_path / "store.db")
    return f"sqlite:///{tmp_path}/store.db"
