"""Receipts: which documents verify, years later, and which never do."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.wallet import canonical_json
from gpool.wallet.crypto import MerkleTree, verify
from gpool.wallet.errors import BadReceipt
from gpool.wallet.receipt_keys import (
    KeyHistory,
    SignedWork,
    is_signed,
    parse_history,
    sign_works,
)
from gpool.wallet.receipts import issue, parse, receipts_root, verified
from tests.wallet.sample_receipts import (
    POOL,
    START_MS,
    SamplePool,
    charge,
    node_key,
    receipt_key,
    signed_work,
    work,
)


def test_an_unaltered_receipt_verifies_after_two_rotations() -> None:
    pool = SamplePool()
    receipt = pool.receipt()
    data = receipt.to_bytes()
    pool.rotate("second", START_MS + 10_000_000)
    pool.rotate("third", START_MS + 20_000_000)
    kept = parse_history(pool.history.to_bytes())  # nothing else is left of the pool
    assert verified(data, kept) == receipt
    newer = pool.receipt(issued_ms=START_MS + 20_000_000).to_bytes()
    assert verified(newer, kept).charge.issued_ms == START_MS + 20_000_000


def test_a_receipt_altered_in_any_byte_fails() -> None:
    """Every bit of every byte is flipped, every byte is removed and doubled; the control is unaltered."""
    pool = SamplePool()
    data = pool.receipt().to_bytes()
    assert verified(data, pool.history).work.pool == POOL
    accepted = []
    for at in range(len(data)):
        altered = [data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :] for bit in range(8)]
        altered += [data[:at] + data[at + 1 :], data[:at] + data[at : at + 1] + data[at:]]
        accepted += [at for other in altered if other != data and is_accepted(other, pool.history)]
    assert accepted == []


def is_accepted(data: bytes, history: KeyHistory) -> bool:
    try:
        verified(data, history)
    except BadReceipt:
        return False
    return True


@given(st.data())
def test_random_edits_never_verify(data: st.DataObject) -> None:
    pool = SamplePool()
    original = pool.receipt().to_bytes()
    at = data.draw(st.integers(0, len(original)))
    until = data.draw(st.integers(at, min(at + 40, len(original))))
    edited = original[:at] + data.draw(st.binary(max_size=40)) + original[until:]
    assert edited == original or not is_accepted(edited, pool.history)


def test_the_pool_cannot_change_what_the_node_signed() -> None:
    """A pool that signs other work with the node's old signature makes no receipt."""
    pool = SamplePool()
    honest = pool.receipt()
    forged = msgspec.structs.replace(honest, work=work(result_sha256="1" * 64))
    resigned = msgspec.structs.replace(forged, pool_signature=pool.key.sign(forged.message()))
    with pytest.raises(BadReceipt, match="node's signature"):
        verified(resigned.to_bytes(), pool.history)
    control = msgspec.structs.replace(honest, pool_signature=pool.key.sign(honest.message()))
    assert is_accepted(control.to_bytes(), pool.history)


def test_a_node_cannot_put_its_own_key_into_a_receipt() -> None:
    pool = SamplePool()
    other = signed_work(name="another node")
    swapped = msgspec.structs.replace(
        pool.receipt(), node_key=other.node_key, node_signature=other.node_signature
    )
    with pytest.raises(BadReceipt, match="pool's signature"):
        verified(swapped.to_bytes(), pool.history)


def test_a_retired_key_signs_no_receipt_of_today() -> None:
    pool = SamplePool()
    stolen = pool.key
    pool.rotate("second", START_MS + 10_000_000)
    forged = issue(signed_work(), charge(issued_ms=START_MS + 10_000_000), stolen)
    with pytest.raises(BadReceipt, match="not valid when"):
        verified(forged.to_bytes(), pool.history)
    in_time = issue(signed_work(), charge(issued_ms=START_MS + 9_999_999), stolen)
    assert is_accepted(in_time.to_bytes(), pool.history)


def test_a_key_outside_the_history_signs_nothing() -> None:
    pool = SamplePool()
    forged = issue(signed_work(), charge(), receipt_key("forger"))
    with pytest.raises(BadReceipt, match="not in the history"):
        verified(forged.to_bytes(), pool.history)


def test_keys_of_another_pool_verify_nothing() -> None:
    pool = SamplePool()
    elsewhere = KeyHistory.starting("p-2", pool.key, START_MS)
    with pytest.raises(BadReceipt, match="the keys are of p-2"):
        verified(pool.receipt().to_bytes(), elsewhere)


def test_no_receipt_is_issued_without_the_nodes_signature() -> None:
    signed = signed_work()
    other = SignedWork(work(attempt=4), signed.node_key, signed.node_signature)
    with pytest.raises(BadReceipt, match="did not sign"):
        issue(other, charge(), receipt_key("first"))


