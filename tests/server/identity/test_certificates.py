"""TLS: our own certificate is pinned, another one is refused before a byte is sent, with words one can act on."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import pytest
import uvloop
from cryptography import x509
from websockets.asyncio.client import connect

from gpool.core.errors import Invalid
from gpool.core.model import SECOND, Instant
from gpool.server.identity.certificates import (
    LIFE_DAYS,
    Certificate,
    load,
    make,
    own,
)
from gpool.transfer.keys import (
    WrongCertificate,
    fingerprint_of,
    parse_fingerprint,
    pinned_context,
    spelt_out,
)
from tests.tools.processes import PATIENCE_S

NOW = Instant(1_800_000_000 * SECOND)
NAMES = ("localhost", "pool.example", "127.0.0.1", "::1")
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok"


@dataclass
class Listener:
    """A real TLS server on loopback; keeps every byte that got through the handshake."""

    certificate: Certificate
    port: int = 0
    heard: list[bytes] = field(default_factory=list)


def server_context(certificate: Certificate) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(certificate.file, certificate.key_file)
    return context


@contextlib.contextmanager
def listening(
    certificate: Certificate, context: ssl.SSLContext | None = None
) -> Iterator[Listener]:
    listener = Listener(certificate)
    context = context or server_context(certificate)
    with socket.create_server(("127.0.0.1", 0)) as server:
        listener.port = server.getsockname()[1]
        over = threading.Event()

        def serve() -> None:
            while not over.is_set():
                try:
                    plain, _ = server.accept()
                except OSError:
                    return
                with plain, contextlib.suppress(OSError):
                    plain.settimeout(PATIENCE_S)
                    with context.wrap_socket(plain, server_side=True) as tls:
                        data = tls.recv(65536)
                        if data:
                            listener.heard.append(data)
                            tls.sendall(ANSWER)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener
        finally:
            over.set()
            server.shutdown(socket.SHUT_RDWR)  # it waits for nobody any more
            thread.join(PATIENCE_S)


@pytest.fixture
def certificate(tmp_path: Path) -> Certificate:
    return own(tmp_path / "tls", NAMES, NOW)


@pytest.fixture
def changed(tmp_path: Path) -> Certificate:
    """Same names, another key: what somebody in between would show."""
    return own(tmp_path / "changed", NAMES, NOW)


# ---- making and loading


def test_a_certificate_is_made_once_with_a_key_for_its_owner_only(tmp_path: Path) -> None:
    first = own(tmp_path / "tls", NAMES, NOW)
    assert stat.S_IMODE(first.key_file.stat().st_mode) == 0o600
    assert own(tmp_path / "tls", ["other.example"], NOW) == first
    assert sorted(first.names) == sorted(NAMES)
    assert first.expires_at == NOW + LIFE_DAYS * 86_400 * SECOND
    first.key_file.chmod(0o644)
    with pytest.raises(Invalid, match="chmod 600"):
        own(tmp_path / "tls", NAMES, NOW)


def test_the_fingerprint_is_that_of_the_certificate_as_it_travels(certificate: Certificate) -> None:
    text = certificate.file.read_text()
    der = ssl.PEM_cert_to_DER_cert(text[text.index("-----BEGIN CERTIFICATE") :])
    assert certificate.fingerprint == fingerprint_of(der)
    found = x509.load_der_x509_certificate(der)
    assert found.not_valid_before_utc.timestamp() < NOW // SECOND


def test_a_given_certificate_is_taken_with_its_own_key_only(tmp_path: Path) -> None:
    one, two = make(["a.example"], NOW), make(["b.example"], NOW)
    for name, data in [
        ("a.pem", one.certificate_pem),
        ("a.key", one.key_pem),
        ("b.key", two.key_pem),
    ]:
        (tmp_path / name).write_bytes(data)
    assert load(tmp_path / "a.pem", tmp_path / "a.key").names == ("a.example",)
    for file, key, complaint in [
        ("a.pem", "b.key", "does not belong"),
        ("a.key", "a.key", "holds no certificate"),
        ("a.pem", "a.pem", "holds no private key"),
        ("none.pem", "a.key", "cannot be read"),
    ]:
        with pytest.raises(Invalid, match=complaint):
            load(tmp_path / file, tmp_path / key)


@pytest.mark.parametrize("names", [[], ["x" * 300], [""]])
def test_a_certificate_for_no_proper_name_is_refused(names: list[str]) -> None:
    with pytest.raises(Invalid):
        make(names, NOW)


def test_a_private_key_never_shows_when_printed() -> None:
    made = make(["a.example"], NOW)
    assert "PRIVATE" not in repr(made)


# ---- fingerprints

DIGITS = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    "text",
    [
        DIGITS,
        DIGITS.upper(),
        spelt_out(DIGITS),
        f"sha256={DIGITS}",
        f" SHA256:{spelt_out(DIGITS)}\n",
    ],
)
def test_a_fingerprint_is_read_as_people_write_it(text: str) -> None:
    assert parse_fingerprint(text) == DIGITS


@pytest.mark.parametrize("text", ["", DIGITS[1:], DIGITS + "0", "g" + DIGITS[1:], "sha1=" + DIGITS])
def test_what_is_no_fingerprint_is_refused(text: str) -> None:
    with pytest.raises(Invalid, match="64 hexadecimal digits"):
        parse_fingerprint(text)


# ---- over a real socket


def ask(listener: Listener, fingerprint: str) -> str:
    """By httpx2 in a thread."""
    with httpx2.Client(
        verify=pinned_context(fingerprint), trust_env=False, timeout=PATIENCE_S
    ) as http:
        return http.get(f"https://127.0.0.1:{listener.port}/", headers={"x": "secret"}).text


async def ask_async(listener: Listener, fingerprint: str) -> str:
    """By httpx2 in an event loop."""
    async with httpx2.AsyncClient(
        verify=pinned_context(fingerprint), trust_env=False, timeout=PATIENCE_S
    ) as http:
        return (await http.get(f"https://127.0.0.1:{listener.port}/", headers={"x": "secret"})).text


def test_the_pinned_server_is_talked_to(certificate: Certificate) -> None:
    with listening(certificate) as listener:
        assert ask(listener, certificate.fingerprint) == "ok"
        assert asyncio.run(ask_async(listener, certificate.fingerprint)) == "ok"
        assert uvloop.run(ask_async(listener, certificate.fingerprint)) == "ok"
        assert len(listener.heard) == 3


def test_another_certificate_is_refused_before_anything_is_sent(
    certificate: Certificate, changed: Certificate
) -> None:
    with listening(changed) as listener:
        for call in (
            lambda: ask(listener, certificate.fingerprint),
            lambda: asyncio.run(ask_async(listener, certificate.fingerprint)),
            lambda: uvloop.run(ask_async(listener, certificate.fingerprint)),
        ):
            with pytest.raises(httpx2.ConnectError) as caught:
                call()
            said = str(caught.value)
            assert "certificate is not the one you trust" in said
            assert spelt_out(certificate.fingerprint) in said
            assert spelt_out(changed.fingerprint) in said
            assert "ask them for a new link" in said
    assert listener.heard == []


def test_without_the_pin_the_same_false_server_hears_everything(
    changed: Certificate,
) -> None:
    """The control."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        listening(changed) as listener,
        httpx2.Client(verify=context, trust_env=False, timeout=PATIENCE_S) as http,
    ):
        assert http.get(f"https://127.0.0.1:{listener.port}/", headers={"x": "secret"}).text == "ok"
    assert b"secret" in listener.heard[0]


