"""Keccak-256 as Ethereum uses it: the original padding, not SHA-3's."""

from __future__ import annotations

try:
    from Crypto.Hash import keccak as _keccak
except ModuleNotFoundError as exc:
    raise ModuleNotFoundError(
        "wallets need the package pycryptodome: pip install 'gpool[wallet]'", name=exc.name
    ) from exc


def keccak256(data: bytes) -> bytes:
    return _keccak.new(data=data, digest_bits=256).digest()
