"""Choice of nodes for siblings."""

from __future__ import annotations

from collections import Counter

from gpool.core.ids import NodeId, TaskId, UserId
from gpool.core.trust.siblings import SiblingNode, pick, similar

SECRET = b"secret of the server"
POOL = [SiblingNode(NodeId(number), UserId(number // 2)) for number in range(40)]


def chosen(secret: bytes, parent: int, siblings: int = 3) -> list[SiblingNode]:
    found: list[SiblingNode] = []
    for number in range(siblings):
        one = pick(secret, TaskId(parent), number, POOL, {two.owner for two in found})
        assert one is not None
        found.append(one)
    return found


def test_siblings_of_a_parent_have_different_owners() -> None:
    for parent in range(200):
        assert len({one.owner for one in chosen(SECRET, parent, siblings=20)}) == 20


def test_no_node_is_found_when_every_owner_has_a_sibling() -> None:
    assert pick(SECRET, TaskId(1), 0, POOL, {one.owner for one in POOL}) is None
    assert pick(SECRET, TaskId(1), 0, [], set()) is None


def test_the_choice_repeats_with_the_secret_and_differs_with_another() -> None:
    parents = range(50)
    first = [chosen(SECRET, parent) for parent in parents]
    assert first == [chosen(SECRET, parent) for parent in parents]
    other = [chosen(b"another secret", parent) for parent in parents]
    assert sum(one == two for one, two in zip(first, other, strict=True)) < 5


def test_every_node_is_chosen_about_equally_often() -> None:
    counts = Counter(chosen(SECRET, parent, 1)[0].node for parent in range(8000))
    assert len(counts) == len(POOL)
    assert 130 < min(counts.values()) <= max(counts.values()) < 280


def test_the_narrowest_class_with_enough_owners_is_used() -> None:
    def node(number: int, model: str, driver: str, environment: str) -> SiblingNode:
        return SiblingNode(NodeId(number), UserId(number), model, driver, environment)

    first = node(0, "H100", "550", "torch")
    exact = [node(number, "H100", "550", "torch") for number in (1, 2, 3)]
    driver = [node(number, "H100", "550", "jax") for number in (4, 5, 6)]
    model = [node(number, "H100", "535", "jax") for number in (7, 8, 9)]
    others = [node(10, "A100", "550", "torch")]
    assert similar([*exact, *driver, *model, *others], first) == exact
    assert similar([*exact[:2], *driver, *model, *others], first) == [*exact[:2], *driver]
    assert similar([*exact[:1], *driver[:1], *model, *others], first) == [
        exact[0],
        driver[0],
        *model,
    ]
    assert similar([*exact[:1], *others], first) == [exact[0], *others]


def test_nodes_of_the_same_owner_do_not_make_a_class() -> None:
    first = SiblingNode(NodeId(0), UserId(0), "H100")
    own = [SiblingNode(NodeId(number), UserId(number % 2), "H100") for number in range(1, 9)]
    others = [SiblingNode(NodeId(20), UserId(20), "A100")]
    assert similar([*own, *others], first) == [*own, *others]
