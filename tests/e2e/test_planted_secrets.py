"""A thousand secrets go through a real pool; afterwards none of them lies anywhere on its disks."""

from __future__ import annotations

import hashlib
import os
import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

from tests.tools.processes import Pool

TASKS, EACH = 10, 100
TELL = (
    "import os, hashlib; print(hashlib.sha256("
    "''.join(os.environ[n] for n in sorted(os.environ) if n.startswith('SECRET_')).encode()).hexdigest())"
)


def files_beneath(folder: Path) -> Iterator[Path]:
    for above, _, names in os.walk(folder):
        paths = (Path(above, name) for name in names)
        yield from (path for path in paths if path.is_file() and not path.is_symlink())


def found_in(folder: Path, values: list[str]) -> list[tuple[str, Path]]:
    """Every value that lies in a file beneath, in plain bytes; what the pool takes away meanwhile lies nowhere."""
    found: list[tuple[str, Path]] = []
    for path in files_beneath(folder):
        with suppress(FileNotFoundError):
            data = path.read_bytes()
            found += [(value, path) for value in values if value.encode() in data]
    return found


def test_a_thousand_planted_secrets_are_found_nowhere(pool: Pool, tmp_path: Path) -> None:
    planted: list[str] = []
    plain = f"plain-{secrets.token_hex(16)}"
    for number in range(TASKS):
        given = {f"SECRET_{i:03}": f"planted-{secrets.token_hex(16)}" for i in range(EACH)}
        planted += given.values()
        document = {
            "command": ["python3", "-c", TELL],
            "secrets": given,
            "env": {"PLAIN": plain},
            "name": f"planted {number}",
        }
        [task] = pool.ask("POST", "/v1/tasks", document).json()["ids"]
        pool.until_status(task, "succeeded")
        printed = pool.ask("GET", f"/v1/tasks/{task}/logs").json()["items"]
        told = "".join(item["text"] for item in printed).strip()
        expected = "".join(given[name] for name in sorted(given))
        assert told == hashlib.sha256(expected.encode()).hexdigest()
    assert len(set(planted)) == TASKS * EACH

    [database] = [path for path in files_beneath(pool.directory) if path.name == "gpool.db"]
    with (
        closing(sqlite3.connect(database)) as live,
        closing(sqlite3.connect(tmp_path / "backup.db")) as backup,
    ):
        live.backup(backup)
    searched = {path.name for path in files_beneath(pool.directory)}
    assert {"gpool.db", "gpool.db-wal"} <= searched
    assert any(name.endswith(".log") for name in searched)
    assert found_in(pool.directory, planted) == []
    assert found_in(tmp_path, planted) == []
    # The control: the same search does find what was not given as a secret.
    assert "gpool.db" in {
        path.name.removesuffix("-wal") for _, path in found_in(pool.directory, [plain])
    }
    assert found_in(tmp_path, [plain])
