"""`--help` of every verb: it fits 80 columns, and long lists of options are in groups."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import click
import pytest

from gpool.cli.command import SectionOption
from gpool.cli.main import cli
from tests.cli.conftest import Gpool
from tests.client.standin import Pool

MANY = 6
"""Options from which on they are in groups; --help and --json do not count."""


def verbs(
    command: click.Command = cli, path: str = "gpool", parent: click.Context | None = None
) -> Iterator[tuple[str, click.Command, click.Context]]:
    ctx = click.Context(
        command, parent=parent, info_name=path.split()[-1], terminal_width=80, max_content_width=80
    )
    yield path, command, ctx
    if isinstance(command, click.Group):
        for name in command.list_commands(ctx):
            found = command.get_command(ctx, name)
            assert found is not None
            yield from verbs(found, f"{path} {name}", ctx)


VERBS = [pytest.param(command, ctx, id=path) for path, command, ctx in verbs()]


def test_all_verbs_are_found() -> None:
    assert len(VERBS) > 100


@pytest.mark.parametrize(("command", "ctx"), VERBS)
def test_help_fits_80_columns(command: click.Command, ctx: click.Context) -> None:
    assert [line for line in command.get_help(ctx).splitlines() if len(line) > 80] == []


@pytest.mark.parametrize(("command", "ctx"), VERBS)
def test_many_options_are_in_groups(command: click.Command, ctx: click.Context) -> None:
    options = [one for one in command.params if isinstance(one, click.Option)]
    counted = [one for one in options if "--json" not in one.opts]
    sections = {one.section for one in options if isinstance(one, SectionOption)}
    assert len(counted) <= MANY or len(sections) >= 2


@pytest.mark.parametrize(("command", "ctx"), VERBS)
def test_arguments_that_name_tasks_or_nodes_are_completed(
    command: click.Command, ctx: click.Context
) -> None:
    for one in command.params:
        metavar = (one.metavar or one.name or "").upper().strip("[].")
        is_task = one.name in ("task", "tasks") and "ID" in metavar
        if isinstance(one, click.Argument) and (is_task or metavar.split("|")[0] == "NODE"):
            assert one._custom_shell_complete is not None, f"{ctx.command_path}: {one.name}"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_is_one_that_the_shell_accepts(
    gpool: Gpool, tmp_path: Path, shell: str
) -> None:
    script = tmp_path / "script"
    done = gpool("completion", shell)
    script.write_text(done.stdout)
    assert "_GPOOL_COMPLETE" in done.stdout
    if shell == "bash":
        subprocess.run(["bash", "-n", str(script)], check=True)


def test_an_object_that_is_not_found_is_answered_with_its_listing(gpool: Gpool, pool: Pool) -> None:
    done = gpool("status", "t-0000000000009")
    assert done.exit_code == 4
    assert done.stderr.endswith("  List your tasks with: gpool ps\n")


def test_watching_and_json_exclude_each_other(gpool: Gpool) -> None:
    for verb in ("ps", "queue"):
        assert gpool(verb, "--watch", "--json").exit_code == 2


def test_ps_is_printed_again_while_it_is_watched(gpool: Gpool, pool: Pool) -> None:
    """Until Ctrl-C, which the stand-in pool sends here with its third answer."""
    gpool("run", "-d", "--", "true")
    answers, answer = count(1), pool.handle_request

    def interrupted(request: object) -> object:
        if next(answers) == 3:
            raise KeyboardInterrupt
        return answer(request)  # type: ignore[arg-type]

    pool.handle_request = interrupted  # type: ignore[method-assign, assignment]
    done = gpool("ps", "--watch", "0.5")
    assert done.exit_code == 130
    assert len(re.findall(r"^ID ", done.stdout, re.M)) == 2
