"""`gpool join LINK`: enrol this machine, run its agent. The home directory identifies the node."""

from __future__ import annotations

from pathlib import Path

import click

from gpool.cli.command import SectionedCommand, examples
from gpool.cli.lending.children import AGENT_MODULE, exec_module
from gpool.cli.lending.terms import LendingTerms, agent_variables, lending
from gpool.core.errors import Forbidden
from gpool.transfer.requests import Address


@click.command(
    cls=SectionedCommand,
    epilog=examples(
        "gpool join gpool://pool.example:8642/join/TOKEN#sha256=FINGERPRINT",
        "gpool join LINK --policy rules.toml --label ssd --price 0.31/h",
    ),
)
@click.argument("link")
@click.option("--name", metavar="NAME", help="Name of the node (default: the host name).")
@click.option(
    "--plain-http",
    is_flag=True,
    envvar="GPOOL_PLAIN_HTTP",
    help="Join without encryption; the network can read and change everything.",
)
@lending
def join(link: str, name: str | None, plain_http: bool, terms: LendingTerms) -> None:
    """Join this machine to a pool and run its agent."""
    from gpool.cli.lending.enrolment import enrol, identity_file, load_identity, parse_link
    from gpool.client.connection.config import home
    from gpool.client.connection.transport import ApiTransport

    wanted = parse_link(link, plain=plain_http)
    url = wanted.address.url
    file = identity_file(home(), url)
    identity = load_identity(file)
    if identity is not None:
        require_same_certificate(identity.address, wanted.address, file)
        click.echo(f"Already a node of {url}: {identity.name} ({identity.id}).", err=True)
    else:
        if file.exists():
            click.echo(
                "This machine joined with a version without node keys; joining again.", err=True
            )
        api = ApiTransport(wanted.address, "")
        identity = enrol(api, file, name=name, token=wanted.token)
        api.close()
        click.echo(f"Joined {url} as {identity.name} ({identity.id}).", err=True)
    click.echo("The agent runs until Ctrl-C.", err=True)
    exec_module(AGENT_MODULE, agent_variables(identity, file.with_suffix(""), terms))


def require_same_certificate(known: Address, linked: Address, file: Path) -> None:
    """`Forbidden` if the link names another certificate than the saved one."""
    if known.fingerprint != linked.fingerprint:
        raise Forbidden(
            f"the link has another certificate fingerprint for {linked.url} than the one saved here. "
            f"If the pool's operator changed it, remove {file} and join again"
        )
