"""Every block of code on a page: Python is compiled, data is read, commands of a shell are parsed. Nothing is run here;
tests/e2e/test_page_programs.py runs the programs.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import inspect
import json
import re
import tomllib
from pathlib import Path

import click
import pytest

import gpool
from gpool.cli.main import cli
from gpool.client.options import Options
from tests.tools.pages import ROOT, SHELL, Block, blocks, commands, pages, typed_lines

ALL = [block for page in pages() for block in blocks(page)]
LANGUAGES = {*SHELL, "python", "toml", "json", "yaml", "text"}
OPTIONS = {*Options.__annotations__, *inspect.signature(gpool.run).parameters, *inspect.signature(gpool.Client.run).parameters}  # fmt: skip
FILES = ("requirements.txt", "rules.toml", "train.py", "hello.py", "data.csv", "FILE")


def of(*languages: str) -> list[object]:
    return [pytest.param(one, id=one.name) for one in ALL if one.language in languages]


def typed() -> list[object]:
    found = []
    for block in ALL:
        if block.language in SHELL:
            for number, line in enumerate(typed_lines(block)):
                if re.search(r"(?:^|[\s/(])gpool\s", line):
                    found.append(pytest.param(line, id=f"{block.name}+{number}"))
    return found


def test_blocks_are_found_in_known_languages() -> None:
    assert len(ALL) > 50
    assert {block.language for block in ALL} <= LANGUAGES


@pytest.mark.parametrize("block", of("python"))
def test_a_python_block_compiles_and_uses_names_that_exist(block: Block) -> None:
    tree = ast.parse(block.text, block.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_gpool(node.value):
            assert node.attr in gpool.__all__ or is_module(f"gpool.{node.attr}"), node.attr
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("gpool.task", "gpool.run"):
            named = {one.arg for one in node.keywords if one.arg is not None}
            assert named <= OPTIONS, named - OPTIONS
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "gpool":
            module = importlib.import_module(node.module or "")
            assert all(hasattr(module, one.name) for one in node.names)


def _is_gpool(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "gpool"


def is_module(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


@pytest.mark.parametrize("block", of("toml", "json"))
def test_a_block_of_data_can_be_read(block: Block) -> None:
    (tomllib if block.language == "toml" else json).loads(block.text)


@pytest.mark.parametrize("line", typed())
def test_a_command_names_a_verb_and_options_that_exist(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in FILES:
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    for words in commands(line):
        if Path(words[0]).name == "gpool":
            parsed(words[1:])


def parsed(words: list[str]) -> None:
    """Parse as if typed; nothing is run."""
    command: click.Command = cli
    context = click.Context(cli)
    if words and words[0].startswith("-"):
        with context:
            cli.parse_args(context, list(words))
        words = [*context._protected_args, *context.args]
    while isinstance(command, click.Group):
        if not words:
            return
        name, found, words = command.resolve_command(context, words)
        assert found is not None, f"no such verb: {name}"
        command = found
    if any("--yes" in option.opts for option in command.params):
        words = [*words, "--yes"]
    with contextlib.suppress(click.exceptions.Exit):  # --help
        command.make_context(command.name, list(words), parent=context)


@pytest.mark.parametrize("block", of(*SHELL))
def test_targets_modules_and_extras_of_a_block_exist(block: Block) -> None:
    targets = set(re.findall(r"(?m)^([a-z]+):", (ROOT / "Makefile").read_text()))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for line in typed_lines(block):
        for target in re.findall(r"^make ([a-z]+)", line):
            assert target in targets
        for module in re.findall(r"python3? -m ((?:tests|bench|gpool)[\w.]*)", line):
            assert is_module(module), module
        if "pip install" in line:
            for named in re.findall(r"\[([a-z0-9,]+)\]", line):
                assert set(named.split(",")) <= set(extras), line


def test_the_checks_notice_a_verb_and_an_option_that_do_not_exist() -> None:
    """Control: without it the parser could be one that accepts everything."""
    for wrong in ("runn -- true", "run --gpus 1 -- true", "ps --nothing", "node fly"):
        with pytest.raises((click.UsageError, AssertionError)):
            parsed(wrong.split())
    line = "X=1 first=$(gpool run -d -- a) && if gpool wait b; then gpool ps | cat > out; fi"
    assert [words[0] for words in commands(line)] == ["gpool", "gpool", "gpool", "cat", "out", "fi"]
