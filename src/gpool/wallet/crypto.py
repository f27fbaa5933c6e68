"""Cryptographic primitives: Keccak-256 with Ethereum's padding, secp256k1, Merkle trees. No other module imports the
library.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gpool.wallet.errors import BadTree

try:
    from Crypto.Hash import keccak as _keccak
except ModuleNotFoundError as exc:
    raise ModuleNotFoundError(
        "wallets need the package pycryptodome: pip install 'gpool[wallet]'", name=exc.name
    ) from exc


def keccak256(data: bytes) -> bytes:
    return _keccak.new(data=data, digest_bits=256).digest()


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


HASH_LENGTH = 32
MAX_DEPTH = 64
"""Longest proof: a larger tree would not fit into memory."""


def leaf(value: bytes) -> bytes:
    """Hash a value: for a contract, the ABI encoding of the claim."""
    return keccak256(keccak256(value))


def node(one: bytes, other: bytes) -> bytes:
    return keccak256(one + other if one < other else other + one)


@dataclass(frozen=True, slots=True)
class MerkleTree:
    """Leaves are sorted at the end of one list, last first; the parent of entry i is (i - 1) // 2, the root entry 0."""

    nodes: tuple[bytes, ...] = field(repr=False)
    places: dict[bytes, int] = field(repr=False, compare=False)

    @classmethod
    def of(cls, values: Iterable[bytes]) -> MerkleTree:
        return cls.of_leaves([leaf(value) for value in values])

    @classmethod
    def of_leaves(cls, leaves: Sequence[bytes]) -> MerkleTree:
        """Build from hashes made by `leaf`. Raw 64-byte values would defeat the double hash."""
        if not leaves:
            raise BadTree("a Merkle tree needs at least one leaf")
        if any(len(each) != HASH_LENGTH for each in leaves):
            raise BadTree(f"a leaf has {HASH_LENGTH} bytes")
        nodes = [b""] * (len(leaves) - 1) + sorted(leaves, reverse=True)
        for index in range(len(leaves) - 2, -1, -1):
            nodes[index] = node(nodes[2 * index + 1], nodes[2 * index + 2])
        places = {
            each: len(leaves) - 1 + place for place, each in enumerate(nodes[len(leaves) - 1 :])
        }
        return cls(tuple(nodes), places)

    @property
    def root(self) -> bytes:
        return self.nodes[0]

    def proof(self, value: bytes) -> tuple[bytes, ...]:
        return self.proof_of_leaf(leaf(value))

    def proof_of_leaf(self, hashed: bytes) -> tuple[bytes, ...]:
        index = self.places.get(hashed)
        if index is None:
            raise BadTree("the tree does not contain this value")
        proof = []
        while index:
            proof.append(self.nodes[index + 1 if index % 2 else index - 1])
            index = (index - 1) // 2
        return tuple(proof)


def verify(root: bytes, value: bytes, proof: Sequence[bytes]) -> bool:
    return verify_leaf(root, leaf(value), proof)


def verify_leaf(root: bytes, hashed: bytes, proof: Sequence[bytes]) -> bool:
    if len(proof) > MAX_DEPTH or any(len(each) != HASH_LENGTH for each in (root, hashed, *proof)):
        return False
    for sibling in proof:
        hashed = node(hashed, sibling)
    return hashed == root
