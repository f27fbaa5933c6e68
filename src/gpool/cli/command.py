"""Parts of the verbs: client of a command, shared options, option sections, renamed verbs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from gpool.client.client import Client

F = TypeVar("F", bound=Callable[..., Any])
MakeOption = Callable[..., Callable[[Any], Any]]
"""`click.option`, or one that an option section returned."""

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")


def examples(*commands: str) -> str:
    return "\n  ".join(("\b\nExamples:", *commands))


class SectionOption(click.Option):
    def __init__(self, *args: Any, section: str, **attrs: Any) -> None:
        super().__init__(*args, **attrs)
        self.section = section


def option_section(title: str) -> MakeOption:
    return partial(click.option, cls=SectionOption, section=title)


class SectionedCommand(click.Command):
    """`--help` groups options by section, in order of definition; others come last."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        general: list[tuple[str, str]] = []
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None and isinstance(param, SectionOption):
                sections.setdefault(param.section, []).append(record)
            elif record is not None:
                general.append(record)
        for title, records in (*sections.items(), ("Options", general)):
            with formatter.section(title):
                formatter.write_dl(records)


class VerbGroup(click.Group):
    """`renamed`: old names and new ones. Old names work unlisted, with a note on standard error."""

    def __init__(self, *args: Any, renamed: Mapping[str, str] | None = None, **attrs: Any) -> None:
        super().__init__(*args, **attrs)
        self.renamed = dict(renamed or {})

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if (verb := self.renamed.get(args[0])) is not None:
            if not ctx.resilient_parsing:
                path = ctx.command_path
                note = f"gpool: `{path} {args[0]}` is deprecated; use `{path} {verb}`"
                click.echo(note, err=True)
            args = [verb, *args[1:]]
        return super().resolve_command(ctx, args)


def into_option(option: MakeOption = click.option) -> Callable[[F], F]:
    return option(
        "-o",
        "--into",
        type=click.Path(path_type=Path, file_okay=False),
        default=Path(),
        metavar="DIR",
        help="Directory to download outputs to (default: the current one).",
    )


def listing(function: F) -> F:
    function = click.option(
        "--limit",
        type=click.IntRange(min=1),
        default=50,
        show_default=True,
        metavar="N",
        help="Maximum number of rows.",
    )(function)
    function = click.option("--all", "everything", is_flag=True, help="List all rows.")(function)
    return as_json(function)


def client_of(ctx: click.Context) -> Client:
    """A test passes its own client as the context's object."""
    from gpool.client.client import Client

    warn_on_stderr(ctx)
    if isinstance(ctx.obj, Client):
        return ctx.obj
    client = Client(ctx.obj["url"], ctx.obj["key"])
    ctx.call_on_close(client.close)
    return client


def listed(
    client: Client, what: str, *, everything: bool, limit: int, **filters: str
) -> list[dict[str, Any]]:
    """Print a note if rows were left out."""
    if everything:
        return client.listing(what, limit=None, **filters)
    found = client.listing(what, limit=limit + 1, **filters)
    if len(found) > limit:
        note = f"gpool: showing the first {limit}; --limit N shows more, --all shows all"
        click.get_current_context().call_on_close(lambda: click.echo(note, err=True))
    return found[:limit]


class _WarningPrinter(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        from gpool.cli.output.printing import plain

        click.echo(f"gpool: {plain(record.getMessage())}", err=True)


def warn_on_stderr(ctx: click.Context) -> None:
    if __name__ in ctx.meta:
        return
    ctx.meta[__name__] = handler = _WarningPrinter(logging.WARNING)
    logger = logging.getLogger("gpool.client")
    logger.addHandler(handler)
    ctx.find_root().call_on_close(lambda: logger.removeHandler(handler))
