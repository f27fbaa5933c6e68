"""Options of `up` and `server` for address and TLS, and the server's variables."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpool.cli.command import option_section
from gpool.core.errors import Invalid
from gpool.transfer.requests import Address, is_loopback

if TYPE_CHECKING:
    from gpool.server.settings import Settings

DEFAULT_PORT = 8642

server_option = option_section("Server")
tls_option = option_section("TLS")

data_option = server_option(
    "--data",
    envvar="GPOOL_SERVER_DATA",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Data directory (default: gpool in the user's data directory).",
)
host_option = server_option(
    "--host",
    envvar="GPOOL_SERVER_HOST",
    default="127.0.0.1",
    show_default=True,
    metavar="ADDRESS",
    help="Address to listen on.",
)
port_option = server_option(
    "--port",
    envvar="GPOOL_SERVER_PORT",
    type=click.IntRange(1, 65535),
    default=DEFAULT_PORT,
    show_default=True,
    metavar="PORT",
    help="Port to listen on.",
)


_TLS = (
    tls_option(
        "--tls/--no-tls", default=None, help="Encrypt connections (default: except on loopback)."
    ),
    tls_option(
        "--tls-cert",
        envvar="GPOOL_SERVER_TLS_CERT",
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        metavar="FILE",
        help="Certificate, PEM (default: a self-signed one, checked by its fingerprint).",
    ),
    tls_option(
        "--tls-key",
        envvar="GPOOL_SERVER_TLS_KEY",
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        metavar="FILE",
        help="Private key of the certificate, PEM.",
    ),
    tls_option(
        "--behind-proxy",
        metavar="ADDRESSES",
        help="Serve plain HTTP to a proxy that terminates TLS; trust X-Forwarded-* from these addresses "
        "or networks, separated by commas.",
    ),
    tls_option(
        "--public-url",
        envvar="GPOOL_SERVER_PUBLIC_URL",
        metavar="URL",
        help="Address under which others reach the server: in links, invites and sign-in messages "
        "(default: host and port, the machine's own address if it listens on all).",
    ),
)


@dataclass(frozen=True, slots=True)
class Transport:
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

    def settings(self, folder: Path) -> Settings:
        """The server's settings: these options over the environment."""
        from pydantic import ValidationError

        from gpool.server.settings import Settings

        given = {
            name.removeprefix("GPOOL_SERVER_").lower(): value
            for name, value in self.variables(folder).items()
        }
        try:
            return Settings(**given)  # type: ignore[arg-type]
        except ValidationError as error:
            raise Invalid("; ".join(each["msg"] for each in error.errors())) from error

    def address(self, folder: Path) -> Address:
        """Creates the server's certificate if there is none."""
        place = f"{_dialled(self.host)}:{self.port}"
        configured = any(os.environ.get(f"GPOOL_SERVER_{name}") for name in ("TLS", "PLAIN_HTTP"))
        if is_loopback(self.host) and not (
            self.tls or self.tls_cert or self.behind_proxy or configured
        ):
            return Address(f"http://{place}")  # known without importing the server
        from gpool.server.clock import SystemClock
        from gpool.server.identity.certificates import certificate_of

        settings = self.settings(folder)
        certificate = certificate_of(settings, SystemClock().now())
        if certificate is None:
            return Address(f"http://{place}", plain=settings.plain_http)
        return Address(f"https://{place}", certificate.fingerprint)


def listening(function: Callable[..., None]) -> Callable[..., None]:

    @wraps(function)
    def with_transport(*args: Any, **values: Any) -> None:
        transport = Transport(**{one.name: values.pop(one.name) for one in fields(Transport)})
        function(*args, transport=transport, **values)

    found: Callable[..., None] = with_transport
    for option in reversed((host_option, port_option, *_TLS)):
        found = option(found)
    return found


def _dialled(host: str) -> str:
    if host == "::":  # no IPv4 socket
        return "[::1]"
    if host in ("0.0.0.0", ""):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
