"""`gpool server --migrate-only` on both databases, as the migration Job of Kubernetes runs it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from gpool.server.store.migrations import newest_migration
from tests.tools.processes import GPOOL, PATIENCE_S


def migrate(folder: Path, url: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("GPOOL_")}
    return subprocess.run(
        [*GPOOL, "server", "--migrate-only", "--data", str(folder / "data")],
        env={**inherited, "HOME": str(folder), "GPOOL_SERVER_DATABASE_URL": url},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.fixture(params=["sqlite", "postgresql"])
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/store.db"
    fresh: Callable[..., str] = request.getfixturevalue("postgres")
    return fresh("template0")


def test_an_empty_database_gets_the_schema_and_a_second_run_finds_nothing_to_do(
    empty: str, tmp_path: Path
) -> None:
    first = migrate(tmp_path, empty)
    assert first.returncode == 0, first.stderr
    newest = newest_migration()
    assert first.stdout == f"Migrated an empty database to revision {newest}.\n"
    second = migrate(tmp_path, empty)
    assert second.stdout == f"The database has the newest schema: revision {newest}.\n"
    assert not (tmp_path / "data" / "operator.key").exists()  # nothing was served


def test_a_database_that_does_not_answer_ends_the_job_with_exit_code_5(
    require: Callable[[str], None], tmp_path: Path
) -> None:
    require("postgres")
    done = migrate(tmp_path, "postgresql://nobody@127.0.0.1:1/none")
    assert done.returncode == 5
    assert "PostgreSQL cannot be reached" in done.stderr
    assert "Traceback" not in done.stderr
