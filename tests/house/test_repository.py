"""The repository keeps its own rules: sizes, contracts, generated pages, nothing of one machine in it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpool.core import lifecycle
from tests.structure.limits import LONGEST_FILE

ROOT = Path(__file__).resolve().parents[2]

# Written in pieces, so that this file does not find itself.
MACHINE_PATHS = re.compile(
    r"(?<![\w./])/(?:ro" r"ot|ho" r"me|wo" r"rk|op" r"t/pypi|U" r"sers)/[\w.]+"
)
REGISTRIES = re.compile(
    "|".join(
        (
            "files" r"\.pythonhosted",
            "py" r"pi\.org",
            "registry" r"\.npmjs",
            "deb" r"\.debian\.org",
            "quay" r"\.io/",
        )
    )
)
ADDRESS_OPTIONS = re.compile(
    r"^\s*(-i|--(extra-)?index-url|-f|--find-links|--trusted-host)\b|://|\bfile:"
)


def tracked() -> list[Path]:
    """Every file git knows or would add, as text files only."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listing.returncode:
        pytest.skip("not a git checkout: there is no list of tracked files")
    names = [name for name in listing.stdout.decode().split("\0") if name]
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def lines_matching(pattern: re.Pattern[str]) -> Iterator[str]:
    for path in tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError):  # no text; or taken away meanwhile
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if pattern.search(line):
                yield f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"


def test_every_import_contract_holds() -> None:
    """In its own process: import-linter disables all loggers, which later tests read."""
    lint = [str(Path(sys.executable).with_name("lint-imports")), "--no-logo", "--no-cache"]
    done = subprocess.run(lint, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_no_source_file_is_longer_than_600_lines() -> None:
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines())
        for folder in ("src", "tests", "bench")
        for path in (ROOT / folder).rglob("*.py")
    }
    assert {name: length for name, length in lengths.items() if length > LONGEST_FILE} == {}


def test_every_module_says_what_it_is() -> None:
    silent = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "src").rglob("*.py")
        if (text := path.read_text().lstrip()) and not text.startswith('"""')
    ]
    assert silent == []


def test_nothing_tracked_names_a_machines_own_paths() -> None:
    assert list(lines_matching(MACHINE_PATHS)) == []


def test_nothing_tracked_names_a_package_registry() -> None:
    assert list(lines_matching(REGISTRIES)) == []


def test_nothing_is_left_undone() -> None:
    unfinished = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X|raise NotImplemented" r"Error)\b")
    assert list(lines_matching(unfinished)) == []


def test_the_lifecycle_page_is_what_the_table_says() -> None:
    assert (ROOT / "docs" / "lifecycle.md").read_text() == lifecycle.as_markdown()


def pages(place: str) -> list[Path]:
    return sorted((ROOT / place).rglob("*.md")) if (ROOT / place).is_dir() else [ROOT / place]


@pytest.mark.parametrize("place", ["README.md", "CONTRIBUTING.md", "docs", "bench/README.md"])
def test_links_between_pages_lead_somewhere(place: str) -> None:
    dead = [
        f"{file.relative_to(ROOT)} -> {target}{anchor}"
        for file in pages(place)
        for target, anchor in re.findall(r"\]\(([^)#:]*)(#[^)]*)?\)", file.read_text())
        if not leads_somewhere(file.parent / target if target else file, anchor)
    ]
    assert dead == []


def leads_somewhere(target: Path, anchor: str) -> bool:
    if not target.exists() or not anchor:
        return target.exists()
    headings = re.findall(r"(?m)^#+ (.*)$", target.read_text())
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return anchor[1:] in {heading.strip().replace(" ", "-") for heading in plain}


PROSE = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs", "bench/README.md"]


@pytest.mark.parametrize("place", PROSE)
def test_prose_lines_have_at_most_100_characters(place: str) -> None:
    """Longer lines make diffs unreadable. Tables and code blocks are exempt."""
    long = []
    for file in pages(place):
        prose = re.sub(r"(?ms)^ *```.*?^ *```", "", file.read_text())
        long += [
            f"{file.relative_to(ROOT)}: {line[:60]}"
            for line in prose.splitlines()
            if len(line) > 100 and not line.startswith(("|", "    "))
        ]
    assert long == []


@pytest.mark.parametrize("lock", ["base", "all", "build", "server", "agent", "dev"])
def test_a_lock_is_hashed_and_names_no_address(lock: str) -> None:
    text = (ROOT / "requirements" / f"{lock}.txt").read_text()
    assert [line for line in text.splitlines() if ADDRESS_OPTIONS.search(line)] == []
    for name, block in pins(text):
        assert "--hash=sha256:" in block, f"{name} in {lock}.txt has no hash"


def test_the_locks_agree_on_every_version() -> None:
    folder = ROOT / "requirements"
    dev = dict(versions((folder / "dev.txt").read_text()))
    for lock in ("base", "all", "build", "server", "agent"):
        for name, version in versions((folder / f"{lock}.txt").read_text()):
            assert version in dev[name], f"{name}: {version} in {lock}.txt, {dev[name]} in dev.txt"


def test_the_base_install_stays_under_20_packages() -> None:
    text = (ROOT / "requirements" / "base.txt").read_text()
    here = [name for name, block in pins(text) if "== 'emscripten'" not in block]
    assert len(here) < 20, here


def test_importing_gpool_needs_nothing_but_the_base_install() -> None:
    """Neither the package nor its command may pull in what only servers and agents have."""
    code = (
        "import sys, gpool, gpool.cli.main\n"
        "heavy = {'fastapi', 'pydantic', 'sqlalchemy', 'numpy', 'psutil', 'uvicorn', 'starlette'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def pins(text: str) -> list[tuple[str, str]]:
    """(name, its block) for every pinned package of a lock."""
    blocks = re.split(r"(?m)^(?=[A-Za-z0-9])", text)
    return [(block.split("==")[0], block) for block in blocks if "==" in block]


def versions(text: str) -> Iterator[tuple[str, str]]:
    """(name, all its pinned versions joined): a package may have one for each Python."""
    found: dict[str, list[str]] = {}
    for name, block in pins(text):
        found.setdefault(name, []).append(re.split(r"[\s;\\]", block.split("==")[1])[0])
    return ((name, " ".join(sorted(pinned))) for name, pinned in found.items())
