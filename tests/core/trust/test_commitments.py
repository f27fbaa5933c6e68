"""Commit-then-reveal: nothing is shown before all have committed, and a copied commitment opens for nobody else."""

from __future__ import annotations

from dataclasses import replace

from gpool.core.ids import NodeId, TaskId
from gpool.core.model import Instant
from gpool.core.trust.commitments import (
    OPEN_WITHIN,
    AnswerOpening,
    RoundStep,
    Sibling,
    commitment,
    opens,
    round_step,
)
from gpool.core.trust.comparison import canonical_digest

PARENT = TaskId(7)
ANSWER = AnswerOpening(canonical_digest(42), b"s" * 32)


def committed(node: int, at: int = 10) -> Sibling:
    return Sibling(NodeId(node), commitment(NodeId(node), PARENT, ANSWER), Instant(at))


def test_an_opening_belongs_to_its_node_parent_salt_and_answer() -> None:
    sibling = committed(1)
    assert opens(sibling, PARENT, ANSWER)
    assert not opens(sibling, TaskId(8), ANSWER)
    assert not opens(sibling, PARENT, replace(ANSWER, digest=canonical_digest(43)))
    assert not opens(sibling, PARENT, replace(ANSWER, salt=b"t" * 32))


def test_a_copied_commitment_does_not_open_for_the_copier() -> None:
    author = committed(1)
    copier = replace(author, node=NodeId(2))
    assert opens(author, PARENT, ANSWER)  # control: the same bytes open for their author
    assert not opens(copier, PARENT, ANSWER)


def test_bytes_cannot_be_moved_between_salt_and_digest() -> None:
    both = ANSWER.salt + ANSWER.digest
    shifted = AnswerOpening(both[33:], both[:33])
    head = committed(1)
    assert commitment(head.node, PARENT, shifted) == head.committed
    assert not opens(head, PARENT, shifted)


def test_equal_answers_have_different_commitments() -> None:
    assert committed(1).committed != committed(2).committed


def test_nothing_is_revealed_while_a_sibling_has_not_committed() -> None:
    assert round_step([committed(1), Sibling(NodeId(2))], Instant(10**18)) is RoundStep.COMMITTING


def test_a_round_is_complete_when_all_have_opened_or_the_time_is_over() -> None:
    one, other = committed(1, 10), committed(2, 20)
    opened = [replace(one, opening=ANSWER), replace(other, opening=ANSWER)]
    late = Instant(20 + OPEN_WITHIN)
    assert round_step([one, other], Instant(30)) is RoundStep.REVEALING
    assert round_step([opened[0], other], Instant(late - 1)) is RoundStep.REVEALING
    assert round_step([opened[0], other], late) is RoundStep.COMPLETE
    assert round_step(opened, Instant(30)) is RoundStep.COMPLETE


def test_a_sibling_without_a_commitment_opens_nothing() -> None:
    assert not opens(Sibling(NodeId(1)), PARENT, ANSWER)
