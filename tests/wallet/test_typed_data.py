"""Receipts as EIP-712 typed data, beside eth-account's own encoding."""

from __future__ import annotations

import json

import msgspec
import pytest
from eth_account import Account
from eth_account.messages import encode_typed_data

from gpool.wallet.receipt_work import ReceiptGpu
from gpool.wallet.receipts import Receipt
from gpool.wallet.signing import Signature, WalletKey, parse
from gpool.wallet.typed_data import is_signed_by, typed_data, typed_hash
from tests.wallet.sample_receipts import SamplePool, charge, signed_work, work

KEY = WalletKey(bytes(31) + b"\x07")
GPUS = [(), work().gpus, tuple(ReceiptGpu(f"g-{n}", "RTX 4090", "mig 1g.18gb") for n in range(3))]


@pytest.mark.parametrize("gpus", GPUS, ids=len)
def test_the_hash_is_that_of_eth_account(gpus: tuple[ReceiptGpu, ...]) -> None:
    receipt = SamplePool().receipt(signed_work(work(gpus=gpus)))
    document = json.loads(json.dumps(typed_data(receipt)))
    made = Account.from_key(KEY.secret).sign_typed_data(full_message=document)
    assert made.message_hash == typed_hash(receipt)
    signable = encode_typed_data(full_message=document)
    assert Account.recover_message(signable, signature=made.signature) == str(KEY.address)
    assert is_signed_by(receipt, Signature.from_bytes(made.signature), KEY.address)


def sign(receipt: Receipt) -> Signature:
    made = Account.from_key(KEY.secret).sign_typed_data(full_message=typed_data(receipt))
    return Signature.from_bytes(made.signature)


def test_a_wallets_signature_fits_its_receipt_and_its_wallet_only() -> None:
    pool = SamplePool()
    receipt = pool.receipt()
    signature = sign(receipt)
    assert is_signed_by(receipt, signature, KEY.address)
    assert not is_signed_by(receipt, signature, WalletKey(bytes(31) + b"\x08").address)
    for changed in (pool.receipt(amount=2_500_001), pool.receipt(signed_work(work(attempt=4)))):
        assert not is_signed_by(changed, signature, KEY.address)
    no_point = Signature(r=5, s=1, parity=0)
    assert not is_signed_by(receipt, no_point, parse(KEY.address))


def test_every_field_of_the_receipt_but_the_signatures_is_hashed() -> None:
    receipt = SamplePool().receipt()
    hashes = {typed_hash(receipt)}
    changes: list[dict[str, object]] = [
        {"work": work(**{name: value})}
        for name, value in {
            "pool": "p-2",
            "task": "t-2",
            "attempt": 9,
            "node": "n-2",
            "gpus": (),
            "result_sha256": "2" * 64,
        }.items()
    ]
    numbers = ("started_ms", "price_per_hour", "amount", "fee", "issued_ms")
    texts = ("payer", "owner", "transfer", "end_reason")
    now = msgspec.to_builtins(receipt.charge)
    charges = {name: now[name] + 1 for name in numbers} | dict.fromkeys(texts, "other")
    charges |= {"charged_ms": 1, "ended_ms": now["ended_ms"] + 1}
    charges["started_ms"] = now["started_ms"] - 1
    assert charges.keys() == now.keys()
    changes += [{"charge": charge(**{name: value})} for name, value in charges.items()]
    changes += [{"node_key": "3" * 64}, {"pool_key": "rk-2"}]
    for change in changes:
        hashes.add(typed_hash(msgspec.structs.replace(receipt, **change)))
    assert len(hashes) == 1 + len(changes)
