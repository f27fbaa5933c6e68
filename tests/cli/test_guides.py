"""Commands in README and the pages: each is parsed as if it were typed; none is run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from gpool.cli.main import cli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *(ROOT / "docs").glob("guides/*.md")]  # fmt: skip
TYPED = re.compile(r"^(?: {4}|\$ )(?:\.venv/bin/)?gpool (?P<block>.+)$|`gpool (?P<inline>[^`]+)`", re.M)  # fmt: skip
FILES = ("requirements.txt", "rules.toml", "train.py", "hello.py", "data.csv", "FILE")


def commands() -> Iterator[tuple[str, str, bool]]:
    """(test id, command, whether it stands in a sentence, where required arguments may be left out)."""
    for page in PAGES:
        for found in TYPED.finditer(page.read_text(encoding="utf-8")):
            said = (found["block"] or found["inline"]).replace("\n", " ")
            yield f"{page.relative_to(ROOT)}: {said}", said, found["inline"] is not None


@pytest.mark.parametrize(
    ("said", "in_passing"),
    [pytest.param(said, in_passing, id=id_) for id_, said, in_passing in commands()],
)
def test_every_command_on_a_page_parses(
    said: str, in_passing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in FILES:
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    words = shlex.split(said.replace("`", ""), comments=True)
    command: click.Command = cli
    context = click.Context(cli)
    while isinstance(command, click.Group):
        if not words:
            return  # a group alone: `gpool node`
        name, found, words = command.resolve_command(context, words)
        assert found is not None, f"no such verb: {name}"
        command = found
    if any("--yes" in option.opts for option in command.params):
        words = [*words, "--yes"]  # nobody is there to be asked
    try:
        command.make_context(command.name, list(words), parent=context)
    except click.MissingParameter:
        assert in_passing
    except click.exceptions.Exit:
        pass  # --help


def test_pages_hold_commands() -> None:
    assert len(list(commands())) > 60
