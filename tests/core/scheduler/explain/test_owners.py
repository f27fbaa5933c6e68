"""Sentences and suggestions for tasks that accept some owners only."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpool.core.errors import Invalid
from gpool.core.ids import TaskId, UserId
from gpool.core.model import Node, Owners
from gpool.core.scheduler.explain.waiting import explain
from gpool.core.scheduler.explain.whatif import suggest
from gpool.core.scheduler.order.orders import Policy
from gpool.core.scheduler.state.snapshot import take
from gpool.core.specs import gpu as gpuspec
from gpool.core.specs.owners import words_of
from tests.core.scheduler.state.builders import NOW, a_node, a_shape, a_state, apply, enqueue, plan

FCFS = Policy(order="fcfs")
ADA, BOB = UserId(1), UserId(2)
LAB = 501


def of(node: Node, owner: UserId, *teams: int) -> Node:
    return replace(node, owner=owner, owner_teams=frozenset(teams))


@pytest.mark.parametrize(
    ("on", "phrase"),
    [
        (Owners("me", (ADA,)), "yours"),
        (Owners("team", (ADA,), (LAB,)), "yours or of your teams"),
        (Owners("team:lab", (), (LAB,)), "team lab"),
        (Owners("team:lab,user:zoe", (7,), (LAB,)), "team lab or user zoe"),
    ],
)
def test_it_names_the_owners_and_the_nodes_of_others(on: Owners, phrase: str) -> None:
    state = a_state(of(a_node(1), BOB), of(a_node(2), BOB))
    enqueue(state, a_shape(ADA, on=on), [1])
    told = explain(state, TaskId(1), NOW, FCFS)
    assert told.code == "no_owner"
    assert told.sentence == (
        f"No node of {phrase} can run it; with --on anyone it could run on node1, node2."
    )


def test_own_nodes_that_lack_a_gpu_do_not_hide_those_of_others() -> None:
    state = a_state(of(a_node(1), ADA), of(a_node(2, 4, 1), BOB))
    enqueue(state, a_shape(ADA, gpu=gpuspec.parse("1"), on=Owners("me", (ADA,))), [1])
    said = explain(state, TaskId(1), NOW, FCFS).sentence
    assert said == "No node of yours can run it; with --on anyone it could run on node2."


def test_where_nobody_could_run_it_the_own_nodes_are_the_reason() -> None:
    needs = {"gpu": gpuspec.parse("H200"), "on": Owners("me", (ADA,))}
    state = a_state(of(a_node(1), ADA), of(a_node(2, 4, 1), BOB))
    enqueue(state, a_shape(ADA, "a", **needs), [1])
    assert explain(state, TaskId(1), NOW, FCFS).code == "no_gpu"
    state = a_state(of(a_node(2, 4, 1), BOB))
    enqueue(state, a_shape(ADA, "a", **needs), [1])
    said = explain(state, TaskId(1), NOW, FCFS).sentence
    assert said == "No node of yours can run it, and no other node could either."


def test_other_owners_are_suggested_with_what_they_can_read() -> None:
    state = a_state(of(a_node(1, 4, 1), ADA), of(a_node(2, 4, 1), BOB))
    mine = a_shape(ADA, gpu=gpuspec.parse("1"), on=Owners("me", (ADA,)))
    enqueue(state, mine, [1])
    assert len(apply(state, plan(state, NOW, FCFS))) == 1
    enqueue(state, mine, [2])
    found = {one.kind: one for one in suggest(take(state), TaskId(2), NOW, FCFS)}["on"]
    assert found.change == "--on anyone"
    assert found.sentence == (
        "It starts now on a node of another owner, who can read its inputs and secrets."
    )


def test_the_position_counts_tasks_that_could_use_the_same_owners_nodes() -> None:
    state = a_state(of(a_node(1, 4, 1), ADA), of(a_node(2, 4, 1), BOB))
    gpu = gpuspec.parse("1")
    enqueue(state, a_shape(ADA, "first", gpu=gpu), [1, 2])
    apply(state, plan(state, NOW, FCFS))
    enqueue(state, a_shape(BOB, "his", gpu=gpu, on=Owners("me", (BOB,))), [3], NOW + 1)
    enqueue(state, a_shape(ADA, "hers", gpu=gpu, on=Owners("me", (ADA,))), [4], NOW + 2)
    enqueue(state, a_shape(ADA, "any", gpu=gpu), [5], NOW + 3)
    assert explain(state, TaskId(4), NOW, FCFS).position == 1
    assert explain(state, TaskId(5), NOW, FCFS).position == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("anyone", ()),
        ("me", ("me",)),
        ("team:lab, me,me", ("me", "team:lab")),
        ("user:ana", ("user:ana",)),
    ],
)
def test_owners_are_read(text: str, words: tuple[str, ...]) -> None:
    assert words_of(text) == words


@pytest.mark.parametrize(
    "text",
    [
        "",
        "everyone",
        "me,anyone",
        "team:",
        "user:",
        "node:x",
        "me,,team",
        ",".join(f"user:a{n}" for n in range(21)),
    ],
)
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(Invalid, match="'on'"):
        words_of(text)
