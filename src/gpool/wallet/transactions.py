"""Transactions to the distributor contract: call data and EIP-1559 transactions, signed. No I/O.

Own encoding of six integers, an address and bytes (RLP), compared with eth-account in tests: that library brings 22
packages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gpool.wallet import crypto
from gpool.wallet.crypto import keccak256
from gpool.wallet.payouts import PayoutClaim, PayoutFile
from gpool.wallet.signing import Address, Signature, WalletKey

CLAIM: Final = "claim(address,uint256,bytes32[])"
PUBLISH: Final = "publish(uint64,bytes32,bytes32)"
ERRORS: Final = {
    "NotAllowed(address)": "this key is neither the publisher's nor, to stop a root, the guardian's",
    "EmptyRoot()": "the root is empty",
    "PeriodNotNewer(uint64,uint64)": "the contract has this period or a later one already",
    "AlreadyPending(uint64)": "another root is waiting; activate or stop it first",
    "NothingPending()": "no root is waiting",
    "TooEarly(uint64)": "the delay of the waiting root is not over",
    "InvalidProof()": "the contract's active root is not that of this payout file",
}
"""Errors of the contract by signature, with their meaning."""

RlpItem = bytes | list["RlpItem"]


def selector(signature: str) -> bytes:
    """First four bytes of a call or an error."""
    return keccak256(signature.encode())[:4]


def claim_data(claim: PayoutClaim) -> bytes:
    head = (
        bytes.fromhex(claim.account[2:]).rjust(32, b"\0"),
        _uint(claim.cumulative),
        _uint(3 * 32),
        _uint(len(claim.proof)),
    )
    return selector(CLAIM) + b"".join((*head, *claim.proof))


def publish_data(file: PayoutFile) -> bytes:
    assert file.root is not None
    roots = bytes.fromhex(file.root[2:]) + bytes.fromhex(file.receipts_root[2:])
    return selector(PUBLISH) + _uint(file.period) + roots


def reason_of(revert: bytes) -> str | None:
    """Meaning of the data with which the contract reverted; None if it is not an error of the distributor."""
    by_selector = {selector(signature): meaning for signature, meaning in ERRORS.items()}
    return by_selector.get(revert[:4])


@dataclass(frozen=True, slots=True)
class FeeTransaction:
    """EIP-1559 transaction without value; fees in wei per gas."""

    chain_id: int
    nonce: int
    priority_fee: int
    max_fee: int
    gas: int
    to: Address
    data: bytes

    def signed(self, key: WalletKey) -> bytes:
        """Raw transaction, as `eth_sendRawTransaction` takes it."""
        digest = keccak256(b"\x02" + rlp(self._fields()))
        made = Signature.from_bytes(crypto.sign(key.secret, digest))
        signature: list[RlpItem] = [_minimal(made.parity), _minimal(made.r), _minimal(made.s)]
        return b"\x02" + rlp([*self._fields(), *signature])

    def _fields(self) -> list[RlpItem]:
        fees = (self.chain_id, self.nonce, self.priority_fee, self.max_fee, self.gas)
        to = bytes.fromhex(self.to[2:])
        return [*(_minimal(number) for number in fees), to, b"", self.data, []]


def rlp(item: RlpItem) -> bytes:
    """Recursive length prefix of bytes and lists (Ethereum's yellow paper, appendix B)."""
    if isinstance(item, bytes):
        if len(item) == 1 and item[0] < 0x80:
            return item
        return _length(len(item), 0x80) + item
    body = b"".join(rlp(each) for each in item)
    return _length(len(body), 0xC0) + body


def _length(length: int, offset: int) -> bytes:
    if length < 56:
        return bytes([offset + length])
    digits = _minimal(length)
    return bytes([offset + 55 + len(digits)]) + digits


def _minimal(number: int) -> bytes:
    return number.to_bytes((number.bit_length() + 7) // 8, "big")


def _uint(number: int) -> bytes:
    return number.to_bytes(32, "big")
