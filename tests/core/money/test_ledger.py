"""The ledger moves each request once or not at all; sums stay zero and balances at or above their floor."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.core.errors import Invalid
from gpool.core.model import Instant
from gpool.core.money.blocks import BookedTransfer, SealedEntry, leaf_of, merkle_root, sealed
from gpool.core.money.budgets import BudgetLevel, budget_level
from gpool.core.money.ledger import (
    Charge,
    LedgerAccount,
    LedgerChanges,
    LedgerView,
    RecordedTransfer,
    Spending,
    apply,
)
from gpool.core.money.transfers import (
    FEE,
    MAX_AMOUNT,
    TREASURY,
    AccountKind,
    Expire,
    Forfeit,
    Grant,
    LedgerAccountId,
    Payout,
    Post,
    Posting,
    Refund,
    Reserve,
    TransferId,
    TransferKind,
    TransferOutcome,
    TransferRequest,
    Vest,
    Void,
    floor_of,
    format_credits,
    format_month,
    month_of,
    parse_credits,
)

ANN, HELD, BOB = LedgerAccountId(10), LedgerAccountId(11), LedgerAccountId(12)
UNVESTED, PAID = LedgerAccountId(13), LedgerAccountId(14)
NOW = Instant(1_790_000_000_000_000)
LATER = Instant(NOW + 600_000_000)
KINDS = {
    TREASURY: AccountKind.TREASURY,
    FEE: AccountKind.FEE,
    ANN: AccountKind.USER,
    HELD: AccountKind.PENDING,
    BOB: AccountKind.OWNER,
    UNVESTED: AccountKind.VESTING,
    PAID: AccountKind.PAID,
}
RETURNS = (TransferKind.REFUND, TransferKind.FORFEIT)
MOVED, REPEATED = TransferOutcome.MOVED, TransferOutcome.REPEATED


def fresh(**members: object) -> LedgerView:
    accounts = {id_: LedgerAccount(id_, kind) for id_, kind in KINDS.items()}
    return replace(LedgerView(accounts), **members)  # type: ignore[arg-type]


def after(view: LedgerView, changes: LedgerChanges) -> LedgerView:
    """The view that a store would return once the changes are written."""
    charges = dict(view.charges)
    for each in changes.resolved + changes.reserved:
        if each.resolved_by is not None and each.returned < each.amount:
            charges[each.resolved_by] = Charge(each.payer, each.amount - each.returned)
    for transfer in changes.transfers:
        if transfer.kind in RETURNS and transfer.refers_to is not None:
            before = charges[transfer.refers_to]
            paid = sum(
                e.amount
                for e in changes.entries
                if e.transfer == transfer.id and e.amount > 0 and e.account == before.payer
            )
            taken = 0
            if transfer.kind is TransferKind.FORFEIT:
                taken = -sum(
                    e.amount for e in changes.entries if e.transfer == transfer.id and e.amount < 0
                )
            charges[transfer.refers_to] = replace(
                before, refunded=before.refunded + paid, forfeited=before.forfeited + taken
            )
    month = month_of(NOW)
    spending = {
        payer: replace(each, spent=each.spent + changes.spent.get((payer, month), 0))
        for payer, each in view.spending.items()
    }
    pending = changes.reserved + changes.resolved
    return LedgerView(
        {**view.accounts, **{each.id: each for each in changes.accounts}},
        {**view.pending, **{each.id: each for each in pending}},
        {**view.digests, **{each.id: each.digest for each in changes.transfers}},
        charges,
        spending,
    )


def t(text: str) -> TransferId:
    return TransferId(text)


def reserve(name: str, amount: int, expires_at: Instant = LATER) -> Reserve:
    return Reserve(t(name), ANN, HELD, amount, expires_at)


def post(name: str, pending: str, owner: int, fee: int = 0, to: LedgerAccountId = UNVESTED) -> Post:
    postings = (Posting(to, owner), *((Posting(FEE, fee),) if fee else ()))
    return Post(t(name), t(pending), postings)


def test_a_charge_pays_owner_and_fee_and_returns_the_rest() -> None:
    story = [Grant(t("g"), ANN, 10_000), reserve("r", 2_000), post("p", "r", 1_350, 150)]
    changes = apply(fresh(), story, NOW)
    assert changes.outcomes == (MOVED, MOVED, MOVED)
    assert {each.id: each.balance for each in changes.accounts} == {
        TREASURY: -10_000,
        FEE: 150,
        ANN: 8_500,
        HELD: 0,
        UNVESTED: 1_350,
    }
    assert changes.spent == {(ANN, month_of(NOW)): 1_500}


@pytest.mark.parametrize(
    "second", [Void(t("b"), t("r")), post("b", "r", 5), Expire(t("b"), t("r"))]
)
def test_a_pending_transfer_is_resolved_at_most_once(second: TransferRequest) -> None:
    story = [Grant(t("g"), ANN, 100), reserve("r", 50, NOW), post("a", "r", 10), second]
    assert apply(fresh(), story, NOW).outcomes[-1] is TransferOutcome.RESOLVED


def test_the_same_id_moves_once_and_other_content_under_it_is_refused() -> None:
    story = [
        Grant(t("g"), ANN, 100),
        Grant(t("g"), ANN, 100),
        Grant(t("g"), ANN, 101),
        Grant(t("g"), BOB, 100),
        reserve("g", 100),
    ]
    changes = apply(fresh(), story, NOW)
    reused = TransferOutcome.ID_REUSED
    assert changes.outcomes == (MOVED, REPEATED, reused, reused, reused)
    assert changes.accounts[1].balance == 100


def test_refusals_name_their_reason_and_move_nothing() -> None:
    story = [
        Grant(t("g"), ANN, 100),
        reserve("r", 60),
        reserve("r2", 41),
        post("p", "r", 61),
        post("p", "nothing", 1),
        Expire(t("e"), t("r")),
        Refund(t("f"), t("r"), 1),
        Grant(t("x"), LedgerAccountId(99), 1),
        Grant(t("x"), HELD, 1),
        Reserve(t("x"), BOB, HELD, 1, LATER),
        Post(t("x"), t("r"), (Posting(ANN, 1),)),
    ]
    changes = apply(fresh(), story, NOW)
    outcomes = TransferOutcome
    assert changes.outcomes == (
        MOVED,
        MOVED,
        outcomes.NO_FUNDS,
        outcomes.TOO_MUCH,
        outcomes.NO_PENDING,
        outcomes.NOT_DUE,
        outcomes.NO_CHARGE,
        outcomes.NO_ACCOUNT,
        outcomes.NO_ACCOUNT,
        outcomes.NO_ACCOUNT,
        outcomes.TOO_MUCH,
    )
    assert len(changes.transfers) == 2


def test_refunds_of_a_charge_never_exceed_it() -> None:
    story = [
        Grant(t("g"), ANN, 100),
        reserve("r", 60),
        post("p", "r", 50),
        Refund(t("f1"), t("p"), 30),
        Refund(t("f2"), t("p"), 21),
        Refund(t("f3"), t("p"), 20),
    ]
    changes = apply(fresh(), story, NOW)
    assert changes.outcomes[3:] == (MOVED, TransferOutcome.TOO_MUCH, MOVED)
    balances = {each.id: each.balance for each in changes.accounts}
    assert (balances[ANN], balances[UNVESTED], balances[TREASURY]) == (100, 50, -150)


def balances_of(changes: LedgerChanges) -> dict[LedgerAccountId, int]:
    return {each.id: each.balance for each in changes.accounts}


def test_an_earning_vests_and_is_paid_out_at_most_once() -> None:
    story = [
        Grant(t("g"), ANN, 100),
        reserve("r", 60),
        post("p", "r", 50, 5),
        Payout(t("o1"), BOB, PAID, 1),
        Vest(t("v1"), UNVESTED, BOB, 51),
        Vest(t("v2"), UNVESTED, BOB, 50),
        Payout(t("o2"), BOB, PAID, 50),
        Payout(t("o3"), BOB, PAID, 1),
        Forfeit(t("f"), t("p"), UNVESTED, 50, 5),
    ]
    none = TransferOutcome.NO_FUNDS
    changes = apply(fresh(), story, NOW)
    assert changes.outcomes[3:] == (none, none, MOVED, MOVED, none, none)
    assert balances_of(changes)[PAID] == 50


def test_a_forfeit_returns_the_charge_with_its_fee_once() -> None:
    story = [Grant(t("g"), ANN, 100), reserve("r", 60), post("p", "r", 50, 5)]
    story += [
        Forfeit(t("f"), t("p"), UNVESTED, 50, 5),
        Forfeit(t("f"), t("p"), UNVESTED, 50, 5),
        Forfeit(t("other"), t("p"), UNVESTED, 1, 0),
        Refund(t("again"), t("p"), 1),
    ]
    changes = apply(fresh(), story, NOW)
    much = TransferOutcome.TOO_MUCH
    assert changes.outcomes[3:] == (MOVED, REPEATED, much, much)
    found = balances_of(changes)
    assert (found[ANN], found[UNVESTED], found[FEE], found[TREASURY]) == (100, 0, 0, -100)


def test_a_forfeit_repays_the_treasury_for_earlier_refunds() -> None:
    story = [Grant(t("g"), ANN, 100), reserve("r", 60), post("p", "r", 50, 5)]
    story += [Refund(t("a"), t("p"), 20), Forfeit(t("f"), t("p"), UNVESTED, 50, 5)]
    found = balances_of(apply(fresh(), story, NOW))
    assert (found[ANN], found[UNVESTED], found[FEE], found[TREASURY]) == (100, 0, 0, -100)


@pytest.mark.parametrize(
    "wrong",
    [
        Grant(t("x"), UNVESTED, 1),
        Grant(t("x"), PAID, 1),
        Vest(t("x"), BOB, UNVESTED, 1),
        Payout(t("x"), ANN, PAID, 1),
        Payout(t("x"), BOB, ANN, 1),
        Forfeit(t("x"), t("p"), BOB, 1, 0),
    ],
)
def test_money_takes_no_other_way_to_an_owner(wrong: TransferRequest) -> None:
    story = [Grant(t("g"), ANN, 100), reserve("r", 60), post("p", "r", 50, 5), wrong]
    assert apply(fresh(), story, NOW).outcomes[-1] is TransferOutcome.NO_ACCOUNT


def test_a_budget_warns_at_80_percent_and_caps_the_month() -> None:
    view = fresh(spending={ANN: Spending(100, 0)})
    story = [
        Grant(t("g"), ANN, 1_000),
        reserve("a", 79),
        reserve("b", 1),
        reserve("c", 21),
        Void(t("v"), t("a")),
        reserve("d", 99),
    ]
    changes = apply(view, story, NOW)
    assert changes.outcomes[1:] == (MOVED, MOVED, TransferOutcome.OVER_BUDGET, MOVED, MOVED)
    assert [(each.level, each.spent) for each in changes.warnings] == [
        (BudgetLevel.WARNING, 80),
        (BudgetLevel.REACHED, 100),
    ]
    assert budget_level(100, 79) is BudgetLevel.WITHIN


@pytest.mark.parametrize("amount", [0, -1, MAX_AMOUNT + 1, 1.0, True, "1"])
def test_only_positive_integers_are_amounts(amount: object) -> None:
    with pytest.raises(Invalid):
        Grant(t("g"), ANN, amount)  # type: ignore[arg-type]


@pytest.mark.parametrize("id_", ["", "A", "ann smith", "a\n", "x" * 101])
def test_ids_with_other_letters_are_refused(id_: str) -> None:
    with pytest.raises(Invalid, match="transfer id"):
        Grant(t(id_), ANN, 1)


# ---- properties

NAMES = st.sampled_from([f"id{n}" for n in range(30)])
AMOUNTS = st.integers(1, 400)


@st.composite
def requests(draw: st.DrawFn) -> TransferRequest:
    name, other, amount = t(draw(NAMES)), t(draw(NAMES)), draw(AMOUNTS)
    kind = draw(st.sampled_from(list(TransferKind)))
    match kind:
        case TransferKind.GRANT:
            return Grant(name, draw(st.sampled_from([ANN, BOB, FEE])), amount)
        case TransferKind.REFUND:
            return Refund(name, other, amount)
        case TransferKind.RESERVE:
            return Reserve(name, ANN, HELD, amount, draw(st.sampled_from([NOW, LATER])))
        case TransferKind.POST:
            return post(name, other, amount, draw(st.integers(0, 50)))
        case TransferKind.VOID:
            return Void(name, other)
        case TransferKind.EXPIRE:
            return Expire(name, other)
        case TransferKind.VEST:
            return Vest(name, UNVESTED, BOB, amount)
        case TransferKind.FORFEIT:
            return Forfeit(name, other, UNVESTED, amount, draw(st.integers(0, 50)))
        case TransferKind.PAYOUT:
            return Payout(name, BOB, PAID, amount)


@given(st.lists(requests(), max_size=60), st.integers(0, 300))
def test_every_step_sums_to_zero_and_keeps_every_floor(
    story: list[TransferRequest], cap: int
) -> None:
    view = fresh(spending={ANN: Spending(cap, 0)} if cap else {})
    moved: set[TransferId] = set()
    for request in story:
        changes = apply(view, [request], NOW)
        assert sum(entry.amount for entry in changes.entries) == 0
        assert all(type(entry.amount) is int for entry in changes.entries)
        if changes.outcomes == (MOVED,):
            assert request.id not in moved
            moved.add(request.id)
        else:
            assert (changes.entries, changes.accounts) == ((), ())
        view = after(view, changes)
        accounts = view.accounts.values()
        assert sum(each.balance for each in accounts) == 0
        assert all(each.balance >= floor_of(each.kind) for each in accounts)
        open_ = sum(each.amount for each in view.pending.values() if each.resolved_by is None)
        assert view.accounts[HELD].balance == open_
        spent = sum(each.amount - each.returned for each in view.pending.values())
        assert not cap or spent <= cap
        assert all(
            max(each.refunded, each.forfeited) <= each.amount for each in view.charges.values()
        )


@given(st.lists(requests(), max_size=60), st.integers(0, 60))
def test_one_write_of_many_requests_equals_many_writes(
    story: list[TransferRequest], cut: int
) -> None:
    whole = apply(fresh(), story, NOW)
    first = apply(fresh(), story[:cut], NOW)
    rest = apply(after(fresh(), first), story[cut:], NOW)
    assert whole.outcomes == first.outcomes + rest.outcomes
    assert whole.entries == first.entries + rest.entries


@given(st.lists(requests(), max_size=40))
def test_a_story_told_twice_moves_as_much_as_once(story: list[TransferRequest]) -> None:
    once = apply(fresh(), story, NOW)
    view = after(fresh(), once)
    again = apply(view, [r for r, o in zip(story, once.outcomes, strict=True) if o is MOVED], NOW)
    assert set(again.outcomes) <= {REPEATED}
    assert again.entries == ()


# ---- blocks, text


def booked(name: str, amount: int = 5) -> BookedTransfer:
    transfer = RecordedTransfer(t(name), TransferKind.GRANT, NOW, "d", None)
    entries = (
        SealedEntry(1, "treasury", 1, -amount, -amount),
        SealedEntry(10, "user", 1, amount, amount),
    )
    return BookedTransfer(transfer, entries)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), st.data())
def test_another_list_of_transfers_has_another_root(
    amounts: list[int], data: st.DataObject
) -> None:
    leaves = [leaf_of(booked(f"t{place}", amount)) for place, amount in enumerate(amounts)]
    root = merkle_root(leaves)
    place = data.draw(st.integers(0, len(leaves) - 1))
    changed = [*leaves]
    changed[place] = leaf_of(booked(f"t{place}", amounts[place] + 1))
    assert merkle_root(changed) != root
    assert merkle_root([*leaves, leaves[-1]]) != root  # the last leaf twice: CVE-2012-2459
    if len(leaves) > 1:
        assert merkle_root(leaves[:-1]) != root
        assert merkle_root(leaves[::-1]) != root


def test_blocks_name_the_hash_before_them() -> None:
    first = sealed(None, [booked("a")], NOW)
    second = sealed(first, [booked("b")], NOW)
    assert (first.number, second.number, second.previous) == (1, 2, first.hash)
    assert sealed(replace(first, hash="0" * 64), [booked("b")], NOW).hash != second.hash


def test_credits_are_read_and_written_without_floats() -> None:
    assert parse_credits("2.50") == 2_500_000
    assert parse_credits("0.000001") == 1
    assert format_credits(-1_500_000) == "-1.50"
    assert format_credits(0) == "0.00"
    for wrong in ("0", "-1", "x", "1/h", "0.0000001"):
        with pytest.raises(Invalid):
            parse_credits(wrong)


def test_months_are_those_of_utc() -> None:
    assert format_month(month_of(Instant(0))) == "1970-01"
    assert format_month(month_of(Instant(-1))) == "1969-12"
