"""secp256k1: public key, sign, recover. No other module imports the library."""

from __future__ import annotations

try:
    from coincurve import PrivateKey, PublicKey
except ModuleNotFoundError as exc:
    raise ModuleNotFoundError(
        "wallets need the package coincurve: pip install 'gpool[wallet]'", name=exc.name
    ) from exc

ORDER = 0xFFFFFFFF_FFFFFFFF_FFFFFFFF_FFFFFFFE_BAAEDCE6_AF48A03B_BFD25E8C_D0364141


def public_key(secret: bytes) -> bytes:
    """x and y (64 bytes) of a secret, a non-zero scalar below the order."""
    return PublicKey.from_valid_secret(secret).format(compressed=False)[1:]


def sign(secret: bytes, digest: bytes) -> bytes:
    """r, s and the parity (65 bytes): deterministic (RFC 6979), low s."""
    return PrivateKey(secret).sign_recoverable(digest, hasher=None)


def recover(signature: bytes, digest: bytes) -> bytes | None:
    """x and y of the key behind r, s and the parity; None if there is no such point."""
    try:
        key = PublicKey.from_signature_and_message(signature, digest, hasher=None)
    except ValueError:
        return None
    return key.format(compressed=False)[1:]