@pytest.mark.parametrize(
    "contradiction",
    [
        {"fee": 2_500_001},
        {"charged_ms": 3_600_001},
        {"ended_ms": START_MS},
        {"issued_ms": START_MS + 1000},
        {"amount": -1},
        {"payer": "Ada Lovelace"},
    ],
)
def test_a_contradictory_receipt_is_refused_even_if_it_is_signed(
    contradiction: dict[str, object],
) -> None:
    pool = SamplePool()
    fields = msgspec.to_builtins(pool.receipt())
    fields["charge"] |= contradiction
    del fields["pool_signature"]
    message = b"gpool receipt 1\0" + canonical_json.encode(fields)
    fields["pool_signature"] = pool.key.sign(message)
    assert is_signed(pool.key.public, fields["pool_signature"], message)
    with pytest.raises(BadReceipt, match="not a receipt"):
        parse(canonical_json.encode(fields))


def test_a_history_altered_in_any_byte_is_refused_or_verifies_nothing() -> None:
    pool = SamplePool()
    data = pool.receipt().to_bytes()
    pool.rotate("second", START_MS + 10_000_000)
    history = pool.history.to_bytes()
    assert is_accepted(data, parse_history(history))
    for at in range(len(history)):
        for bit in range(8):
            altered = history[:at] + bytes([history[at] ^ 1 << bit]) + history[at + 1 :]
            with pytest.raises(BadReceipt):
                parse_history(altered)


def test_only_the_current_key_appoints_its_successor() -> None:
    pool = SamplePool()
    first = pool.key
    pool.rotate("second", START_MS + 1)
    with pytest.raises(BadReceipt, match="not the current"):
        pool.history.rotated(first, receipt_key("third"), START_MS + 2)
    with pytest.raises(BadReceipt, match="not newer"):
        pool.history.rotated(pool.key, receipt_key("third"), START_MS + 1)
    with pytest.raises(BadReceipt, match="twice"):
        pool.history.rotated(pool.key, first, START_MS + 2)


def test_a_history_continues_its_older_copies_only() -> None:
    pool = SamplePool()
    older = pool.history
    pool.rotate("second", START_MS + 1)
    other = SamplePool()
    other.rotate("branch", START_MS + 1)
    assert pool.history.extends(older)
    assert not older.extends(pool.history)
    assert not pool.history.extends(other.history)


def test_the_root_of_receipts_proves_each_receipt() -> None:
    pool = SamplePool()
    receipts = [pool.receipt(amount=25_000 + number).to_bytes() for number in range(5)]
    root = receipts_root(receipts)
    tree = MerkleTree.of(receipts)
    assert root == receipts_root(reversed(receipts)) == tree.root
    assert all(verify(root, each, tree.proof(each)) for each in receipts)
    assert receipts_root([]) == bytes(32)


# ---- works signed together


def joint(count: int) -> list[SignedWork]:
    key = node_key("node")
    public = key.public_key().public_bytes_raw().hex()
    works = [work(attempt=number) for number in range(count)]
    proofs = sign_works([each.message() for each in works], key.sign)
    return [
        SignedWork(each, public, proof.signature.hex(), proof.path.hex())
        for each, proof in zip(works, proofs, strict=True)
    ]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 9, 33, 500])
def test_one_signature_proves_each_work_and_no_other(count: int) -> None:
    signed = joint(count)
    assert len({each.node_signature for each in signed}) == 1
    assert all(each.is_genuine() for each in signed)
    others = [msgspec.structs.replace(each, work=work(attempt=count)) for each in signed]
    others += [
        msgspec.structs.replace(each, node_path=beside.node_path)
        for each, beside in pairwise(signed)
    ]
    others += [msgspec.structs.replace(each, node_path="") for each in signed if count > 1]
    assert not any(each.is_genuine() for each in others)


def test_an_inner_hash_is_no_work() -> None:
    """A shorter path that begins at an inner hash proves nothing: leaves are hashed with another prefix."""
    first = joint(4)[0]
    upper = first.node_path[66:]
    assert not msgspec.structs.replace(first, node_path=upper).is_genuine()


def test_a_receipt_of_a_joint_signature_altered_in_any_byte_fails() -> None:
    pool = SamplePool()
    receipt = issue(joint(5)[2], charge(), pool.key)
    data = receipt.to_bytes()
    assert b'"node_path":"' in data
    assert verified(data, pool.history) == receipt
    accepted = []
    for at in range(len(data)):
        altered = [data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :] for bit in range(8)]
        altered += [data[:at] + data[at + 1 :], data[:at] + data[at : at + 1] + data[at:]]
        accepted += [at for other in altered if other != data and is_accepted(other, pool.history)]
    assert accepted == []


def test_a_receipt_without_a_path_is_written_as_before() -> None:
    assert b"node_path" not in SamplePool().receipt().to_bytes()
