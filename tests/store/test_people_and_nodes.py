"""Users, keys, invites, nodes and their GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpool.core.errors import Conflict, Forbidden, Invalid, NotFound
from gpool.core.ids import GpuId, NodeId
from gpool.core.model import Availability, Gpu, Instant, Offer, Permission
from gpool.server.store.operations import nodes
from gpool.server.store.operations.identity import users
from gpool.server.store.operations.leases import leases
from gpool.server.store.values import User
from gpool.wire.frames import Released
from tests.store.store_pool import Pool

OFFER = Offer(1000, 1 << 30, 1 << 30, pythons=frozenset({"3.11", "3.12"}), hostname="box")


def test_a_user_is_found_by_id_name_and_key(pool: Pool) -> None:
    bob = User(
        pool.ann.__class__(7),
        "bob",
        frozenset({Permission.OPERATOR, Permission.PROVIDER}),
        pool.now(),
    )
    pool.write(users.create_user(bob))
    pool.write(users.add_key(70, bob.id, "laptop", "hash", pool.now()))
    assert pool.read(users.user(bob.id)) == bob
    assert pool.read(users.user_by_name("bob")) == bob
    assert pool.read(users.user_by_key("hash")) == bob
    names = pool.read(users.names_of([bob.id, pool.ann, pool.ann.__class__(99)]))
    assert names == {bob.id: "bob", pool.ann: "ann"}
    assert pool.read(users.names_of([])) == {}


def test_nobody_is_found_by_an_unknown_id_name_or_key(pool: Pool) -> None:
    assert pool.read(users.user(99)) is None
    assert pool.read(users.user_by_name("nobody")) is None
    assert pool.read(users.user_by_key("no hash")) is None


def test_a_name_is_given_once(pool: Pool) -> None:
    with pytest.raises(Conflict, match="ann"):
        pool.user("ann")


def test_an_invite_is_redeemed_once_and_binds_the_node_to_the_inviter(pool: Pool) -> None:
    at = pool.now()
    pool.write(nodes.create_invite("token", pool.ann, Instant(at + 10**9), at))
    joined = pool.write(nodes.create_node(NodeId(5), "box", None, "token", "s5", OFFER, (), at))
    assert (joined.node, joined.owner, joined.name) == (5, pool.ann, "box")
    assert pool.read(nodes.credentials_of(NodeId(5))) == joined
    assert pool.read(nodes.node_of_invite("token")) == 5
    with pytest.raises(Forbidden, match="used"):
        pool.write(nodes.create_node(NodeId(6), "box2", None, "token", "s6", OFFER, (), at))
    assert pool.read(nodes.credentials_of(NodeId(6))) is None


@pytest.mark.parametrize(("token", "word"), [("token", "expired"), ("other", "not known")])
def test_an_unknown_or_expired_invite_is_refused(pool: Pool, token: str, word: str) -> None:
    at = pool.now()
    pool.write(nodes.create_invite("token", pool.ann, at, at))
    with pytest.raises(Forbidden, match=word):
        pool.write(nodes.create_node(NodeId(5), "box", None, token, "s5", OFFER, (), at))


def test_an_owner_has_one_node_of_a_name(pool: Pool) -> None:
    pool.node("box")
    with pytest.raises(Conflict, match="box"):
        pool.node("box")


def test_a_node_is_read_back_as_it_was_offered(pool: Pool) -> None:
    at = pool.now()
    pool.write(nodes.create_node(NodeId(5), "box", pool.ann, None, "s5", OFFER, (), at))
    row = pool.read(nodes.node(NodeId(5)))
    assert row is not None
    assert (row.node.offer, row.node.owner, row.created_at) == (OFFER, pool.ann, at)
    assert row.last_beat_at is None
    assert pool.read(nodes.nodes(pool.ann)) == (row,) == pool.read(nodes.nodes())
    assert pool.read(nodes.nodes(pool.user("bob"))) == ()
    assert pool.read(nodes.node(NodeId(6))) is None


def test_a_hello_brings_the_offer_up_to_date_and_is_a_beat(pool: Pool) -> None:
    node = pool.node("box")
    at = pool.now()
    pool.write(nodes.greet(node, OFFER, (), at))
    row = pool.read(nodes.node(node))
    assert row is not None
    assert (row.node.offer, row.last_beat_at) == (OFFER, at)
    later = pool.now()
    pool.write(leases.record_heartbeats([(node, (), later)]))
    assert pool.read(nodes.node(node)).last_beat_at == later


def test_a_removed_node_is_not_greeted(pool: Pool) -> None:
    with pytest.raises(NotFound):
        pool.write(nodes.greet(NodeId(5), OFFER, (), pool.now()))


def test_a_gpu_keeps_its_id_and_its_owners_wish_when_it_comes_back(pool: Pool) -> None:
    node = pool.node("box", gpus=2)
    (first, _, _), (second, _, _) = pool.read(nodes.gpus())
    pool.write(nodes.set_gpu_available(second, pool.ann, False))
    offer = pool.read(nodes.node(node)).node.offer
    pool.write(nodes.greet(node, replace(offer, gpus=offer.gpus[:1]), (501,), pool.now()))
    assert pool.read(nodes.gpus()) == ((first, node, 0),)
    assert pool.read(nodes.node(node)).node.gpus_withheld == frozenset()
    pool.write(nodes.greet(node, offer, (502, 503), pool.now()))
    assert pool.read(nodes.gpus()) == ((first, node, 0), (second, node, 1))
    assert pool.read(nodes.node(node)).node.gpus_withheld == {1}


def test_a_new_gpu_gets_the_id_it_was_given(pool: Pool) -> None:
    node = pool.node("box", gpus=1)
    offer = pool.read(nodes.node(node)).node.offer
    gpus = (*offer.gpus, Gpu(1, "new", "A100", "nvidia", 40 << 30))
    pool.write(nodes.greet(node, replace(offer, gpus=gpus), (601, 602), pool.now()))
    assert pool.read(nodes.gpus())[1] == (602, node, 1)


def test_an_offer_that_names_a_gpu_twice_is_refused(pool: Pool) -> None:
    node = pool.node("box", gpus=1)
    offer = pool.read(nodes.node(node)).node.offer
    with pytest.raises(Invalid, match="twice"):
        pool.write(nodes.greet(node, replace(offer, gpus=offer.gpus * 2), (1, 2), pool.now()))


def test_only_the_owner_or_an_operator_changes_a_node(pool: Pool) -> None:
    node, bob = pool.node("box", gpus=1), pool.user("bob")
    gpu = pool.read(nodes.gpus())[0][0]
    paused = Availability.PAUSED
    assert pool.write(nodes.set_availability(node, bob, paused, pool.now())) is None
    assert pool.write(nodes.set_gpu_available(gpu, bob, False)) is None
    assert pool.write(nodes.set_gpu_available(GpuId(1), None, False)) is None
    assert pool.write(nodes.remove_node(node, bob)) is False
    row = pool.read(nodes.node(node))
    assert (row.node.availability, row.node.gpus_withheld) == (Availability.AVAILABLE, frozenset())
    row = pool.write(nodes.set_availability(node, None, paused, pool.now()))
    assert row.node.availability is paused
    row = pool.write(nodes.set_gpu_available(gpu, pool.ann, False))
    assert row.node.gpus_withheld == {0}


def test_a_node_is_removed_only_once_it_holds_nothing(pool: Pool) -> None:
    node = pool.node("box", gpus=1)
    task = pool.leased(node)
    with pytest.raises(Conflict, match="leases"):
        pool.write(nodes.remove_node(node, pool.ann))
    pool.record(node, Released(task, 1))
    assert pool.write(nodes.remove_node(node, pool.ann)) is True
    assert pool.read(nodes.nodes()) == ()
    assert pool.read(nodes.gpus()) == ()
    assert pool.write(nodes.remove_node(node, pool.ann)) is False
