"""What a task writes and how it ended, told to whoever followed it. It asks the server nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gpool.cli.output.progress import on_stderr

if TYPE_CHECKING:
    from gpool.client.logs import Printed
    from gpool.client.results import Result


T = TypeVar("T")


def show(said: Iterator[Printed | str], *, quiet: bool) -> None:
    """Print what a task writes, and the lines about what it does meanwhile."""
    from gpool.cli.output.printing import LogPrinter

    LogPrinter(all_to_stderr=quiet).show(_without_lines(said))


def show_documents(said: Iterator[dict[str, Any] | str]) -> None:
    """The same as one JSON list, each document as it comes; whole even where the reading was broken off."""
    from gpool.cli.output.printing import emit_json_list

    emit_json_list(_without_lines(said))


def _without_lines(said: Iterator[T | str]) -> Iterator[T]:
    for one in said:
        if isinstance(one, str):
            on_stderr(one)
        else:
            yield one


def say_how_it_ended(result: Result, *, code_too: bool = False) -> None:
    """A line for every end that its exit code does not tell; `code_too`: for that one as well."""
    from gpool.cli.output.printing import plain
    from gpool.client.results import failure

    if result.status != "succeeded" and (code_too or result.reason != "exited"):
        click.echo(f"gpool: {plain(failure(result).detail)}", err=True)
