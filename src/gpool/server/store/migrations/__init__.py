"""Schema migrations: forward only, in process, for both databases. Imports no SQLAlchemy."""

from __future__ import annotations

from functools import cache
from pathlib import Path


@cache
def newest_migration() -> str:
    return max(path.name[:4] for path in (Path(__file__).parent / "versions").glob("[0-9]*.py"))
