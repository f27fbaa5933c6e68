"""Private keys from files: bare hex, or Web3 Secret Storage version 3. Decrypts only.

The file names its own work factor: an excessive one is rejected before any work.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar, cast

import msgspec
from Crypto.Cipher import AES
from Crypto.Protocol.KDF import scrypt

from gpool.wallet.crypto import keccak256
from gpool.wallet.errors import BadKey, BadKeyFile, WrongPassword
from gpool.wallet.signing import WalletKey

MAX_FILE_BYTES = 64 * 1024
MAX_SCRYPT_MEMORY = 512 * 1024 * 1024
"""Twice the memory of the costliest common setting (n = 262,144, r = 8)."""
MAX_SCRYPT_WORK = 1 << 25
"""n · r · p; the costliest common setting has 2^21 and takes about a second."""
MAX_SCRYPT_BLOCKS = 64
"""r and p each; common settings have at most 10."""
MAX_PBKDF2_ROUNDS = 10_000_000
MAX_SALT_BYTES = 1024
KEY_LENGTH = 32
# Not hashlib's: OpenSSL rejects n = 262,144 with r = 1, the standard's own example.
# The library takes bytes; its stubs declare text.
_scrypt = cast("Callable[[bytes, bytes, int, int, int, int], bytes]", scrypt)
_T = TypeVar("_T")
_ADDRESS = re.compile(r"(?:0x)?([0-9a-fA-F]{40})")


@dataclass(frozen=True, slots=True)
class Scrypt:
    salt: bytes
    n: int
    r: int
    p: int

    def __post_init__(self) -> None:
        if self.n < 2 or self.n & (self.n - 1) or self.r < 1 or self.p < 1:
            raise BadKeyFile(
                f"scrypt cannot run with n={self.n}, r={self.r}, p={self.p}: n is a power of two, all are positive"
            )
        memory, work = 128 * self.n * self.r, self.n * self.r * self.p
        if (
            memory > MAX_SCRYPT_MEMORY
            or work > MAX_SCRYPT_WORK
            or max(self.r, self.p) > MAX_SCRYPT_BLOCKS
        ):
            raise BadKeyFile(
                f"the key file asks for scrypt with n={self.n}, r={self.r}, p={self.p}: more work than any wallet's;"
                " make it anew with n=262144, r=8, p=1"
            )

    def derive(self, password: bytes) -> bytes:
        return _scrypt(password, self.salt, KEY_LENGTH, self.n, self.r, self.p)


@dataclass(frozen=True, slots=True)
class Pbkdf2:
    salt: bytes
    rounds: int

    def __post_init__(self) -> None:
        if not 1 <= self.rounds <= MAX_PBKDF2_ROUNDS:
            raise BadKeyFile(
                f"the key file asks for {self.rounds} rounds of PBKDF2; 1 to {MAX_PBKDF2_ROUNDS} are done here"
            )

    def derive(self, password: bytes) -> bytes:
        return hashlib.pbkdf2_hmac("sha256", password, self.salt, self.rounds, KEY_LENGTH)


@dataclass(frozen=True, slots=True)
class Keystore:
    kdf: Scrypt | Pbkdf2
    iv: bytes
    ciphertext: bytes = field(repr=False)
    mac: bytes = field(repr=False)
    address: str | None
    """40 lower-case hex digits, if the file names its address."""

    def decrypt(self, password: str) -> WalletKey:
        """Return the key; `WrongPassword` if the MAC does not match. Takes about a second by design."""
        derived = self.kdf.derive(password.encode("utf-8", "surrogatepass"))
        if not hmac.compare_digest(keccak256(derived[16:32] + self.ciphertext), self.mac):
            raise WrongPassword("the password does not open this key file (or the file is damaged)")
        cipher = AES.new(derived[:16], AES.MODE_CTR, nonce=b"", initial_value=self.iv)
        try:
            key = WalletKey(cipher.decrypt(self.ciphertext))
        except BadKey as exc:
            raise BadKeyFile("the key file decrypts, but contains no private key") from exc
        if self.address is not None and key.address[2:].lower() != self.address:
            raise BadKeyFile(f"the key file says 0x{self.address}, but its key is {key.address}'s")
        return key


class _Cipher(msgspec.Struct):
    iv: str


class _ScryptParams(msgspec.Struct):
    dklen: int
    salt: str
    n: int
    r: int
    p: int


class _Pbkdf2Params(msgspec.Struct):
    dklen: int
    salt: str
    c: int
    prf: Literal["hmac-sha256"]


class _Crypto(msgspec.Struct):
    cipher: Literal["aes-128-ctr"]
    cipherparams: _Cipher
    ciphertext: str
    kdf: Literal["scrypt", "pbkdf2"]
    kdfparams: msgspec.Raw
    mac: str


class _File(msgspec.Struct):
    version: Literal[3]
    crypto: _Crypto | None = None
    old_crypto: _Crypto | None = msgspec.field(
        default=None, name="Crypto"
    )  # as early geth wrote it
    address: str | None = None


def parse(data: bytes) -> Keystore:
    if len(data) > MAX_FILE_BYTES:
        raise BadKeyFile(f"a key file has at most {MAX_FILE_BYTES} bytes, this one {len(data)}")
    file = _decoded(data, _File)
    crypto = file.crypto or file.old_crypto
    if crypto is None:
        raise BadKeyFile("the key file has no 'crypto' part")
    return Keystore(
        kdf=_kdf(crypto),
        iv=_hex("iv", crypto.cipherparams.iv, 16),
        ciphertext=_hex("ciphertext", crypto.ciphertext, KEY_LENGTH),
        mac=_hex("mac", crypto.mac, 32),
        address=_address(file.address),
    )


def _kdf(crypto: _Crypto) -> Scrypt | Pbkdf2:
    params: _ScryptParams | _Pbkdf2Params
    if crypto.kdf == "scrypt":
        params = _decoded(crypto.kdfparams, _ScryptParams)
    else:
        params = _decoded(crypto.kdfparams, _Pbkdf2Params)
    if params.dklen != KEY_LENGTH:
        raise BadKeyFile(f"dklen is {params.dklen} in the key file; {KEY_LENGTH} is what is in use")
    salt = _hex("salt", params.salt)
    if len(salt) > MAX_SALT_BYTES:
        raise BadKeyFile(f"the salt has {len(salt)} bytes; {MAX_SALT_BYTES} are allowed")
    if isinstance(params, _ScryptParams):
        return Scrypt(salt, params.n, params.r, params.p)
    return Pbkdf2(salt, params.c)


def _decoded(data: bytes | msgspec.Raw, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise BadKeyFile(f"not a version 3 key file: {exc}") from exc


def _hex(name: str, text: str, length: int | None = None) -> bytes:
    try:
        raw = bytes.fromhex(text) if text.isalnum() or not text else None
    except ValueError:
        raw = None
    if raw is None or (length is not None and len(raw) != length):
        wanted = f"{length} bytes in hex" if length is not None else "hex"
        raise BadKeyFile(f"{name} in the key file is not {wanted}")
    return raw


def _address(text: str | None) -> str | None:
    if not text:
        return None
    found = _ADDRESS.fullmatch(text)
    if found is None:
        raise BadKeyFile("the address in the key file is not 40 hex digits")
    return found[1].lower()


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
        return parse(data)
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
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as exc:
        raise BadKeyFile(f"{path} cannot be read: {exc.strerror}") from exc
    if len(data) > MAX_FILE_BYTES:
        raise BadKeyFile(f"{path} is too large for a key file")
    return data, stat.S_IMODE(about.st_mode) if os.name == "posix" else 0


def _without_waiting(path: str, flags: int) -> int:
    """A named pipe would wait for a writer."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
