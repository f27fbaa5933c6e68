"""The server's TLS certificate: configured, or self-signed at first start. Contacts no authority.

The own certificate is ECDSA P-256 (browsers support no Ed25519) and lives ten years: clients pin its fingerprint,
and a new one means new links for everybody.
"""

from __future__ import annotations

import datetime
import ipaddress
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from gpool.core.errors import Invalid
from gpool.core.model import SECOND, Instant
from gpool.server.settings import Settings
from gpool.transfer.keys import fingerprint_of, read_private, write_private
from gpool.transfer.requests import WILDCARDS

LIFE_DAYS = 3650
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
CLOCK_SLACK_DAYS = 1
"""For clients whose clock is behind."""


@dataclass(frozen=True, slots=True)
class Certificate:
    file: Path
    key_file: Path
    fingerprint: str
    names: tuple[str, ...]
    expires_at: Instant
    own: bool = False  # self-signed by `own`: clients trust its fingerprint only


def certificate_of(settings: Settings, now: Instant) -> Certificate | None:
    """Configured certificate, else the server's own; None: plain HTTP. `Invalid` names the fault of a given one."""
    if not settings.uses_tls:
        return None
    if settings.tls_cert is not None and settings.tls_key is not None:
        return load(settings.tls_cert, settings.tls_key)
    return own(settings.data, _names_for(settings), now)


def _names_for(settings: Settings) -> list[str]:
    """Names for the own certificate: clients pin it and check no name, but browsers do."""
    named = (settings.host, urlsplit(settings.url).hostname or "", platform.node())
    found = [name for name in named if name not in WILDCARDS and _is_name(name)]
    return list(dict.fromkeys((*found, "localhost", "127.0.0.1", "::1")))


def _is_name(text: str) -> bool:
    return ":" in text or _HOST.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class CertificatePem:
    certificate_pem: bytes
    key_pem: bytes = field(repr=False)


def make(names: Sequence[str], now: Instant) -> CertificatePem:
    if not names:
        raise Invalid("a certificate needs at least one host name or address")
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "gpool server")])
    start = _datetime(now)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start - datetime.timedelta(days=CLOCK_SLACK_DAYS))
        .not_valid_after(start + datetime.timedelta(days=LIFE_DAYS))
        .add_extension(x509.SubjectAlternativeName([_name(each) for each in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    )
    signed = builder.sign(key, hashes.SHA256())
    return CertificatePem(
        signed.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )


def own_file(folder: Path) -> Path:
    return folder / "server.pem"


def own(folder: Path, names: Sequence[str], now: Instant) -> Certificate:
    """Certificate in the folder, created if missing. Key and certificate share one file, so a crash leaves no half pair."""
    both = own_file(folder)
    if not both.exists():
        made = make(names, now)
        write_private(both, made.key_pem + made.certificate_pem, replace=False)
    read_private(both)
    return replace(load(both, both), own=True)


def load(file: Path, key_file: Path) -> Certificate:
    try:
        pem, key_pem = file.read_bytes(), key_file.read_bytes()
    except OSError as error:
        raise Invalid(f"the certificate cannot be read: {error}") from error
    try:
        found = x509.load_pem_x509_certificates(pem)[0]
    except ValueError as error:
        raise Invalid(f"{file} holds no certificate in PEM form") from error
    try:
        key = serialization.load_pem_private_key(key_pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise Invalid(f"{key_file} holds no private key in PEM form without a password") from error
    form = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    if key.public_key().public_bytes(*form) != found.public_key().public_bytes(*form):
        raise Invalid(f"the key in {key_file} does not belong to the certificate in {file}")
    return Certificate(
        file,
        key_file,
        fingerprint_of(found.public_bytes(serialization.Encoding.DER)),
        _names(found),
        Instant(int(found.not_valid_after_utc.timestamp()) * SECOND),
    )


def _name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text.strip("[]")))
    except ValueError:
        pass
    try:
        if not text:
            raise ValueError("an empty name")
        return x509.DNSName(text.encode("idna").decode())
    except (UnicodeError, ValueError) as error:
        raise Invalid(f"{text[:80]!r} is neither a host name nor an address") from error


def _names(found: x509.Certificate) -> tuple[str, ...]:
    try:
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    return (
        *names.get_values_for_type(x509.DNSName),
        *(str(each) for each in names.get_values_for_type(x509.IPAddress)),
    )


def _datetime(now: Instant) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(now // SECOND, datetime.UTC)
