"""The base install, without extras: verbs that need one say which."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest

import gpool

RUN = "import sys; sys.path[:] = [{place!r}, *[p for p in sys.path if 'site-packages' not in p and p]]; from gpool.cli.main import main; main({args!r})"  # fmt: skip


def base_packages(name: str, known: dict[str, Distribution]) -> None:
    """gpool's requirements without extras, and theirs."""
    key = name.lower().replace("_", "-")
    if key in known:
        return
    known[key] = found = distribution(name)
    for line in found.requires or ():
        if ";" not in line or "extra" not in line.partition(";")[2]:
            needed = re.match(r"[A-Za-z0-9._-]+", line)
            assert needed is not None
            try:
                base_packages(needed.group(), known)
            except ModuleNotFoundError:  # for another platform
                continue


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with gpool and exactly the packages of its base install."""
    place = tmp_path_factory.mktemp("base")
    known: dict[str, Distribution] = {}
    base_packages("gpool", known)
    del known["gpool"]
    (place / "gpool").symlink_to(Path(gpool.__file__).parent)
    for found in known.values():
        for top in {Path(file).parts[0] for file in found.files or () if ".." not in str(file)}:
            target = Path(str(found.locate_file(top)))
            if target.exists() and not (place / top).exists():
                (place / top).symlink_to(target)
    return place


def typed(base: Path, home: Path, *args: str) -> subprocess.CompletedProcess[str]:
    code = RUN.format(place=str(base), args=list(args))
    env = {"GPOOL_HOME": str(home), "PATH": "/usr/bin:/bin", "HOME": str(home)}
    return subprocess.run(
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, env=env, check=False
    )


@pytest.mark.parametrize(
    ("args", "extra"),
    [
        (("join", "gpool://127.0.0.1:1/join/x"), "agent"),
        (("up",), "server"),
        (("server",), "server"),
        (("node", "doctor"), "agent"),
        (("service", "install", "agent"), "agent"),
    ],
)
def test_a_verb_without_its_packages_names_the_extra(
    base: Path, tmp_path: Path, args: tuple[str, ...], extra: str
) -> None:
    done = typed(base, tmp_path, *args)
    assert done.returncode == 2, done.stderr
    assert f"pip install 'gpool[{extra}" in done.stderr
    assert "bug in gpool" not in done.stderr


def test_a_verb_of_the_base_install_needs_no_extra(base: Path, tmp_path: Path) -> None:
    assert "Run a command on the pool" in typed(base, tmp_path, "--help").stdout
    done = typed(base, tmp_path, "--url", "http://127.0.0.1:1", "ps")
    assert done.returncode == 5, done.stderr
