"""The distributor on a real EVM: who is paid what, by which calls, and for how much gas.

Gas with OpenZeppelin's ERC-20 and a tree of 100,000 leaves; the account of a first claim held no token before.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest

from gpool.wallet import crypto, payouts, signing, transactions
from gpool.wallet.payouts import DistributorAddress, PayoutClaim, PayoutFile, Period
from tests.tools.chain import Deployed, LocalChain

DELAY_S = 86_400
FIRST_CLAIM_GAS, LATER_CLAIM_GAS = 95_000, 60_000
FORGED = 10_000
CLAIM = transactions.CLAIM


@dataclass
class Pool:
    """A distributor with its token; `publish` opens a period of one more amount."""

    chain: LocalChain
    token: Deployed
    distributor: Deployed
    file: PayoutFile | None = None

    @classmethod
    def on(cls, chain: LocalChain) -> Pool:
        token = chain.deploy("TestToken")
        kinds = ("address", "address", "address", "uint64")
        roles = (token.address, chain.accounts[1], chain.accounts[2], DELAY_S)
        return cls(chain, token, chain.deploy("Distributor", kinds, roles))

    @property
    def publisher(self) -> str:
        return self.chain.accounts[1]

    @property
    def guardian(self) -> str:
        return self.chain.accounts[2]

    @property
    def stranger(self) -> str:
        return self.chain.accounts[3]

    @property
    def at(self) -> DistributorAddress:
        address = signing.from_bytes(bytes.fromhex(self.distributor.address[2:]))
        return DistributorAddress(self.chain.number("eth_chainId"), address)

    def close(self, amounts: dict[str, int], receipts_root: bytes = bytes(32)) -> PayoutFile:
        number = 1 if self.file is None else self.file.period + 1
        period = Period("p-1", number, receipts_root, self.at)
        return payouts.close(period, amounts, self.file)

    def publish(self, file: PayoutFile) -> dict[str, Any]:
        data = "0x" + transactions.publish_data(file).hex()
        call = {"from": self.publisher, "to": self.distributor.address, "data": data}
        return self.chain.send(call)

    def open(self, amounts: dict[str, int]) -> PayoutFile:
        """Close a period, publish it, fund it, wait and activate it."""
        self.file = file = self.close(amounts)
        assert self.publish(file)["status"] == "0x1"
        self.token.send(
            self.stranger, "mint(address,uint256)", self.distributor.address, int(file.total_due)
        )
        self.chain.pass_time(DELAY_S)
        assert self.distributor.send(self.stranger, "activate()")["status"] == "0x1"
        return file

    def claim(self, claim: PayoutClaim) -> dict[str, Any]:
        data = "0x" + transactions.claim_data(claim).hex()
        call = {"from": self.stranger, "to": self.distributor.address, "data": data}
        return self.chain.send(call)

    def balance(self, account: str) -> int:
        return self.token.number("balanceOf(address)", account)


@pytest.fixture
def pool(chain: LocalChain) -> Pool:
    return Pool.on(chain)


def account(number: int) -> str:
    return signing.from_bytes(crypto.keccak256(number.to_bytes(8, "big"))[:20])


def test_honest_claims_pay_and_second_claims_pay_nothing(pool: Pool) -> None:
    amounts = {account(n): 1000 * (n + 1) for n in range(50)}
    file = pool.open(amounts)
    for claim in payouts.claims_of(file, amounts):
        assert pool.claim(claim)["status"] == "0x1"
        assert pool.balance(claim.account) == claim.cumulative
    assert pool.balance(pool.distributor.address) == 0
    pool.token.send(pool.stranger, "mint(address,uint256)", pool.distributor.address, 10**9)
    for claim in payouts.claims_of(file, amounts):
        assert pool.claim(claim)["status"] == "0x1"
        assert pool.balance(claim.account) == claim.cumulative
    assert pool.balance(pool.distributor.address) == 10**9


def test_the_next_period_pays_the_difference_or_all_to_who_waited(pool: Pool) -> None:
    first = pool.open({account(1): 500, account(2): 70})
    pool.claim(payouts.claim_of(first, account(1)))
    second = pool.open({account(1): 800, account(2): 90})
    for claim in payouts.claims_of(second, (account(1), account(2))):
        pool.claim(claim)
    assert (pool.balance(account(1)), pool.balance(account(2))) == (800, 90)
    stale = payouts.claim_of(first, account(1))
    assert pool.claim(stale)["status"] == "0x0"


def test_gas_of_a_claim_in_a_tree_of_100000_leaves(pool: Pool) -> None:
    amounts = {account(n): 5_000_000 + n for n in range(100_000)}
    file = pool.open(amounts)
    sample = [account(n) for n in range(0, 100_000, 20_000)]
    first = [int(pool.claim(each)["gasUsed"], 16) for each in payouts.claims_of(file, sample)]
    file = pool.open(amounts | dict.fromkeys(sample, 9000000))
    later = [int(pool.claim(each)["gasUsed"], 16) for each in payouts.claims_of(file, sample)]
    assert max(first) <= FIRST_CLAIM_GAS
    assert max(later) <= LATER_CLAIM_GAS


def test_10000_forged_claims_pay_nothing(pool: Pool) -> None:
    """The control: the honest claim, sent last in the same way, pays."""
    dice = random.Random(20261118)
    amounts = {account(n): dice.randrange(1, 10**9) for n in range(64)}
    file = pool.open(amounts)
    pool.token.send(pool.stranger, "mint(address,uint256)", pool.distributor.address, 10**18)
    held = pool.balance(pool.distributor.address)
    honest = list(payouts.claims_of(file, amounts))
    elsewhere = pool.close(dict.fromkeys(amounts, 10**12))  # never published
    published_elsewhere = list(payouts.claims_of(elsewhere, amounts))
    forged = [forgery(dice, honest, published_elsewhere) for _ in range(FORGED)]
    by = {"from": pool.stranger, "gas": hex(200_000)}
    receipts = pool.chain.send_all([by | pool.distributor.call(CLAIM, *each) for each in forged])
    assert len(receipts) == FORGED
    assert {each["status"] for each in receipts} == {"0x0"}
    assert pool.balance(pool.distributor.address) == held
    assert pool.claim(honest[0])["status"] == "0x1"
    assert pool.balance(pool.distributor.address) == held - honest[0].cumulative


def forgery(
    dice: random.Random, honest: list[PayoutClaim], other: list[PayoutClaim]
) -> tuple[str, int, list[bytes]]:
    """A claim that the active tree does not hold, made from ones that it holds."""
    claim, victim = dice.sample(honest, 2)
    account_, amount, proof = claim.account, claim.cumulative, list(claim.proof)
    at = dice.randrange(len(proof))
    match dice.randrange(7):
        case 0:  # a larger amount
            return account_, amount + dice.randrange(1, 10**9), proof
        case 1:  # another account's proof
            return victim.account, amount, proof
        case 2:  # an account of the forger
            return account(dice.randrange(10**6, 10**9)), amount, proof
        case 3:  # a proof with one bit changed
            changed = int.from_bytes(proof[at], "big") ^ 1 << dice.randrange(256)
            return account_, amount, [*proof[:at], changed.to_bytes(32, "big"), *proof[at + 1 :]]
        case 4:  # a proof that ends early, or goes on
            return account_, amount, proof[:at] if dice.random() < 0.5 else [*proof, bytes(32)]
        case 5:  # a genuine claim of a tree that was never published
            claim = dice.choice(other)
            return claim.account, claim.cumulative, list(claim.proof)
        case _:  # no proof, random amounts
            return account_, dice.randrange(1 << 256), []


def test_a_claim_is_valid_at_its_contract_only(pool: Pool) -> None:
    file = pool.open({account(1): 5, account(2): 6})
    twin = Pool.on(pool.chain)
    twin.token.send(twin.stranger, "mint(address,uint256)", twin.distributor.address, 100)
    twin.publish(file)  # the same root, published at another contract
    twin.chain.pass_time(DELAY_S)
    twin.distributor.send(twin.stranger, "activate()")
    claim = payouts.claim_of(file, account(1))
    assert twin.claim(claim)["status"] == "0x0"
    assert pool.claim(claim)["status"] == "0x1"


def test_a_root_waits_for_its_delay_and_the_guardian_stops_it(pool: Pool) -> None:
    file = pool.close({account(1): 5}, receipts_root=b"\x07" * 32)
    assert pool.publish(file)["status"] == "0x1"
    early = pool.distributor.refusal(pool.stranger, "activate()")
    assert early == transactions.selector("TooEarly(uint64)").hex()
    assert pool.claim(payouts.claim_of(file, account(1)))["status"] == "0x0"
    assert pool.distributor.send(pool.guardian, "stop()")["status"] == "0x1"
    pool.chain.pass_time(DELAY_S)
    gone = pool.distributor.refusal(pool.stranger, "activate()")
    assert gone == transactions.selector("NothingPending()").hex()
    # The control: not stopped, the same root is activated, with its receipts anchored.
    assert pool.publish(file)["status"] == "0x1"
    pool.chain.pass_time(DELAY_S)
    assert pool.distributor.send(pool.stranger, "activate()")["status"] == "0x1"
    assert pool.distributor.read(["bytes32"], "root()") == (bytes.fromhex(str(file.root)[2:]),)
    assert pool.distributor.read(["bytes32"], "receiptsRoots(uint64)", 1) == (b"\x07" * 32,)


def test_only_the_publisher_publishes_and_strangers_stop_nothing(pool: Pool) -> None:
    root = b"\x01" * 32
    publish = ("publish(uint64,bytes32,bytes32)", 1, root, root)
    refused = transactions.selector("NotAllowed(address)").hex()
    for by in (pool.guardian, pool.stranger, pool.chain.accounts[0]):
        assert pool.distributor.refusal(by, *publish) == refused
    assert pool.distributor.send(pool.publisher, *publish)["status"] == "0x1"
    assert pool.distributor.refusal(pool.stranger, "stop()") == refused
    assert pool.distributor.refusal(pool.publisher, "stop()") is None


def test_a_waiting_root_is_not_replaced_and_periods_only_grow(pool: Pool) -> None:
    def refusal(period: int, root: bytes) -> str | None:
        return pool.distributor.refusal(pool.publisher, transactions.PUBLISH, period, root, root)

    assert refusal(1, bytes(32)) == transactions.selector("EmptyRoot()").hex()
    pool.publish(pool.close({account(1): 5}))
    assert refusal(2, b"\x02" * 32) == transactions.selector("AlreadyPending(uint64)").hex()
    pool.distributor.send(pool.publisher, "stop()")
    pool.open({account(1): 5})
    older = transactions.selector("PeriodNotNewer(uint64,uint64)").hex()
    assert refusal(1, b"\x02" * 32) == older
    assert refusal(2, b"\x02" * 32) is None


def test_without_funds_a_claim_fails_and_is_paid_later(pool: Pool) -> None:
    file = pool.open({account(1): 5})
    twice = pool.close({account(1): 50})
    assert pool.publish(twice)["status"] == "0x1"  # not funded
    pool.chain.pass_time(DELAY_S)
    pool.distributor.send(pool.stranger, "activate()")
    claim = payouts.claim_of(twice, account(1))
    assert pool.claim(claim)["status"] == "0x0"
    assert pool.distributor.number("claimed(address)", account(1)) == 0
    pool.token.send(pool.stranger, "mint(address,uint256)", pool.distributor.address, 45)
    assert pool.claim(claim)["status"] == "0x1"
    assert pool.balance(account(1)) == 50
    assert file.root != twice.root


@pytest.mark.parametrize("broken", ["token", "publisher", "guardian", "same", "delay"])
def test_a_distributor_without_its_protection_is_not_deployed(
    chain: LocalChain, broken: str
) -> None:
    token, nobody = chain.deploy("TestToken").address, "0x" + "0" * 40
    roles: dict[str, Any] = {"token": token, "publisher": chain.accounts[1]}
    roles |= {"guardian": chain.accounts[2], "delay": DELAY_S}
    changes: dict[str, Any] = {"same": {"guardian": roles["publisher"]}, "delay": {"delay": 0}}
    changed = roles | changes.get(broken, {broken: nobody})
    kinds = ("address", "address", "address", "uint64")
    with pytest.raises(AssertionError):
        chain.deploy("Distributor", kinds, list(changed.values()))
    chain.deploy("Distributor", kinds, list(roles.values()))
