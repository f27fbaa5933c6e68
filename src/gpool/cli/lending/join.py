"""`gpool join LINK`: lend this machine. Joining again with the same home is the same node."""

from __future__ import annotations

from pathlib import Path

import click

from gpool.cli.lending.children import AGENT_MODULE, become
from gpool.cli.lending.terms import Terms, agent_variables, lending
from gpool.core.errors import Forbidden
from gpool.transfer.requests import Address


@click.command(epilog="Example: gpool join gpool://pool.example:8642/join/TOKEN#sha256=FINGERPRINT")
@click.argument("link")
@click.option("--name", help="What to call this machine (default: its host name).")
@click.option(
    "--plain-http",
    is_flag=True,
    envvar="GPOOL_PLAIN_HTTP",
    help="Join without encryption, through a network where everybody may read along.",
)
@lending
def join(link: str, name: str | None, plain_http: bool, terms: Terms) -> None:
    """Lend this machine to a pool."""
    from gpool.cli.lending.enrolment import enrol, identity_file, load_identity, parse_link
    from gpool.client.connection.config import home
    from gpool.client.connection.transport import ApiTransport

    wanted = parse_link(link, plain=plain_http)
    url = wanted.address.url
    file = identity_file(home(), url)
    identity = load_identity(file)
    if identity is not None:
        must_be_the_same(identity.address, wanted.address, file)
        click.echo(f"Already part of {url} as {identity.name} ({identity.id}).", err=True)
    else:
        if file.exists():
            click.echo("This machine joined before nodes had keys; joining anew.", err=True)
        api = ApiTransport(wanted.address, "")
        identity = enrol(api, file, name=name, token=wanted.token)
        api.close()
        click.echo(f"Joined {url} as {identity.name} ({identity.id}).", err=True)
    click.echo("Lending until Ctrl-C.", err=True)
    become(AGENT_MODULE, agent_variables(identity, file.with_suffix(""), terms))


def must_be_the_same(known: Address, linked: Address, file: Path) -> None:
    """A link that names another certificate than the one this machine knows its server by."""
    if known.fingerprint != linked.fingerprint:
        raise Forbidden(
            f"this link names another certificate for {linked.url} than the one this machine joined with. "
            f"If the pool's operator changed it, remove {file} and join with the new link"
        )