@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run])
def test_the_agents_websocket_is_pinned_too(
    certificate: Certificate, changed: Certificate, runner: object
) -> None:
    async def open_channel(listener: Listener) -> None:
        url = f"wss://127.0.0.1:{listener.port}/v1/channel"
        pinned = pinned_context(certificate.fingerprint)
        async with connect(url, ssl=pinned, proxy=None, open_timeout=PATIENCE_S):
            raise AssertionError("this listener speaks no WebSocket")

    with listening(changed) as listener, pytest.raises(WrongCertificate):
        runner(open_channel(listener))  # type: ignore[operator]
    assert listener.heard == []
    with (
        listening(certificate) as listener,
        pytest.raises(Exception, match=r"(?i)websocket|status|200"),
    ):
        runner(open_channel(listener))  # type: ignore[operator]
    assert b"Upgrade" in listener.heard[0]


def test_a_plain_socket_is_pinned_too(certificate: Certificate, changed: Certificate) -> None:
    for shown, pinned, good in [(certificate, certificate, True), (changed, certificate, False)]:
        with listening(shown) as listener:
            plain = socket.create_connection(("127.0.0.1", listener.port), PATIENCE_S)
            with plain, contextlib.ExitStack() as expecting:
                if not good:
                    expecting.enter_context(pytest.raises(WrongCertificate))
                with pinned_context(pinned.fingerprint).wrap_socket(plain) as tls:
                    tls.sendall(b"hello")
                    assert tls.recv(100) == ANSWER
        assert bool(listener.heard) is good


def test_a_host_name_that_is_not_in_the_certificate_does_not_matter(
    certificate: Certificate,
) -> None:
    """Addresses change, and tunnels have other names; the certificate is the same."""
    with listening(certificate) as listener:
        plain = socket.create_connection(("127.0.0.1", listener.port), PATIENCE_S)
        context = pinned_context(certificate.fingerprint)
        with plain, context.wrap_socket(plain, server_hostname="elsewhere.example") as tls:
            tls.sendall(b"hello")
            assert tls.recv(100) == ANSWER
