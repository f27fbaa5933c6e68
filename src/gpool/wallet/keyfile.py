"""Private key from a file: bare hex or an encrypted key file. Warns if others could read the file."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from gpool.wallet import keystore
from gpool.wallet.errors import BadKey, BadKeyFile
from gpool.wallet.keystore import Keystore
from gpool.wallet.signing import WalletKey


@dataclass(frozen=True, slots=True)
class KeyFile:
    content: WalletKey | Keystore
    warnings: tuple[str, ...]


def read(path: Path) -> KeyFile:
    """Read a key file; `BadKeyFile` never repeats its content."""
    data, mode = _load(path)
    content = _content(path, data)
    warnings = []
    if isinstance(content, WalletKey):
        warnings.append(f"{path} holds a key that is not encrypted; a keystore file is safer")
    if mode & 0o077:
        warnings.append(f"{path} can be read by others on this machine; run chmod 600 {path}")
    return KeyFile(content, tuple(warnings))


def _content(path: Path, data: bytes) -> WalletKey | Keystore:
    if data.lstrip()[:1] == b"{":
        return keystore.parse(data)
    try:
        return WalletKey.parse(data.decode("ascii").strip())
    except (BadKey, UnicodeDecodeError):
        raise BadKeyFile(
            f"{path} contains neither a private key (64 hex digits) nor an encrypted key file (JSON)"
        ) from None


def _load(path: Path) -> tuple[bytes, int]:
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise BadKeyFile(f"{path} is not a file")
            data = file.read(keystore.MAX_FILE_BYTES + 1)
    except OSError as exc:
        raise BadKeyFile(f"{path} cannot be read: {exc.strerror}") from exc
    if len(data) > keystore.MAX_FILE_BYTES:
        raise BadKeyFile(f"{path} is too large for a key file")
    return data, stat.S_IMODE(about.st_mode) if os.name == "posix" else 0


def _without_waiting(path: str, flags: int) -> int:
    """A named pipe would wait for a writer."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
