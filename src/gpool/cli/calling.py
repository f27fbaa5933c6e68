"""What several verbs share: the client of this call, and the options of listings."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from gpool.client.client import Client

F = TypeVar("F", bound=Callable[..., Any])

as_json = click.option("--json", "as_json", is_flag=True, help="Print the REST document(s).")

into = click.option(
    "-o",
    "--into",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(),
    help="Where outputs go (default: here).",
)


def listing(function: F) -> F:
    """`--json --all --limit N`, as every listing has them."""
    function = click.option(
        "--limit",
        type=click.IntRange(min=1),
        default=50,
        show_default=True,
        help="At most so many.",
    )(function)
    function = click.option("--all", "everything", is_flag=True, help="All there are.")(function)
    return as_json(function)


def client_of(ctx: click.Context) -> Client:
    """The client of this call; a test passes its own as the context's object."""
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
    """A listing as those options want it; where it is cut, that is said beneath it."""
    if everything:
        return client.listing(what, limit=None, **filters)
    found = client.listing(what, limit=limit + 1, **filters)
    if len(found) > limit:
        told = f"gpool: these are {limit} of more; --limit N shows more of them, --all shows all"
        click.get_current_context().call_on_close(lambda: click.echo(told, err=True))
    return found[:limit]


class _OnStderr(logging.Handler):
    """What the SDK warns of, as every line about a task is said here."""

    def emit(self, record: logging.LogRecord) -> None:
        from gpool.cli.output.printing import plain

        click.echo(f"gpool: {plain(record.getMessage())}", err=True)


def warn_on_stderr(ctx: click.Context) -> None:
    """For as long as this command runs."""
    if __name__ in ctx.meta:
        return
    ctx.meta[__name__] = handler = _OnStderr(logging.WARNING)
    logger = logging.getLogger("gpool.client")
    logger.addHandler(handler)
    ctx.find_root().call_on_close(lambda: logger.removeHandler(handler))
