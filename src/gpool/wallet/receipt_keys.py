"""Receipt keys: the Ed25519 keys with which a pool signs receipts, and their public history; the work that nodes sign. No I/O.

The history only grows. Each entry is signed by the key before it, the first one by itself, so whoever has kept an
old copy can check a newer one without asking the pool. A key is valid from its entry until the entry after it:

    rk-1 from 0 ----------> rk-2 from 1000 ----------> rk-3 from 5000 ----->
    a receipt issued at 999 needs rk-1; one issued at 1000 needs rk-2.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Annotated, NamedTuple

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from msgspec import Meta

from gpool.wallet import canonical_json
from gpool.wallet.errors import BadDocument, BadReceipt

OpaqueId = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9:_.-]{0,79}\Z")]
"""Ids of the pool: neither names nor addresses of people."""
PublicKeyHex = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
SignatureHex = Annotated[str, Meta(pattern=r"^[0-9a-f]{128}\Z")]
Milliseconds = Annotated[int, Meta(ge=0, le=canonical_json.LARGEST_INTEGER)]
"""Unix time, or a duration, by the server's clock."""
VERSION = 1


def key_id(public: str) -> str:
    """Id of a receipt key: derived from the key, so that no id names two keys."""
    return "rk-" + hashlib.sha256(bytes.fromhex(public)).hexdigest()[:32]


@lru_cache(maxsize=1024)
def is_signed(public: str, signature: str, message: bytes) -> bool:
    """Check an Ed25519 signature; keys and signatures in lower-case hex. Cached: one may be of hundreds of works."""
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public))
        key.verify(bytes.fromhex(signature), message)
    except (InvalidSignature, ValueError):
        return False
    return True


class ReceiptKey:
    """Private half of a receipt key: in no repr, error or log."""

    __slots__ = ("_private", "public")

    def __init__(self, seed: bytes) -> None:
        """`seed`: 32 random bytes."""
        self._private = Ed25519PrivateKey.from_private_bytes(seed)
        self.public = self._private.public_key().public_bytes_raw().hex()

    @property
    def id(self) -> str:
        return key_id(self.public)

    def sign(self, message: bytes) -> str:
        return self._private.sign(message).hex()


class KeyEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    public: PublicKeyHex
    from_ms: Milliseconds
    endorsement: SignatureHex
    """By the key of the entry before; of the first entry by its own key."""


class KeyHistory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Receipt keys of a pool in order; checked when it is parsed or made."""

    pool: OpaqueId
    keys: Annotated[tuple[KeyEntry, ...], Meta(min_length=1, max_length=10_000)]
    version: Annotated[int, Meta(ge=VERSION, le=VERSION)] = VERSION

    def __post_init__(self) -> None:
        """`ValueError` (which msgspec reports) if an entry was not endorsed by the one before it."""
        signer = self.keys[0].public
        before = -1
        for entry in self.keys:
            if entry.from_ms <= before:
                raise ValueError(f"{key_id(entry.public)} is not newer than the key before it")
            statement = _endorsement(self.pool, entry.public, entry.from_ms)
            if not is_signed(signer, entry.endorsement, statement):
                raise ValueError(f"{key_id(entry.public)} is not signed by the key before it")
            signer, before = entry.public, entry.from_ms
        if len({entry.public for entry in self.keys}) != len(self.keys):
            raise ValueError("a key occurs twice in the history")

    @staticmethod
    def starting(pool: str, key: ReceiptKey, from_ms: int) -> KeyHistory:
        return KeyHistory(pool, (_endorsed(pool, key, key, from_ms),))

    def rotated(self, current: ReceiptKey, new: ReceiptKey, from_ms: int) -> KeyHistory:
        """History in which `new` replaces `current`, which must be the last key; `BadReceipt` otherwise."""
        if current.public != self.keys[-1].public:
            raise BadReceipt(f"{current.id} is not the current receipt key of {self.pool}")
        try:
            return KeyHistory(self.pool, (*self.keys, _endorsed(self.pool, current, new, from_ms)))
        except ValueError as exc:
            raise BadReceipt(f"the receipt key cannot be replaced: {exc}") from exc

    def key_at(self, issued_ms: int) -> KeyEntry | None:
        """Key that was valid at an instant; None before the first one."""
        started = [entry for entry in self.keys if entry.from_ms <= issued_ms]
        return started[-1] if started else None

    def entry(self, id_: str) -> KeyEntry | None:
        return next((entry for entry in self.keys if key_id(entry.public) == id_), None)

    def extends(self, older: KeyHistory) -> bool:
        """Return whether this history is the older one with further keys."""
        return self.pool == older.pool and self.keys[: len(older.keys)] == older.keys

    def to_bytes(self) -> bytes:
        return canonical_json.encode(msgspec.to_builtins(self))


def parse_history(data: bytes) -> KeyHistory:
    """`BadReceipt` for anything but an unbroken history in canonical form."""
    try:
        return msgspec.convert(canonical_json.decode(data), KeyHistory)
    except (BadDocument, msgspec.ValidationError) as exc:
        raise BadReceipt(f"not a history of receipt keys: {exc}") from exc


def _endorsed(pool: str, signer: ReceiptKey, key: ReceiptKey, from_ms: int) -> KeyEntry:
    statement = _endorsement(pool, key.public, from_ms)
    return KeyEntry(key.public, from_ms, signer.sign(statement))


def _endorsement(pool: str, public: str, from_ms: int) -> bytes:
    fields = {"from_ms": from_ms, "pool": pool, "public": public}
    return b"gpool receipt key 1\0" + canonical_json.encode(fields)


# ---- work that a node signs; agents import it, so this module needs neither secp256k1 nor Keccak

NO_RESULT = "0" * 64
"""`result_sha256` of an attempt that was charged but left no result, such as a cancelled one."""
MAX_GPUS = 64

Label = Annotated[str, Meta(min_length=1, max_length=100)]


def result_hash(value: bytes, value_sha256: str, files: Iterable[tuple[str, str]]) -> str:
    """SHA-256 of an attempt's result, in hexadecimal.

    Of a function it is that of its value. Of output files, (path, SHA-256) each, it is that of the text which `sha256sum`
    prints for them, sorted by path. `NO_RESULT` without either.
    """
    if value_sha256:
        return value_sha256
    if value:
        return hashlib.sha256(value).hexdigest()
    text = "".join(f"{sha256}  {path}\n" for path, sha256 in sorted(files))
    if not text:
        return NO_RESULT
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def opaque_gpu_id(uuid: str) -> str:
    """Id of a GPU in receipts: equal in all of them, and of no use to find the hardware id."""
    return "gpu-" + hashlib.sha256(b"gpool receipt gpu\0" + uuid.encode()).hexdigest()[:32]


class ReceiptGpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    gpu: OpaqueId
    model: Label
    slice: Label
    """Share of the GPU: `exclusive`, a MIG profile, `mps`, `timeslice`."""


class ReceiptWork(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Part that the node signs."""

    pool: OpaqueId
    task: OpaqueId
    attempt: Annotated[int, Meta(ge=0, le=canonical_json.LARGEST_INTEGER)]
    """Epoch of the lease."""
    node: OpaqueId
    gpus: Annotated[tuple[ReceiptGpu, ...], Meta(max_length=MAX_GPUS)]
    """Empty for an attempt on CPU slots."""
    result_sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]

    def message(self) -> bytes:
        """Bytes that the node's key signs."""
        return b"gpool receipt work 1\0" + canonical_json.encode_fields(self)


