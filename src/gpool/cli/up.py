"""`gpool up` and `gpool server`: a whole pool on this machine, or its server alone."""

from __future__ import annotations

import fcntl
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from gpool.cli.children import AGENT_MODULE, SERVER_MODULE, Child, Program, become, stop_signals
from gpool.cli.terms import Terms, agent_variables, lending
from gpool.core.errors import Conflict, GpoolError, InternalFault, Unreachable

KEY_FILE = "operator.key"
"""Where, beneath its data folder, the server leaves the first operator's key."""

DEFAULT_PORT = 8642
_READY_S = 60.0
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


@click.command(epilog="Example: gpool up --simulate-gpus H100:2,RTX4090")
@data_option
@host_option
@port_option
@click.option("--no-agent", is_flag=True, help="Only the server; lend nothing of this machine.")
@lending
def up(data: Path | None, host: str, port: int, no_agent: bool, terms: Terms) -> None:
    """Start a server and an agent on this machine."""
    from gpool.client.config import LOCAL_PROFILE, data_home, save_profile

    folder = (data or data_home()).expanduser().absolute()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    url = f"http://{_dialled(host)}:{port}"
    children: list[Child] = []
    with only_one(folder):
        must_be_free(host, port)
        stop = stop_signals()
        try:
            server = Child(
                Program(
                    "server",
                    SERVER_MODULE,
                    server_variables(folder, host, port),
                    folder / "server.log",
                )
            )
            children.append(server)
            server.start()
            await_ready(server, url, stop)
            key_file = folder / KEY_FILE
            profile = save_profile(LOCAL_PROFILE, url, key_file)
            if not no_agent and not stop.is_set():
                agent = _agent(folder, url, key_file, terms)
                children.insert(0, agent)  # stopped first: it hands back what it holds
                agent.start()
            _announce(url, key_file, profile)
            _watch(children, stop)
        finally:
            for child in children:
                child.stop()
    click.echo("Stopped.", err=True)


def server_variables(folder: Path, host: str, port: int) -> dict[str, str]:
    return {
        "GPOOL_SERVER_DATA": str(folder),
        "GPOOL_SERVER_HOST": host,
        "GPOOL_SERVER_PORT": str(port),
    }


def _agent(folder: Path, url: str, key_file: Path, terms: Terms) -> Child:
    from gpool.cli.joining import enrol, load_identity
    from gpool.client.door import Door

    file = folder / "node.json"
    identity = load_identity(file)
    if identity is None:
        door = Door(url, key_file.read_text(encoding="ascii").strip())
        identity = enrol(door, file, name=None, token=None)
        door.close()
    variables = agent_variables(identity, url, folder / "agent", terms)
    return Child(Program("agent", AGENT_MODULE, variables, folder / "agent.log"))


def await_ready(server: Child, url: str, stop: threading.Event) -> None:
    """Until the server can take tasks; an error with its last words when it ends instead."""
    import time

    from gpool.client.door import Door

    door = Door(url, "")
    ends = time.monotonic() + _READY_S
    try:
        while not stop.is_set():
            if server.exit_code() is not None:
                raise InternalFault(f"the server did not start; it said:\n{server.last_words()}")
            try:
                door.send_once("GET", "/readyz")
                return
            except Unreachable:
                if time.monotonic() > ends:
                    raise
            stop.wait(_LOOK_S)
    finally:
        door.close()


def _announce(url: str, key_file: Path, profile: Path) -> None:
    link = _join_link(url, key_file)
    click.echo(f"gpool is up at {url}")
    click.echo(f"  key        {key_file} (profile 'local' in {profile})")
    click.echo("  try        gpool run -- python -c 'print(6*7)'")
    if link:
        click.echo(f"  more GPUs  gpool join {link}")
    click.echo("Ctrl-C stops it.")


def _join_link(url: str, key_file: Path) -> str:
    from gpool.client.door import Door

    door = Door(url, key_file.read_text(encoding="ascii").strip())
    try:
        return str(door.send_json("POST", "/v1/nodes/invites", {"expires_in_s": 86400})["link"])
    except GpoolError as error:
        click.echo(f"gpool: no join link could be made: {error.detail}", err=True)
        return ""
    finally:
        door.close()


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
@host_option
@port_option
def server(data: Path | None, host: str, port: int) -> None:
    """Start a server alone."""
    from gpool.client.config import data_home

    folder = (data or data_home()).expanduser().absolute()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    click.echo(f"Data in {folder}; the operator's key will be in {folder / KEY_FILE}", err=True)
    become(SERVER_MODULE, {**server_variables(folder, host, port)})
