"""Receipts as EIP-712 typed data: the fields of the JSON document, for wallets that show and sign them. No I/O.

The typed data leave out the two Ed25519 signatures and the node's path, which a wallet cannot check; the domain has neither chain nor
contract, since a receipt belongs to none. EIP-712 is encoded for the kinds of field that receipts have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gpool.wallet.crypto import keccak256
from gpool.wallet.errors import BadSignature
from gpool.wallet.receipts import Receipt
from gpool.wallet.signing import Address, Signature


@dataclass(frozen=True, slots=True)
class TypedField:
    name: str
    kind: str


def _fields(declared: str) -> tuple[TypedField, ...]:
    """Fields of a struct from its Solidity spelling: `string pool,uint64 attempt`."""
    pairs = (each.split(" ") for each in declared.split(","))
    return tuple(TypedField(name, kind) for kind, name in pairs)


DOMAIN: Mapping[str, str] = {"name": "gpool receipt", "version": "1"}
DOMAIN_TYPE = "EIP712Domain"
TYPES: Mapping[str, tuple[TypedField, ...]] = {
    DOMAIN_TYPE: _fields("string name,string version"),
    "Gpu": _fields("string gpu,string model,string slice"),
    "Work": _fields(
        "string pool,string task,uint64 attempt,string node,Gpu[] gpus,bytes32 result_sha256"
    ),
    "Charge": _fields(
        "string payer,string owner,string transfer,string end_reason,uint64 started_ms,uint64 ended_ms,"
        "uint64 charged_ms,uint64 price_per_hour,uint64 amount,uint64 fee,uint64 issued_ms"
    ),
    "Receipt": _fields("Work work,Charge charge,bytes32 node_key,string pool_key"),
}


def typed_data(receipt: Receipt) -> dict[str, Any]:
    """Argument of a wallet's `eth_signTypedData_v4`, as JSON values."""
    types = {
        name: [{"name": field.name, "type": field.kind} for field in fields]
        for name, fields in TYPES.items()
    }
    return {
        "types": types,
        "primaryType": "Receipt",
        "domain": dict(DOMAIN),
        "message": _message(receipt),
    }


def typed_hash(receipt: Receipt) -> bytes:
    """Digest that a wallet signs (32 bytes)."""
    parts = (_struct_hash(DOMAIN_TYPE, DOMAIN), _struct_hash("Receipt", _message(receipt)))
    return keccak256(b"\x19\x01" + b"".join(parts))


def is_signed_by(receipt: Receipt, signature: Signature, signer: Address) -> bool:
    try:
        return signature.recover(typed_hash(receipt)) == signer
    except BadSignature:
        return False


def _message(receipt: Receipt) -> dict[str, Any]:
    fields = msgspec.to_builtins(receipt)
    for name in ("node_path", "node_signature", "pool_signature", "version"):
        del fields[name]
    fields["node_key"] = "0x" + receipt.node_key
    fields["work"]["gpus"] = list(fields["work"]["gpus"])
    fields["work"]["result_sha256"] = "0x" + receipt.work.result_sha256
    return dict(fields)


def _struct_hash(kind: str, value: Mapping[str, Any]) -> bytes:
    words = (_word(field.kind, value[field.name]) for field in TYPES[kind])
    return keccak256(keccak256(_spelled(kind)) + b"".join(words))


def _word(kind: str, value: Any) -> bytes:
    if kind.endswith("[]"):
        members: Sequence[Any] = value
        return keccak256(b"".join(_word(kind[:-2], each) for each in members))
    if kind in TYPES:
        return _struct_hash(kind, value)
    if kind == "string":
        return keccak256(value.encode())
    if kind == "bytes32":
        return bytes.fromhex(value[2:])
    assert kind == "uint64", kind
    return int(value).to_bytes(32, "big")


def _spelled(kind: str) -> bytes:
    """`encodeType`: the struct, then the structs it refers to in alphabetical order."""
    named = {kind}
    waiting = [kind]
    while waiting:
        for field in TYPES[waiting.pop()]:
            inner = field.kind.removesuffix("[]")
            if inner in TYPES and inner not in named:
                named.add(inner)
                waiting.append(inner)
    order = [kind, *sorted(named - {kind})]
    return "".join(
        f"{name}({','.join(f'{field.kind} {field.name}' for field in TYPES[name])})"
        for name in order
    ).encode()
