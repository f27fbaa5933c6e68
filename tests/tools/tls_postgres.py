"""Debian's PostgreSQL, which speaks TLS (the wheel's does not), with an authority and certificates of its own."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.tools.processes import PATIENCE_S, STOPPED_S, eventually, free_port

USER = "postgres"
PASSWORD = "of the tests"


def programs() -> Path | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return found[-1].parent if found else None


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate authority in memory."""

    name: str
    key: ec.EllipticCurvePrivateKey

    def certificate(self, host: str, key: ec.EllipticCurvePrivateKey) -> bytes:
        """PEM certificate of a server called `host`; of the authority itself for its own name and key."""
        is_own = key is self.key
        now = datetime(2026, 1, 1, tzinfo=UTC)
        built = (
            x509.CertificateBuilder()
            .subject_name(_named(self.name if is_own else host))
            .issuer_name(_named(self.name))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now)
            .not_valid_after(now + timedelta(days=36_500))
            .add_extension(x509.BasicConstraints(ca=is_own, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        )
        return built.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def write(self, path: Path) -> Path:
        path.write_bytes(self.certificate(self.name, self.key))
        return path


def authority(name: str) -> Authority:
    return Authority(name, ec.generate_private_key(ec.SECP256R1()))


def _named(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


@contextmanager
def tls_postgres(by: Authority, host: str) -> Iterator[int]:
    """Serve on loopback, TLS only, with a certificate for `host`; return the port. Root starts it as another user."""
    binaries = programs()
    assert binaries is not None
    folder = Path(tempfile.mkdtemp(prefix="gpool-postgres-tls-"))
    user = pwd.getpwnam(USER) if os.geteuid() == 0 else None
    key = ec.generate_private_key(ec.SECP256R1())
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    (folder / "server.key").write_bytes(pem)
    (folder / "server.key").chmod(0o600)
    (folder / "server.crt").write_bytes(by.certificate(host, key))
    (folder / "password").write_text(PASSWORD)
    if user is not None:
        for path in (folder, *folder.iterdir()):
            os.chown(path, user.pw_uid, user.pw_gid)
    starts: dict[str, Any] = {"cwd": folder}
    if user is not None:
        starts |= {"user": user.pw_uid, "group": user.pw_gid}
    data, port = folder / "data", free_port()
    try:
        made = [str(binaries / "initdb"), "-D", str(data), "-U", USER, "-A", "scram-sha-256", "-N"]
        made.append(f"--pwfile={folder / 'password'}")
        subprocess.run(made, check=True, capture_output=True, **starts)
        (data / "pg_hba.conf").write_text("hostssl all all 127.0.0.1/32 scram-sha-256\n")
        options = {
            "listen_addresses": "127.0.0.1",
            "port": str(port),
            "unix_socket_directories": str(folder),
            "ssl": "on",
            "ssl_cert_file": str(folder / "server.crt"),
            "ssl_key_file": str(folder / "server.key"),
            "fsync": "off",
        }
        given = [word for name, value in options.items() for word in ("-c", f"{name}={value}")]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [str(binaries / "postgres"), "-D", str(data), *given],
                stdout=log,
                stderr=log,
                **starts,
            )
        try:
            ready = [str(binaries / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(port)]
            eventually(
                "PostgreSQL answers",
                lambda: subprocess.run(ready, check=False).returncode == 0,
                PATIENCE_S,
                every_s=0.1,
            )
            yield port
        finally:
            process.send_signal(signal.SIGINT)  # a fast shutdown
            process.wait(STOPPED_S)
    finally:
        shutil.rmtree(folder)
