"""Certificates pinned by their SHA-256, as in a join link, and key files that only their owner may read.

The check is part of the handshake: nothing (no request, no key) is sent to a server with another certificate.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import ssl
import stat
from contextlib import suppress
from pathlib import Path

from gpool.core.errors import Invalid


def write_private(path: Path, data: bytes, *, replace: bool) -> None:
    """Write with mode 0600, flushed. Without `replace` an existing file is kept: of two writers one wins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if replace:
            draft.replace(path)
        else:
            with suppress(FileExistsError):
                os.link(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    if os.name == "nt":  # a folder cannot be opened there
        return
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_private(path: Path) -> bytes:
    """`Invalid` if anybody but the owner could have read or written the file."""
    with path.open("rb") as file:
        facts = os.fstat(file.fileno())
        mode = stat.S_IMODE(facts.st_mode)
        is_open = (
            os.name != "nt" and mode & 0o077
        )  # Windows keeps rights elsewhere: the profile is the user's
        if not stat.S_ISREG(facts.st_mode) or is_open:
            raise Invalid(f"{path} can be read by others (mode {mode:04o}); run `chmod 600 {path}`")
        return file.read()


_HEX = re.compile(r"[0-9a-f]{64}")


def fingerprint_of(der: bytes) -> str:
    """64 lower-case hexadecimal digits, as in links and profiles."""
    return hashlib.sha256(der).hexdigest()


def spelt_out(fingerprint: str) -> str:
    """Format for people to compare: `AB:CD:…`."""
    return ":".join(fingerprint[at : at + 2] for at in range(0, len(fingerprint), 2)).upper()


def parse_fingerprint(text: str) -> str:
    """Accept colons, blanks, capitals and the prefix `sha256=`."""
    plain = re.sub(r"[:\s]", "", re.sub(r"^\s*sha-?256\s*[=:]", "", text, flags=re.IGNORECASE))
    plain = plain.lower()
    if not _HEX.fullmatch(plain):
        raise Invalid(f"{text[:100]!r} is not a SHA-256 fingerprint: 64 hexadecimal digits")
    return plain


class WrongCertificate(ssl.SSLError):
    def __init__(self, pinned: str, shown: str | None) -> None:
        self.pinned, self.shown = pinned, shown
        seen = f"shows {spelt_out(shown)}" if shown else "shows none"
        self.sentence = (
            f"the server's certificate is not the one you trust: it {seen}, and {spelt_out(pinned)} was pinned. "
            "Somebody may be between you and the server. If its operator changed the certificate, "
            "ask them for a new link and sign in or join again"
        )
        super().__init__(1, self.sentence)

    def __str__(self) -> str:
        return self.sentence


def pinned_context(fingerprint: str) -> ssl.SSLContext:
    pinned = parse_fingerprint(fingerprint)

    def check(der: bytes | None) -> None:
        shown = fingerprint_of(der) if der else None
        if shown is None or not hmac.compare_digest(shown, pinned):
            raise WrongCertificate(pinned, shown)

    class PinnedSocket(ssl.SSLSocket):
        def do_handshake(self, block: bool = False) -> None:
            super().do_handshake(block)
            check(self.getpeercert(binary_form=True))

    class PinnedObject(ssl.SSLObject):
        def do_handshake(self) -> None:
            super().do_handshake()
            check(self.getpeercert(binary_form=True))

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION  # the checked certificate cannot be replaced
    context.check_hostname = False  # the certificate itself is pinned
    context.verify_mode = ssl.CERT_NONE  # `check` verifies; no CA chain is needed
    context.sslsocket_class = PinnedSocket
    context.sslobject_class = PinnedObject
    return context


def wrong_certificate(error: BaseException) -> WrongCertificate | None:
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, WrongCertificate):
            return seen
        seen = seen.__cause__ or seen.__context__
    return None
