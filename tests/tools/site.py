"""Source of the documentation site: `python -m tests.tools.site FOLDER`, as `make site` calls it.

Copies docs/ and the project's own pages, adds reference pages generated from code, and writes mkdocs.yml with the
navigation. Every page of docs/guides is in it without an edit: those listed in docs/README.md in that order, then others.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from tests.tools.reference import cli_page, rest_page, sdk_page

ROOT = Path(__file__).resolve().parents[2]
PROJECT = {
    "README.md": "project/readme.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "SECURITY.md": "project/security.md",
    "bench/README.md": "project/benchmarks.md",
    "deploy/logging/README.md": "project/log-shipping.md",
}
"""Pages outside docs/, and their places on the site."""
TUTORIALS = ("consumer.md", "owner.md", "operator.md")
FIRST_REFERENCE = ("reference/cli.md", "reference/sdk.md", "options.md", "reference/rest.md", "settings.md", "metrics.md", "permissions.md")  # fmt: skip
LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>[^)#:\s]+)(?P<anchor>#[^)]*)?\)")

Navigation = list[dict[str, Any]]


def write_source(folder: Path) -> None:
    """Write docs/ and mkdocs.yml of the site into an empty or earlier folder."""
    target = folder / "docs"
    shutil.rmtree(target, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(ROOT / "docs", target)
    for source, place in PROJECT.items():
        (target / place).parent.mkdir(exist_ok=True)
        shutil.copyfile(ROOT / source, target / place)
    reference = target / "reference"
    reference.mkdir()
    for name, text in (("cli", cli_page()), ("sdk", sdk_page()), ("rest", rest_page())):
        (reference / f"{name}.md").write_text(text, encoding="utf-8")
    origins = {target / place: ROOT / source for source, place in PROJECT.items()}
    for page in sorted(target.rglob("*.md")):
        origin = origins.get(page, ROOT / "docs" / page.relative_to(target))
        page.write_text(_relinked(page, origin, target), encoding="utf-8")
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    config |= {"docs_dir": "docs", "site_dir": "site", "nav": navigation(target)}
    text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
    (folder / "mkdocs.yml").write_text(text, encoding="utf-8")


def _relinked(page: Path, origin: Path, target: Path) -> str:
    """The page with links as they are on the site; links to files that are not pages become their names."""

    def moved(found: re.Match[str]) -> str:
        to = (origin.parent / found["target"]).resolve()
        name = to.relative_to(ROOT).as_posix() if to.is_relative_to(ROOT) else ""
        if to.is_dir() and (to / "README.md").exists():
            name = f"{name}/README.md"
        place = PROJECT.get(name) or (
            name.removeprefix("docs/") if name.startswith("docs/") else ""
        )
        if not place.endswith(".md"):
            return f"{found['text']} (`{name}`)"
        path = Path("../" * len(page.parent.relative_to(target).parts)) / place
        return f"[{found['text']}]({path.as_posix()}{found['anchor'] or ''})"

    text = page.read_text(encoding="utf-8")
    return LINK.sub(moved, text)


def navigation(docs: Path) -> Navigation:
    """Sections and pages of the site, from the files that are there."""
    listed = re.findall(r"\]\(((?:guides/)?[\w-]+\.md)\)", (docs / "README.md").read_text("utf-8"))
    guides = _in_order(listed, _files(docs, "guides"))
    used = {*guides, "README.md"}
    reference = [name for name in _in_order([*FIRST_REFERENCE, *listed], [*_files(docs, "reference"), *_files(docs, "")]) if name not in used]  # fmt: skip
    tutorials = [f"tutorials/{name}" for name in TUTORIALS]
    sections = {
        "Tutorials": _in_order(tutorials, _files(docs, "tutorials")),
        "Guides": guides,
        "Reference": reference,
        "Measurements": _in_order(["measurements/README.md"], _files(docs, "measurements")),
        "Decisions": _in_order(["decisions/README.md"], _files(docs, "decisions")),
        "Project": _files(docs, "project"),
    }
    found: Navigation = [{"Home": "README.md"}]
    for title, names in sections.items():
        found.append({title: [{_title(docs / name): name} for name in names]})
    return found


def _files(docs: Path, folder: str) -> list[str]:
    place = docs / folder if folder else docs
    return sorted(path.relative_to(docs).as_posix() for path in place.glob("*.md"))


def _in_order(first: Iterable[str], there: list[str]) -> list[str]:
    """Files that are there: those named first, in that order, then the others."""
    ahead = [name for name in dict.fromkeys(first) if name in there]
    return [*ahead, *(name for name in there if name not in ahead)]


def _title(page: Path) -> str:
    heading = re.search(r"(?m)^# (?:\d+\. )?(.+)$", page.read_text("utf-8"))
    return heading.group(1).replace("`", "") if heading else page.stem


if __name__ == "__main__":
    write_source(Path(sys.argv[1]).absolute())