MAX_PATH = 16
"""Steps of a path: up to 65,536 works are signed together."""
STEP_BYTES = 33
"""A step of a path: 0 or 1 (the other hash is on the left or on the right), and the other hash."""
_ON_LEFT, _ON_RIGHT = b"\0", b"\1"
NodePathHex = Annotated[str, Meta(pattern=r"^(?:0[01][0-9a-f]{64}){0,16}\Z")]


class WorkProof(NamedTuple):
    """`signature`: of the work itself if `path` is empty, else of the root of a Merkle tree to which the path leads."""

    signature: bytes
    path: bytes


def sign_works(messages: Sequence[bytes], sign: Callable[[bytes], bytes]) -> list[WorkProof]:
    """Sign works (`ReceiptWork.message`) with one signature; `sign`: Ed25519 signature by the node's key.

    A signature costs as much as ten hashes, and an agent may end thousands of short leases in a second. Leaves and inner
    hashes have different prefixes (RFC 6962); the last hash of an odd level moves up.

        root = h(h(a, b), c)        path of b: (left, a), (right, c)        path of c: (left, h(a, b))
    """
    if len(messages) <= 1:
        return [WorkProof(sign(message), b"") for message in messages]
    level = [_leaf(message) for message in messages]
    places = list(range(len(level)))  # of each message's branch in the present level
    paths = [bytearray() for _ in messages]
    while len(level) > 1:
        for number, place in enumerate(places):
            beside = place ^ 1
            if beside < len(level):
                paths[number] += (_ON_LEFT if place & 1 else _ON_RIGHT) + level[beside]
            places[number] = place >> 1
        odd = level[-1:] if len(level) & 1 else []
        pairs = zip(level[::2], level[1::2], strict=False)
        level = [_inner(left, right) for left, right in pairs] + odd
    signature = sign(_root_message(level[0]))
    return [WorkProof(signature, bytes(path)) for path in paths]


def _leaf(message: bytes) -> bytes:
    return hashlib.sha256(b"\0" + message).digest()


def _inner(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\1" + left + right).digest()


def _root_message(root: bytes) -> bytes:
    return b"gpool receipt works 1\0" + root


def _signed_message(message: bytes, path: bytes) -> bytes:
    """Bytes that were signed for a work: its message, or that of the root at the end of its path."""
    if not path:
        return message
    found = _leaf(message)
    for at in range(0, len(path), STEP_BYTES):
        other = path[at + 1 : at + STEP_BYTES]
        is_left = path[at : at + 1] == _ON_LEFT
        found = _inner(other, found) if is_left else _inner(found, other)
    return _root_message(found)


class SignedWork(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    work: ReceiptWork
    node_key: PublicKeyHex
    node_signature: SignatureHex
    node_path: NodePathHex = ""

    @staticmethod
    def by(public: bytes, sign: Callable[[bytes], bytes], work: ReceiptWork) -> SignedWork:
        """Sign with a node's Ed25519 key."""
        return SignedWork(work, public.hex(), sign(work.message()).hex())

    def is_genuine(self) -> bool:
        message = _signed_message(self.work.message(), bytes.fromhex(self.node_path))
        return is_signed(self.node_key, self.node_signature, message)
