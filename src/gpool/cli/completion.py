"""`gpool completion SHELL`: the script that completes verbs and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from gpool.cli.main import cli


@click.command(epilog="Example: gpool completion bash >> ~/.bashrc")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of a shell."""
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "gpool", "_GPOOL_COMPLETE").source())
