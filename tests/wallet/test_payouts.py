"""Payout files and their trees: amounts never fall, sums are recomputed, proofs belong to one contract."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from eth_abi.abi import encode as abi_encode
from eth_account import Account
from hypothesis import given
from hypothesis import strategies as st

from gpool.wallet import canonical_json, crypto, payouts, signing, transactions
from gpool.wallet.errors import BadPayout
from gpool.wallet.payouts import DistributorAddress, PayoutClaim, PayoutFile, Period
from gpool.wallet.signing import WalletKey

AT = DistributorAddress(31337, signing.from_bytes(bytes(19) + b"\x05"))
POOL = "p-1"


def account(number: int) -> str:
    return signing.from_bytes(crypto.keccak256(number.to_bytes(8, "big"))[:20])


def period(number: int = 1, at: DistributorAddress | None = AT) -> Period:
    return Period(POOL, number, bytes(32), at)


def amounts(*given_: int) -> dict[str, int]:
    return {account(number): amount for number, amount in enumerate(given_)}


@given(st.lists(st.integers(0, payouts.MAX_AMOUNT), min_size=1, max_size=30))
def test_every_account_can_prove_its_amount(given_: list[int]) -> None:
    file = payouts.parse(payouts.close(period(), amounts(*given_)).to_bytes())
    assert file.root is not None
    root = bytes.fromhex(file.root[2:])
    for claim in payouts.claims_of(file, amounts(*given_)):
        value = payouts.leaf_value(AT, claim.account, claim.cumulative)
        assert crypto.verify(root, value, claim.proof)
        for other in (
            payouts.leaf_value(AT, claim.account, claim.cumulative + 1),
            payouts.leaf_value(DistributorAddress(1, AT.contract), claim.account, claim.cumulative),
            payouts.leaf_value(
                DistributorAddress(AT.chain_id, account(99)), claim.account, claim.cumulative
            ),
        ):
            assert not crypto.verify(root, other, claim.proof)


def test_a_leaf_is_the_abi_encoding_of_eth_abi() -> None:
    value = payouts.leaf_value(AT, signing.parse(account(3)), 12345)
    kinds = ["uint256", "address", "address", "uint256"]
    assert value == abi_encode(kinds, [AT.chain_id, AT.contract, account(3), 12345])


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 1000)), min_size=1, max_size=60))
def test_over_all_periods_an_account_is_due_exactly_its_cumulative_amount(
    earned: list[tuple[int, int]],
) -> None:
    totals: dict[str, int] = {}
    due: dict[str, int] = {}
    previous: PayoutFile | None = None
    for number, (who, amount) in enumerate(earned, 1):
        totals[account(who)] = totals.get(account(who), 0) + amount
        previous, before = payouts.close(period(number), totals, previous), previous
        if before is not None:
            payouts.check_successor(previous, before)
        for line in previous.lines:
            due[line.account] = due.get(line.account, 0) + int(line.due)
    assert due == totals


def test_an_amount_never_falls_and_no_account_is_dropped() -> None:
    first = payouts.close(period(1), amounts(500, 70))
    with pytest.raises(BadPayout, match="never fall"):
        payouts.close(period(2), amounts(499), first)
    second = payouts.close(period(2), amounts(800), first)
    assert second.cumulative() == amounts(800, 70)
    assert second.total_due == "300"


@pytest.mark.parametrize("number", [0, 1])
def test_a_period_follows_an_earlier_one_of_the_same_contract(number: int) -> None:
    first = payouts.close(period(1), amounts(5))
    with pytest.raises(BadPayout, match="does not follow"):
        payouts.close(period(number), amounts(5), first)
    with pytest.raises(BadPayout, match="another contract"):
        payouts.close(period(2, DistributorAddress(1, AT.contract)), amounts(5), first)


def test_a_successor_with_another_history_is_refused() -> None:
    first, other = payouts.close(period(1), amounts(5, 6)), payouts.close(period(1), amounts(4, 6))
    second = payouts.close(period(2), amounts(9, 9), first)
    payouts.check_successor(second, first)
    with pytest.raises(BadPayout, match="does not follow from period 1"):
        payouts.check_successor(second, other)


def test_a_file_altered_in_any_byte_is_refused() -> None:
    """Only the hashes of receipts and of the period before, the pool and the period are free: nothing pays by them."""
    data = payouts.close(period(), amounts(500, 70, 3)).to_bytes()
    payouts.parse(data)
    changed = set()
    for at in range(len(data)):
        for bit in range(8):
            altered = data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
            try:
                found = payouts.parse(altered)
            except BadPayout:
                continue
            original = payouts.parse(data)
            changed |= {
                name
                for name in PayoutFile.__struct_fields__
                if getattr(found, name) != getattr(original, name)
            }
    assert changed <= {"pool", "period", "receipts_root", "previous_sha3"}


def altered(change: Callable[[dict[str, object]], object]) -> bytes:
    fields = canonical_json.decode(payouts.close(period(), amounts(500, 70)).to_bytes())
    change(fields)
    return canonical_json.encode(fields)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda file: file.update(total_due="571"), "add up to 570"),
        (lambda file: file.update(root="0x" + "1" * 64), "its lines give"),
        (lambda file: file.pop("root"), "exactly if"),
        (lambda file: file.pop("distributor"), "exactly if"),
        (lambda file: file["lines"].reverse(), "not in order"),
        (lambda file: file["lines"][0].update(cumulative="9"), "due more than"),
        (lambda file: file["lines"][0].update(account="0x" + "00" * 19 + "ab"), "checksum"),
        (lambda file: file.update(lines=[]), "not in order"),
        (lambda file: file.update(version=2), "version 1"),
        (lambda file: file.update(more="x"), "not a payout file"),
    ],
)
def test_a_file_that_does_not_add_up_is_refused(
    change: Callable[[dict[str, object]], object], reason: str
) -> None:
    with pytest.raises(BadPayout, match=reason):
        payouts.parse(altered(change))


def test_a_pool_without_a_chain_has_amounts_and_no_tree() -> None:
    file = payouts.close(period(at=None), {"u-2": 70, "u-1": 500})
    assert payouts.parse(file.to_bytes()) == file
    assert file.root is None
    assert file.to_csv() == "account,cumulative,due\nu-1,500,500\nu-2,70,70\n"
    assert payouts.amounts_from_csv(file.to_csv()) == {"u-1": 500, "u-2": 70}
    with pytest.raises(BadPayout, match="by other means"):
        payouts.claim_of(file, account(0))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "columns account,cumulative"),
        ("account,amount\nu-1,5\n", "columns account,cumulative"),
        ("account,cumulative\nu-1,-5\n", "line 2: '-5'"),
        ("account,cumulative\nu-1,0.5\n", "line 2: '0.5'"),
        ("account,cumulative\nu-1,5\nu-1,6\n", "line 3: 'u-1' occurs twice"),
        ("account,cumulative\nu-1\n", "line 2: ''"),
    ],
)
def test_a_bad_line_of_amounts_is_named(text: str, reason: str) -> None:
    with pytest.raises(BadPayout, match=reason):
        payouts.amounts_from_csv(text)


@pytest.mark.parametrize("name", ["=cmd()", "Ada Lovelace", "", "0xzz"])
def test_an_account_is_an_address_or_an_opaque_id(name: str) -> None:
    with pytest.raises(BadPayout):
        payouts.close(period(at=None), {name: 5})


def test_a_transaction_is_signed_as_by_eth_account() -> None:
    dice = random.Random(16)
    key = WalletKey(bytes(31) + b"\x07")
    for size in (0, 1, 55, 56, 700):
        made = transactions.FeeTransaction(
            chain_id=dice.choice([1, 8453, 31337]),
            nonce=dice.randrange(300),
            priority_fee=dice.randrange(10**9),
            max_fee=dice.randrange(10**12),
            gas=dice.randrange(10**6),
            to=signing.parse(AT.contract),
            data=dice.randbytes(size),
        )
        oracle = Account.sign_transaction(
            {
                "type": 2,
                "chainId": made.chain_id,
                "nonce": made.nonce,
                "maxPriorityFeePerGas": made.priority_fee,
                "maxFeePerGas": made.max_fee,
                "gas": made.gas,
                "to": made.to,
                "value": 0,
                "data": made.data,
            },
            key.secret,
        )
        assert made.signed(key) == oracle.raw_transaction


def test_call_data_are_those_of_eth_abi() -> None:
    file = payouts.close(period(7), amounts(1, 2, 3))
    claim = payouts.claim_of(file, account(1))
    assert isinstance(claim, PayoutClaim)
    kinds = ["address", "uint256", "bytes32[]"]
    encoded = abi_encode(kinds, [claim.account, claim.cumulative, list(claim.proof)])
    assert transactions.claim_data(claim) == transactions.selector(transactions.CLAIM) + encoded
    assert file.root is not None
    roots = [bytes.fromhex(text[2:]) for text in (file.root, file.receipts_root)]
    encoded = abi_encode(["uint64", "bytes32", "bytes32"], [7, *roots])
    assert transactions.publish_data(file) == transactions.selector(transactions.PUBLISH) + encoded
