"""`gpool up` and `gpool server`: a whole pool on this machine, or its server alone."""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from gpool.cli.lending.children import (
    AGENT_MODULE,
    SERVER_MODULE,
    Child,
    Program,
    become,
    stop_signals,
)
from gpool.cli.lending.terms import Terms, agent_variables, lending
from gpool.core.errors import Conflict, GpoolError, InternalFault, Invalid, Unreachable
from gpool.transfer.pinning import spelt_out
from gpool.transfer.requests import Address, is_loopback

KEY_FILE = "operator.key"
"""Where, beneath its data folder, the server leaves the first operator's key."""

DEFAULT_PORT = 8642
_READY_S = 300.0
_LOOK_S = 0.05

data_option = click.option(
    "--data",
    envvar="GPOOL_SERVER_DATA",
    type=click.Path(path_type=Path),
    help="Where everything is kept.",
)
host_option = click.option(
    "--host",
    envvar="GPOOL_SERVER_HOST",
    default="127.0.0.1",
    show_default=True,
    help="The address to listen on.",
)
port_option = click.option(
    "--port",
    envvar="GPOOL_SERVER_PORT",
    type=click.IntRange(1, 65535),
    default=DEFAULT_PORT,
    show_default=True,
)


_TLS = (
    click.option("--tls/--no-tls", default=None, help="Encrypt (default: off loopback only)."),
    click.option(
        "--tls-cert",
        envvar="GPOOL_SERVER_TLS_CERT",
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        help="A certificate in PEM form (default: one of its own, known by its fingerprint).",
    ),
    click.option(
        "--tls-key",
        envvar="GPOOL_SERVER_TLS_KEY",
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        help="Its private key.",
    ),
    click.option(
        "--behind-proxy",
        metavar="ADDRESSES",
        help="Plain HTTP, for a proxy that ends TLS: its addresses or networks, with commas. "
        "Their X-Forwarded-* are believed.",
    ),
    click.option(
        "--public-url",
        envvar="GPOOL_SERVER_PUBLIC_URL",
        metavar="URL",
        help="How others reach it, for links (default: host and port).",
    ),
)


@dataclass(frozen=True, slots=True)
class Transport:
    """Where and how the server listens."""

    host: str
    port: int
    tls: bool | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    behind_proxy: str | None = None
    public_url: str | None = None

    def variables(self, folder: Path) -> dict[str, str]:
        named = {
            "DATA": str(folder),
            "HOST": self.host,
            "PORT": str(self.port),
            "TLS": None if self.tls is None else str(int(self.tls)),
            "TLS_CERT": self.tls_cert and str(self.tls_cert.absolute()),
            "TLS_KEY": self.tls_key and str(self.tls_key.absolute()),
            "TRUSTED_PROXIES": self.behind_proxy,
            "PLAIN_HTTP": None if self.behind_proxy is None else "1",
            "PUBLIC_URL": self.public_url,
        }
        return {f"GPOOL_SERVER_{name}": value for name, value in named.items() if value}

    def address(self, folder: Path) -> Address:
        """How this machine reaches it; its certificate is made here when there is none."""
        place = f"{_dialled(self.host)}:{self.port}"
        asked = any(os.environ.get(f"GPOOL_SERVER_{name}") for name in ("TLS", "PLAIN_HTTP"))
        if is_loopback(self.host) and not (self.tls or self.tls_cert or self.behind_proxy or asked):
            return Address(f"http://{place}")  # without loading the server to say so
        from pydantic import ValidationError

        from gpool.server.clock import SystemClock
        from gpool.server.identity.certificates import certificate_of
        from gpool.server.settings import Settings

        told = self.variables(folder)
        try:
            settings = Settings(
                **{k.removeprefix("GPOOL_SERVER_").lower(): v for k, v in told.items()}  # type: ignore[arg-type]
            )
        except ValidationError as error:
            raise Invalid("; ".join(each["msg"] for each in error.errors())) from error
        shown = certificate_of(settings, SystemClock().now())
        if shown is None:
            return Address(f"http://{place}", plain=settings.plain_http)
        return Address(f"https://{place}", shown.fingerprint)


def listening(function: Callable[..., None]) -> Callable[..., None]:
    """Where and how to listen, given to the verb as `transport`."""

    @wraps(function)
    def with_transport(
        *args: Any,
        host: str,
        port: int,
        tls: bool | None,
        tls_cert: Path | None,
        tls_key: Path | None,
        behind_proxy: str | None,
        public_url: str | None,
        **kwargs: Any,
    ) -> None:
        transport = Transport(host, port, tls, tls_cert, tls_key, behind_proxy, public_url)
        function(*args, transport=transport, **kwargs)

    found: Callable[..., None] = with_transport
    for option in reversed((host_option, port_option, *_TLS)):
        found = option(found)
    return found


