"""The part of a receipt that the node signs: what ran where, and the hash of the result. No I/O.

Agents import it: it needs neither secp256k1 nor Keccak.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from gpool.wallet import canonical_json
from gpool.wallet.receipt_keys import OpaqueId, PublicKeyHex, SignatureHex, is_signed

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
        return b"gpool receipt work 1\0" + canonical_json.encode(msgspec.to_builtins(self))


class SignedWork(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    work: ReceiptWork
    node_key: PublicKeyHex
    node_signature: SignatureHex

    @staticmethod
    def by(public: bytes, sign: Callable[[bytes], bytes], work: ReceiptWork) -> SignedWork:
        """Sign with a node's Ed25519 key."""
        return SignedWork(work, public.hex(), sign(work.message()).hex())

    def is_genuine(self) -> bool:
        return is_signed(self.node_key, self.node_signature, self.work.message())
