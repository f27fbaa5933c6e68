"""Receipts: one signed document per charged attempt, valid offline for as long as the key history is kept. No I/O.

The node signs the work (what ran, where, the hash of the result) with its own key, which the receipt contains: the
receipt stays valid after the node has left. The pool signs everything else with its receipt key, node's signature
included, so neither side can exchange the other's part.

    work  --- node key ----> node_signature --.
    charge (payer, owner, times, price) ------+--- receipt key ----> pool_signature
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from gpool.wallet import canonical_json
from gpool.wallet.crypto import HASH_LENGTH, MerkleTree
from gpool.wallet.errors import BadDocument, BadReceipt
from gpool.wallet.receipt_keys import (
    VERSION,
    KeyHistory,
    Milliseconds,
    NodePathHex,
    OpaqueId,
    PublicKeyHex,
    ReceiptKey,
    ReceiptWork,
    SignatureHex,
    SignedWork,
    is_signed,
    key_id,
)

MAX_BYTES = 64 * 1024
Microcredits = Annotated[int, Meta(ge=0, le=canonical_json.LARGEST_INTEGER)]


class ReceiptCharge(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Part that the pool adds: measured by the server's clock, posted in the ledger."""

    payer: OpaqueId
    owner: OpaqueId
    transfer: OpaqueId
    """Entry of the ledger."""
    end_reason: OpaqueId
    started_ms: Milliseconds
    ended_ms: Milliseconds
    charged_ms: Milliseconds
    price_per_hour: Microcredits
    amount: Microcredits
    fee: Microcredits
    """Share of the amount that the pool keeps."""
    issued_ms: Milliseconds

    def __post_init__(self) -> None:
        """`ValueError` if the figures contradict each other."""
        if not self.started_ms <= self.ended_ms <= self.issued_ms:
            raise ValueError("started_ms, ended_ms and issued_ms are not in this order")
        if self.charged_ms > self.ended_ms - self.started_ms:
            raise ValueError("charged_ms is longer than the attempt")
        if self.fee > self.amount:
            raise ValueError("the fee is larger than the amount")
        largest = max(self.price_per_hour, self.amount, self.issued_ms)
        if largest > canonical_json.LARGEST_INTEGER:
            raise ValueError(f"{largest} is not an integer up to 2^53 - 1")


class Receipt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    work: ReceiptWork
    node_key: PublicKeyHex
    node_signature: SignatureHex
    charge: ReceiptCharge
    pool_key: OpaqueId
    pool_signature: SignatureHex
    version: Annotated[int, Meta(ge=VERSION, le=VERSION)] = VERSION
    node_path: NodePathHex = ""
    """Leads from the work to what the node signed, if it signed several works together; not written if empty."""

    def to_bytes(self) -> bytes:
        return canonical_json.encode_fields(self._fields())

    def message(self) -> bytes:
        """Bytes that the receipt key signs: the document without that signature."""
        fields = self._fields()
        del fields["pool_signature"]
        return b"gpool receipt 1\0" + canonical_json.encode_fields(fields)

    def _fields(self) -> dict[str, object]:
        fields: dict[str, object] = msgspec.to_builtins(self)
        if not self.node_path:
            del fields["node_path"]
        return fields


def issue(signed: SignedWork, charge: ReceiptCharge, key: ReceiptKey) -> Receipt:
    """Make a receipt; `BadReceipt` if the node's signature is not genuine."""
    if not signed.is_genuine():
        raise BadReceipt(f"{signed.work.node} did not sign the work of {signed.work.task}")
    unsigned = Receipt(
        signed.work,
        signed.node_key,
        signed.node_signature,
        charge,
        key.id,
        "0" * 128,
        node_path=signed.node_path,
    )
    return msgspec.structs.replace(unsigned, pool_signature=key.sign(unsigned.message()))


def parse(data: bytes) -> Receipt:
    """Read a receipt without checking its signatures; `BadReceipt` for any but the canonical spelling."""
    if len(data) > MAX_BYTES:
        raise BadReceipt(f"a receipt has at most {MAX_BYTES} bytes, not {len(data)}")
    try:
        return msgspec.convert(canonical_json.decode(data), Receipt)
    except (BadDocument, msgspec.ValidationError) as exc:
        raise BadReceipt(f"not a receipt: {exc}") from exc


def verified(data: bytes, history: KeyHistory) -> Receipt:
    """Return the receipt if both signatures hold and its key was valid when it was issued, else raise `BadReceipt`."""
    receipt = parse(data)
    if receipt.work.pool != history.pool:
        raise BadReceipt(f"the receipt is of {receipt.work.pool}, the keys are of {history.pool}")
    signed = SignedWork(receipt.work, receipt.node_key, receipt.node_signature, receipt.node_path)
    if not signed.is_genuine():
        raise BadReceipt("the node's signature does not fit: the receipt was altered")
    entry = history.entry(receipt.pool_key)
    if entry is None:
        raise BadReceipt(
            f"{receipt.pool_key} is not in the history of receipt keys: get a newer history, or the receipt is forged"
        )
    if not is_signed(entry.public, receipt.pool_signature, receipt.message()):
        raise BadReceipt("the pool's signature does not fit: the receipt was altered")
    if history.key_at(receipt.charge.issued_ms) != entry:
        raise BadReceipt(
            f"{key_id(entry.public)} was not valid when the receipt was issued ({receipt.charge.issued_ms} ms)"
        )
    return receipt


def receipts_root(receipts: Iterable[bytes]) -> bytes:
    """Merkle root over canonical receipts, in any order; 32 zero bytes for none."""
    leaves = sorted(set(receipts))
    return MerkleTree.of(leaves).root if leaves else bytes(HASH_LENGTH)
