"""`gpool catalogue`: tasks that gpool ships, ready to run. Their files are package data; the server has no catalogue."""

from __future__ import annotations

import click

from gpool.cli.command import VerbGroup, as_json, examples

the_task = click.argument("name", metavar="NAME")


@click.group(cls=VerbGroup)
def catalogue() -> None:
    """List, show and run the tasks that gpool ships."""


@catalogue.command("ls")
@as_json
def catalogue_ls(as_json: bool) -> None:
    """List the shipped tasks."""
    from gpool.cli.printing import emit_json, table
    from gpool.cli.project.project_tasks import builtin_templates

    found = builtin_templates()[1].values()
    if as_json:
        members = ("name", "version", "description")
        emit_json([{member: getattr(one, member) for member in members} for one in found])
        return
    rows = [(one.name, one.version, one.description) for one in found]
    table(("name", "version", "description"), rows, "No shipped tasks.")


@catalogue.command("show")
@the_task
def catalogue_show(name: str) -> None:
    """Show the parameters of a shipped task."""
    from gpool.cli.project.project_tasks import BUILTIN, help_of, project_template

    click.echo(help_of(project_template(BUILTIN + name)[1]))


@catalogue.command(
    "run",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog=examples(
        "gpool catalogue run monte-carlo --samples 1000000",
        "gpool run --gpu 1 :builtin/finetune --lr 0.001",
    ),
)
@the_task
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[--PARAMETER VALUE]...")
@click.pass_context
def catalogue_run(ctx: click.Context, name: str, words: tuple[str, ...]) -> None:
    """Run a shipped task; with options of `gpool run`: gpool run OPTIONS :builtin/NAME."""
    from gpool.cli.project.project_tasks import BUILTIN
    from gpool.cli.run import run

    arguments = ["--", f":{BUILTIN}{name}", *words]
    with run.make_context("run", arguments, parent=ctx) as context:
        run.invoke(context)
