"""Files and folders that CONTRIBUTING and the architecture page name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BASES = (ROOT, ROOT / "src" / "gpool")
NAMED = re.compile(r"`([a-z_]+(?:/[A-Za-z0-9_.-]+)+/?)`")


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_every_path_on_the_page_exists(page: str) -> None:
    named = sorted(set(NAMED.findall((ROOT / page).read_text(encoding="utf-8"))))
    assert len(named) > 10
    assert [name for name in named if not is_there(name)] == []


def is_there(name: str) -> bool:
    """A path from the root or from src/gpool, where a module may be named without its ending."""
    return any(
        (base / name).exists() or (base / f"{name}.py").exists() or _is_member(base, name)
        for base in BASES
    )


def _is_member(base: Path, name: str) -> bool:
    """`core/lifecycle.end_move`: a name that a module defines."""
    path, _, member = name.rpartition(".")
    module = base / f"{path}.py"
    return bool(path) and module.is_file() and f"def {member}(" in module.read_text("utf-8")