@click.command(epilog="Example: gpool up --simulate-gpus H100:2,RTX4090")
@data_option
@listening
@click.option("--no-agent", is_flag=True, help="Only the server; lend nothing of this machine.")
@lending
def up(data: Path | None, transport: Transport, no_agent: bool, terms: Terms) -> None:
    """Start a server and an agent on this machine."""
    from gpool.client.connection.config import LOCAL_PROFILE, save_profile

    if not no_agent:
        _must_be_meant(terms)
    folder = data_folder(data)
    address = transport.address(folder)
    children: list[Child] = []
    with only_one(folder):
        must_be_free(transport.host, transport.port)
        stop = stop_signals()
        try:
            server = Child(
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
                children.insert(0, agent)  # stopped first: it hands back what it holds
                agent.start()
            _announce(address, key_file, profile)
            _watch(children, stop)
        finally:
            for child in children:
                child.stop()
    click.echo("Stopped.", err=True)


def _must_be_meant(terms: Terms) -> None:
    """A slip in the terms is said before anything starts, and before a profile leads to what ends at once."""
    if terms.policy is not None:
        from gpool.agent.machine.monitor import Rulebook

        Rulebook(terms.policy)
    if terms.simulate_gpus:
        from gpool.agent.machine.detection.gpus import detect

        detect(terms.simulate_gpus)


def _agent(folder: Path, address: Address, key_file: Path, terms: Terms) -> Child:
    from gpool.cli.lending.enrolment import enrol, load_identity
    from gpool.client.connection.transport import ApiTransport

    file = folder / "node.json"
    identity = load_identity(file)
    if identity is None:
        api = ApiTransport(address, key_file.read_text(encoding="ascii").strip())
        identity = enrol(api, file, name=None, token=None)
        api.close()
    identity = replace(identity, address=address)  # our own server: wherever it listens today
    variables = agent_variables(identity, folder / "agent", terms)
    return Child(Program("agent", AGENT_MODULE, variables, folder / "agent.log"))


def await_ready(server: Child, address: Address, stop: threading.Event) -> None:
    """Until the server can take tasks; an error with its last words when it ends instead."""
    import time

    from gpool.client.connection.transport import ApiTransport

    api = ApiTransport(address, "")
    ends = time.monotonic() + _READY_S
    try:
        while not stop.is_set():
            if server.exit_code() is not None:
                raise InternalFault(f"the server did not start; it said:\n{server.last_words()}")
            try:
                api.send_once("GET", "/readyz")
                return
            except Unreachable:
                if time.monotonic() > ends:
                    raise
            stop.wait(_LOOK_S)
    finally:
        api.close()


def _announce(address: Address, key_file: Path, profile: Path) -> None:
    link = _join_link(address, key_file)
    this = typed(Path(sys.argv[0]).absolute(), shutil.which("gpool"), Path.cwd())
    click.echo(f"gpool is up at {address.url}")
    if address.fingerprint is not None:
        click.echo(f"  certificate {spelt_out(address.fingerprint)}")
    click.echo(f"  key        {key_file} (profile 'local' in {profile})")
    click.echo(f"  try        {this} run -- python -c 'print(6*7)'")
    if link:
        click.echo(f"  more GPUs  gpool join {link}{within_reach(link)}")
    click.echo("Ctrl-C stops it.")


def typed(this: Path, found: str | None, here: Path) -> str:
    """What to type to mean the program at `this`: `gpool` where the shell finds it (`found`), else the way from `here`."""
    if this.name != "gpool" or (found is not None and Path(found).samefile(this)):
        return "gpool"
    if this.parent == here:
        return "./gpool"  # the name alone would be looked for elsewhere
    return shlex.quote(str(this.relative_to(here) if this.is_relative_to(here) else this))


def within_reach(link: str) -> str:
    """A line beneath a link that leads other machines to themselves."""
    if not is_loopback(urlsplit(link).hostname or ""):
        return ""
    return "\n             (on this machine; for others to reach it: gpool up --host 0.0.0.0)"


def _join_link(address: Address, key_file: Path) -> str:
    from gpool.client.connection.transport import ApiTransport

    api = ApiTransport(address, key_file.read_text(encoding="ascii").strip())
    try:
        return str(api.send_json("POST", "/v1/nodes/invites", {"expires_in_s": 86400})["link"])
    except GpoolError as error:
        click.echo(f"gpool: no join link could be made: {error.detail}", err=True)
        return ""
    finally:
        api.close()


def _watch(children: list[Child], stop: threading.Event) -> None:
    while not stop.wait(_LOOK_S):
        for child in children:
            told = child.keep_alive()
            if told:
                click.echo(told, err=True)


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Two pools in one folder would ruin each other."""
    with (folder / "up.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise Conflict(
                f"a pool runs in {folder} already; stop it, or choose another folder with --data"
            ) from exc
        yield


def data_folder(chosen: Path | None) -> Path:
    """Where a pool keeps everything, made if it is not there."""
    from gpool.client.connection.config import data_home

    folder = (chosen or data_home()).expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as exc:
        raise Invalid(
            f"nothing can be kept in {folder} ({exc.strerror}); choose another folder with --data"
        ) from exc
    return folder


def must_be_free(host: str, port: int) -> None:
    """Whoever answers there would be taken for our own server."""
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


def _dialled(host: str) -> str:
    """How this machine reaches a server that listens on `host`."""
    if host in ("0.0.0.0", "::", ""):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


@click.command()
@data_option
@listening
def server(data: Path | None, transport: Transport) -> None:
    """Start a server alone."""
    folder = data_folder(data)
    must_be_free(transport.host, transport.port)
    address = transport.address(folder)
    click.echo(f"Data in {folder}; the operator's key will be in {folder / KEY_FILE}", err=True)
    if address.fingerprint is not None:
        click.echo(f"Certificate {spelt_out(address.fingerprint)}", err=True)
    become(SERVER_MODULE, transport.variables(folder))
