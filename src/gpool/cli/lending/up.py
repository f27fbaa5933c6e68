"""`gpool up`: server and agent here; `gpool server`: the server alone."""

from __future__ import annotations

import fcntl
import shlex
import shutil
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import click

from gpool.cli.command import SectionedCommand, examples, require_extra
from gpool.cli.lending.children import (
    AGENT_MODULE,
    SERVER_MODULE,
    ChildProcess,
    Program,
    exec_module,
    stop_signals,
)
from gpool.cli.lending.join import agent_variables
from gpool.cli.lending.listener import Transport, data_option, listening, server_option
from gpool.cli.lending.log_options import announce, log_format_option
from gpool.cli.lending.terms import LendingTerms, lending
from gpool.core.errors import Conflict, GpoolError, InternalFault, Invalid, Unreachable
from gpool.transfer.keys import spelt_out
from gpool.transfer.requests import Address, is_loopback

KEY_FILE = "operator.key"
"""File with the first operator's API key, in the server's data directory."""

_READY_S = 300.0
_LOOK_S = 0.05


@click.command(
    cls=SectionedCommand,
    epilog=examples(
        "gpool up",
        "gpool up --host 0.0.0.0 --public-url https://pool.example:8642",
        "gpool up --simulate-gpus H100:2,RTX4090",
    ),
)
@data_option
@listening
@log_format_option
@click.option("--no-agent", is_flag=True, help="Start the server only.")
@lending
def up(data: Path | None, transport: Transport, no_agent: bool, terms: LendingTerms) -> None:
    """Start a server and an agent on this machine.

    Data are kept between starts. Ctrl-C stops both.
    """
    from gpool.client.config import LOCAL_PROFILE, save_profile

    require_extra("server", "gpool up")
    if not no_agent:
        require_extra("agent", "gpool up")
        _check_terms(terms)
    folder = data_folder(data)
    address = transport.address(folder)
    children: list[ChildProcess] = []
    with locked_folder(folder):
        require_free_port(transport.host, transport.port)
        stop = stop_signals()
        try:
            server = ChildProcess(
                Program(
                    "server",
                    SERVER_MODULE,
                    transport.variables(folder),
                    folder / "server.log",
                )
            )
            children.append(server)
            server.start()
            await_ready(server, address, stop)
            key_file = folder / KEY_FILE
            profile = save_profile(
                LOCAL_PROFILE, address.url, key_file, fingerprint=address.fingerprint
            )
            if not no_agent and not stop.is_set():
                agent = _agent(folder, address, key_file, terms)
                children.insert(0, agent)  # stopped first: it returns its leases
                agent.start()
            _announce(address, folder, profile)
            _watch(children, stop)
        finally:
            for child in children:
                child.stop()
    click.echo("Stopped.", err=True)


def _check_terms(terms: LendingTerms) -> None:
    """Report an invalid option before anything starts or is written."""
    if terms.site and not terms.address:
        from gpool.agent.machine.host import site_address

        if is_loopback(site_address("")):
            raise Invalid(
                f"--site {terms.site}: no address of this machine that others of the site reach is known; "
                "name it with --address IP"
            )
    if terms.policy is not None:
        from gpool.agent.machine.monitor import PolicyFile

        PolicyFile(terms.policy)
    if terms.simulate_gpus:
        from gpool.agent.machine.gpus import detect

        detect(terms.simulate_gpus)


def _agent(folder: Path, address: Address, key_file: Path, terms: LendingTerms) -> ChildProcess:
    from gpool.cli.lending.join import enrol
    from gpool.client.transport import ApiTransport

    api = ApiTransport(address, key_file.read_text(encoding="ascii").strip())
    # The same node as before, unless it was removed: the server knows it by its key.
    identity = enrol(api, folder / "node.json", name=None)
    api.close()
    variables = agent_variables(identity, folder / "agent", terms)
    return ChildProcess(Program("agent", AGENT_MODULE, variables, folder / "agent.log"))


def await_ready(server: ChildProcess, address: Address, stop: threading.Event) -> None:
    """`InternalFault` with the server's log if it ends instead."""
    import time

    from gpool.client.transport import ApiTransport

    api = ApiTransport(address, "")
    ends = time.monotonic() + _READY_S
    try:
        while not stop.is_set():
            if server.exit_code() is not None:
                raise InternalFault(
                    f"the server did not start; its log ends with:\n{server.last_words()}"
                )
            try:
                api.send_once("GET", "/readyz")
                return
            except Unreachable:
                if time.monotonic() > ends:
                    raise
            stop.wait(_LOOK_S)
    finally:
        api.close()


