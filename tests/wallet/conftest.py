"""Where the public EIP-4361 vectors lie, for the tests that ask for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _siwe_folder() -> Path | None:
    """Beside the repository, or beside the checkout that a git worktree belongs to."""
    places = [ROOT]
    link = ROOT / ".git"
    if link.is_file():
        places.append(Path(link.read_text().removeprefix("gitdir:").strip()).parents[2])
    folders = [place.parent / "shared" / "data" / "siwe" for place in places]
    return next((folder for folder in folders if folder.is_dir()), None)


@pytest.fixture(scope="session")
def public() -> Callable[[str], dict[str, Any]]:
    """`public("parsing_positive")` is that file of the public vectors; skips where they are not there."""
    folder = _siwe_folder()

    def load(name: str) -> dict[str, Any]:
        if folder is None:
            pytest.skip("the public EIP-4361 vectors are not here (../shared/data/siwe)")
        found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
        return found

    return load


@pytest.fixture(scope="session")
def own() -> Callable[[str], Any]:
    """`own("merkle")` is a file of `vectors/`, made by the tool it names."""
    return lambda name: json.loads((Path(__file__).parent / "vectors" / f"{name}.json").read_text())
