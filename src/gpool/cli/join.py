"""`gpool join LINK`: lend this machine. Joining again with the same home is the same node."""

from __future__ import annotations

import click

from gpool.cli.children import AGENT_MODULE, become


@click.command(epilog="Example: gpool join gpool://pool.example:8642/join/TOKEN")
@click.argument("link")
@click.option("--name", help="What to call this machine (default: its host name).")
@click.option(
    "--slots",
    envvar="GPOOL_AGENT_SLOTS",
    type=click.IntRange(min=0),
    help="Processors to lend (default: all).",
)
@click.option(
    "--simulate-gpus",
    envvar="GPOOL_AGENT_SIMULATE_GPUS",
    metavar="SPEC",
    help="Pretend to have GPUs, e.g. H100:2,RTX4090; marked as simulated.",
)
def join(link: str, name: str | None, slots: int | None, simulate_gpus: str | None) -> None:
    """Lend this machine to a pool."""
    from gpool.cli.joining import agent_variables, enrol, identity_file, load_identity, parse_link
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
    variables = agent_variables(
        identity, wanted.url, data=file.with_suffix(""), slots=slots, simulate=simulate_gpus
    )
    become(AGENT_MODULE, variables)