def _announce(address: Address, folder: Path, profile: Path) -> None:
    key_file = folder / KEY_FILE
    link = _join_link(address, key_file)
    this = command_name(Path(sys.argv[0]).absolute(), shutil.which("gpool"), Path.cwd())
    click.echo(f"gpool is up at {address.url}")
    if address.fingerprint is not None:
        click.echo(f"  certificate {spelt_out(address.fingerprint)}")
    reached = urlsplit(link).netloc
    if reached and reached != urlsplit(address.url).netloc:
        click.echo(f"  others     {urlsplit(address.url).scheme}://{reached}")
    page = _page_link(address, key_file)
    if page:
        click.echo(f"  page       {page} (signs you in; once, soon)")
    click.echo(f"  key        {key_file} (profile 'local' in {profile})")
    click.echo(f"  logs       {folder / 'server.log'}, {folder / 'agent.log'}")
    click.echo(f"  try        {this} run -- python -c 'print(6*7)'")
    if link:
        click.echo(f"  more GPUs  gpool join {link}{loopback_note(link)}")
    click.echo("Ctrl-C stops it.")


def command_name(this: Path, found: str | None, here: Path) -> str:
    """`gpool` if the shell finds `this` under that name (`found`), else its path from `here`."""
    if this.name != "gpool" or (found is not None and Path(found).samefile(this)):
        return "gpool"
    if this.parent == here:
        return "./gpool"  # the name alone is looked up in PATH
    return shlex.quote(str(this.relative_to(here) if this.is_relative_to(here) else this))


def loopback_note(link: str) -> str:
    if not is_loopback(urlsplit(link).hostname or ""):
        return ""
    return (
        "\n             (this machine only; for other machines start with: gpool up --host 0.0.0.0)"
    )


def _join_link(address: Address, key_file: Path) -> str:
    from gpool.client.transport import ApiTransport

    api = ApiTransport(address, key_file.read_text(encoding="ascii").strip())
    try:
        return str(api.send_json("POST", "/v1/nodes/invites", {"expires_in_s": 86400})["link"])
    except GpoolError as error:
        click.echo(f"gpool: could not create a join link: {error.detail}", err=True)
        return ""
    finally:
        api.close()


def _page_link(address: Address, key_file: Path) -> str:
    """One-time link to the page, for a browser on this machine; empty if the server makes none."""
    from gpool.client.transport import ApiTransport

    api = ApiTransport(address, key_file.read_text(encoding="ascii").strip())
    try:
        return address.url + str(api.send_json("POST", "/v1/auth/links", {})["path"])
    except GpoolError as error:
        click.echo(f"gpool: could not create a link to the page: {error.detail}", err=True)
        return ""
    finally:
        api.close()


def _watch(children: list[ChildProcess], stop: threading.Event) -> None:
    while not stop.wait(_LOOK_S):
        for child in children:
            message = child.keep_alive()
            if message:
                click.echo(message, err=True)


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    with (folder / "up.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise Conflict(
                f"a pool is already running in {folder}; stop it, or choose another directory with --data"
            ) from exc
        yield


def data_folder(chosen: Path | None) -> Path:
    from gpool.client.config import data_home

    folder = (chosen or data_home()).expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as exc:
        raise Invalid(
            f"cannot create the data directory {folder} ({exc.strerror}); choose another with --data"
        ) from exc
    return folder


def require_free_port(host: str, port: int) -> None:
    """`Conflict` if the port is in use: its listener would be taken for our server."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
        try:
            tried.bind((host, port))
        except OSError as exc:
            raise Conflict(
                f"cannot listen on {host} port {port} ({exc.strerror}); "
                "choose another with --port, or --host"
            ) from exc


@click.command(
    cls=SectionedCommand,
    epilog=examples(
        "gpool server --host 0.0.0.0 --public-url https://pool.example:8642",
        "gpool server --migrate-only",
    ),
)
@data_option
@listening
@server_option(
    "--migrate-only",
    is_flag=True,
    help="Migrate the database to this version's schema and exit.",
)
@log_format_option
def server(data: Path | None, transport: Transport, migrate_only: bool) -> None:
    """Start a server without an agent."""
    require_extra("server", "gpool server")
    folder = data_folder(data)
    if migrate_only:
        _migrate(transport.settings(folder).store_url)
        return
    require_free_port(transport.host, transport.port)
    address = transport.address(folder)
    announce(f"Data directory: {folder}; operator's API key: {folder / KEY_FILE}")
    if address.fingerprint is not None:
        announce(f"Certificate {spelt_out(address.fingerprint)}")
    pinned = f"GPOOL_FINGERPRINT={address.fingerprint} " if address.fingerprint else ""
    announce(
        f"Address: {address.url}. Once it runs, act as its operator and create join links with:\n"
        f"  {pinned}GPOOL_URL={address.url} GPOOL_KEY=$(cat {shlex.quote(str(folder / KEY_FILE))}) gpool node invite"
    )
    exec_module(SERVER_MODULE, transport.variables(folder))


def _migrate(url: str) -> None:
    import asyncio

    from gpool.server.store.drivers.opening import migrate_store

    done = asyncio.run(migrate_store(url))
    before = f"the database from revision {done.before}" if done.before else "an empty database"
    if done.before == done.after:
        click.echo(f"The database has the newest schema: revision {done.after}.")
    else:
        click.echo(f"Migrated {before} to revision {done.after}.")
