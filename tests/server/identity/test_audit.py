"""The audit chain: whatever is changed, taken out, put in or moved is found, at its first place."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.core.model import SECOND, Instant
from gpool.server.identity.audit import (
    GENESIS,
    MOST_NETWORKS,
    REFUSED,
    SINGLE_ENTRIES,
    AuditAnchor,
    AuditEntry,
    AuditLink,
    ChainBroken,
    ChainIntact,
    RefusedSignIns,
    appended,
    canonical,
    check,
    facts,
    link,
)

words = st.text(max_size=8)
told = st.tuples(words, words, words, words, words, st.dictionaries(words, words, max_size=3))


def chain(stories: list[tuple[str, str, str, str, str, dict[str, str]]]) -> list[AuditLink]:
    links: list[AuditLink] = []
    head = None
    for number, (*texts, more) in enumerate(stories, 1):
        entry = AuditEntry(number, Instant(number * 1000), *texts, facts=facts(more))
        links.append(appended(head, entry))
        head = AuditAnchor(number, links[-1].hash)
    return links


chains = st.lists(told, min_size=1, max_size=12).map(chain)
LONG = chain([("u-1", "session.sign_in", "", "allowed", "::1", {"n": str(n)}) for n in range(200)])


@given(chains)
def test_a_chain_as_it_was_written_is_whole(links: list[AuditLink]) -> None:
    assert check(links) == ChainIntact(AuditAnchor(len(links), links[-1].hash))


@given(chains, st.data())
def test_a_changed_entry_is_always_found_where_it_is(
    links: list[AuditLink], data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(links) - 1))
    name = data.draw(st.sampled_from(["actor", "action", "thing", "outcome", "address"]))
    value = data.draw(words)
    changed = replace(links[at].entry, **{name: value})  # type: ignore[arg-type]
    bent = [*links[:at], replace(links[at], entry=changed), *links[at + 1 :]]
    if changed != links[at].entry:
        assert check(bent) == ChainBroken(at + 1, f"entry {at + 1} was changed")


@given(chains, st.data())
def test_an_entry_changed_together_with_its_hash_breaks_the_next_one(
    links: list[AuditLink], data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(links) - 1))
    previous = links[at - 1].hash if at else GENESIS
    changed = replace(links[at].entry, outcome="never so")
    bent = [*links[:at], AuditLink(changed, link(previous, changed)), *links[at + 1 :]]
    if at + 1 < len(links):
        assert check(bent) == ChainBroken(at + 2, f"entry {at + 2} was changed")
    else:  # only an anchor can tell
        assert isinstance(check(bent), ChainIntact)
        assert isinstance(check(bent, anchors=[AuditAnchor(at + 1, links[at].hash)]), ChainBroken)


@pytest.mark.parametrize("gone", [0, 1, 100, 198])
def test_an_entry_taken_out_is_found(gone: int) -> None:
    assert check(LONG[:gone] + LONG[gone + 1 :]) == ChainBroken(
        gone + 1, f"entry {gone + 1} is missing; {gone + 2} follows"
    )


def test_an_end_cut_off_is_found_by_an_anchor_and_by_nothing_else() -> None:
    assert isinstance(check(LONG[:150]), ChainIntact)  # the control
    assert check(LONG[:150], anchors=[AuditAnchor(180, LONG[179].hash)]) == ChainBroken(
        151, "the log ends at 150, but entry 180 was anchored"
    )


def test_every_anchor_of_an_entry_must_fit() -> None:
    """The stored head is one of them: a chain written anew to the same length has a head that fits."""
    head, other = AuditAnchor(200, LONG[199].hash), AuditAnchor(200, LONG[0].hash)
    assert isinstance(check(LONG, anchors=[head, head]), ChainIntact)  # control
    for anchors in ([head, other], [other, head]):
        assert check(LONG, anchors=anchors) == ChainBroken(200, "entry 200 differs from its anchor")


def test_a_chain_written_anew_is_found_by_an_anchor_and_by_nothing_else() -> None:
    anew = chain([("u-2", "session.sign_in", "", "allowed", "::1", {}) for _ in range(200)])
    assert isinstance(check(anew), ChainIntact)  # the control
    assert check(anew, anchors=[AuditAnchor(50, LONG[49].hash)]) == ChainBroken(
        50, "entry 50 differs from its anchor"
    )


def test_swapped_and_repeated_entries_are_found() -> None:
    swapped = [*LONG[:10], LONG[11], LONG[10], *LONG[12:]]
    repeated = [*LONG[:10], LONG[9], *LONG[10:]]
    assert isinstance(check(swapped), ChainBroken)
    assert isinstance(check(repeated), ChainBroken)


def test_a_check_can_go_on_from_a_head_known_to_be_good() -> None:
    head = AuditAnchor(100, LONG[99].hash)
    assert check(LONG[100:], start=head) == check(LONG)
    assert isinstance(check(LONG[100:]), ChainBroken)


@given(told, told)
def test_different_entries_never_have_the_same_spelling(
    one: tuple[str, str, str, str, str, dict[str, str]],
    two: tuple[str, str, str, str, str, dict[str, str]],
) -> None:
    first, second = (
        AuditEntry(1, Instant(1), *story[:5], facts=facts(story[5])) for story in (one, two)
    )
    assert (canonical(first) == canonical(second)) == (first == second)


def test_every_field_of_an_entry_is_in_its_spelling() -> None:
    entry = AuditEntry(1, Instant(1), "a", "b", "c", "d", "e", (("f", "g"),))
    other = AuditEntry(2, Instant(2), "A", "B", "C", "D", "E", (("F", "G"),))
    for each in fields(AuditEntry):
        bent = replace(entry, **{each.name: getattr(other, each.name)})
        assert canonical(bent) != canonical(entry), each.name


def test_an_entry_that_is_not_the_next_one_is_a_bug_and_says_so() -> None:
    entry = AuditEntry(3, Instant(1), "", "", "", "", "")
    with pytest.raises(AssertionError, match="entry 3 cannot follow 1"):
        appended(AuditAnchor(1, GENESIS), entry)
    with pytest.raises(AssertionError, match="not sorted"):
        appended(None, replace(entry, sequence=1, facts=(("b", ""), ("a", ""))))


# ---- refused sign-ins


def test_refused_sign_ins_are_counted_by_minute_and_address_and_none_is_lost() -> None:
    refusals, found = RefusedSignIns(), []
    for number in range(6400):
        at = Instant(1_800_000_000 * SECOND + number * SECOND // 100)  # about a minute
        found += refusals.add(at, f"10.0.0.{number % 8}", "password", f"name n{number}")
    found += refusals.take(Instant(1_800_000_000 * SECOND + 600 * SECOND))
    assert all(entry.outcome == REFUSED for entry in found)
    assert len(found) <= 2 * 8 * (SINGLE_ENTRIES + 1)
    assert sum(int(dict(entry.facts).get("count", 1)) for entry in found) == 6400


def test_refusals_from_more_addresses_than_are_told_apart_are_one_count() -> None:
    refusals, at = RefusedSignIns(), Instant(1_800_000_000 * SECOND)
    for number in range(10_000):
        refusals.add(at, f"10.0.{number // 256}.{number % 256}", "wallet", "")
    [last] = refusals.take(Instant(at + 60 * SECOND))
    assert last.address == "other addresses"
    assert dict(last.facts) == {"count": str(10_000 - MOST_NETWORKS)}
    assert refusals.take(Instant(at + 120 * SECOND)) == []
