"""`gpool join LINK`: lend this machine. Joining again with the same home is the same node."""

from __future__ import annotations

import click

from gpool.cli.children import AGENT_MODULE, become
from gpool.cli.terms import Terms, agent_variables, lending


@click.command(epilog="Example: gpool join gpool://pool.example:8642/join/TOKEN")
@click.argument("link")
@click.option("--name", help="What to call this machine (default: its host name).")
@lending
def join(link: str, name: str | None, terms: Terms) -> None:
    """Lend this machine to a pool."""
    from gpool.cli.joining import enrol, identity_file, load_identity, parse_link
    from gpool.client.config import home
    from gpool.client.door import Door

    wanted = parse_link(link)
    file = identity_file(home(), wanted.url)
    identity = load_identity(file)
    if identity is None:
        door = Door(wanted.url, "")
        identity = enrol(door, file, name=name, token=wanted.token)
        door.close()
        click.echo(f"Joined {wanted.url} as {identity.name} ({identity.id}).", err=True)
    else:
        click.echo(f"Already part of {wanted.url} as {identity.name} ({identity.id}).", err=True)
    click.echo("Lending until Ctrl-C.", err=True)
    become(AGENT_MODULE, agent_variables(identity, wanted.url, file.with_suffix(""), terms))
