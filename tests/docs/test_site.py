"""The documentation site: built offline and strictly, with every page in its navigation and nothing fetched by a browser."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

import gpool
from gpool.cli.main import cli
from tests.tools.site import ROOT, navigation, write_source

BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    write_source(folder)
    return folder


def listed(entry: Any) -> Iterator[str]:
    """Files of a navigation."""
    if isinstance(entry, str):
        yield entry
    else:
        for one in entry.values() if isinstance(entry, dict) else entry:
            yield from listed(one)


def test_every_page_is_in_the_navigation_once(source: Path) -> None:
    config = yaml.safe_load((source / "mkdocs.yml").read_text())
    docs = source / "docs"
    there = sorted(path.relative_to(docs).as_posix() for path in docs.rglob("*.md"))
    assert sorted(listed(config["nav"])) == there


def test_a_new_guide_is_picked_up_without_an_edit(source: Path) -> None:
    page = source / "docs" / "guides" / "brand-new.md"
    page.write_text("# Brand new\n")
    try:
        guides = next(one["Guides"] for one in navigation(source / "docs") if "Guides" in one)
    finally:
        page.unlink()
    assert guides[0] == {"First task": "guides/first-task.md"}  # the order of docs/README.md
    assert {"Brand new": "guides/brand-new.md"} in guides


def test_the_site_is_built_strictly_and_fetches_nothing(source: Path) -> None:
    argv = [BIN / "zensical", "build", "--strict", "--clean", "-f", source / "mkdocs.yml"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = list((source / "site").rglob("*.html"))
    assert len(pages) > 60
    fetched = re.compile(r"<(?:script|link|img)\b[^>]*(?:src|href)=\"?(https?://[^\"> ]+)")
    found = {url for page in pages for url in fetched.findall(page.read_text())}
    assert found == set()


def test_the_reference_has_every_verb_every_public_name_and_every_route(source: Path) -> None:
    reference = source / "docs" / "reference"
    verbs, names, routes = (
        (reference / f"{name}.md").read_text() for name in ("cli", "sdk", "rest")
    )
    for path in paths(cli, "gpool"):
        assert f"# {path}\n" in verbs
    for name in gpool.__all__:
        assert name == "__version__" or f"gpool.{name}" in names
    for route in ("POST /v1/tasks", "GET /v1/queue", "GET /v1/nodes", "GET /readyz"):
        assert f"### {route}\n" in routes
    assert routes.count("\n### ") > 80


def paths(group: click.Group, path: str) -> Iterator[str]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        yield f"{path} {name}"
        if isinstance(command, click.Group):
            yield from paths(command, f"{path} {name}")


def test_the_configuration_is_plain() -> None:
    """Readable by MkDocs too: no tags, no navigation, no plug-ins."""
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert "nav" not in config
    assert "plugins" not in config
    assert config["theme"]["font"] is False
