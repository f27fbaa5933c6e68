"""GPUs and whose they are; nodes and their keys."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpool.core.errors import Conflict, Forbidden, Invalid
from gpool.core.gpu_verification import GpuVerdict
from gpool.core.ids import GpuId, NodeId, UserId
from gpool.core.model import Gpu, Health, Instant, Offer, Slice, TaskStatus
from gpool.core.quotas import OwnerQuota
from gpool.server.store.identity_values import Binding
from gpool.server.store.operations import gpus as gpu_bindings
from gpool.server.store.operations import nodes
from gpool.server.store.operations.identity import accounts
from gpool.server.store.operations.leases import leases
from gpool.server.store.protocol import Operation, Statement, operation
from tests.store.store_pool import Database, Pool, race

OFFER = Offer(1000, 1 << 30, 1 << 30)


def joined(pool: Pool, name: str, owner: UserId, *uuids: str) -> NodeId:
    gpus = tuple(Gpu(i, uuid, "H100", "nvidia", 80 << 30) for i, uuid in enumerate(uuids))
    node = NodeId(next(pool.numbers))
    ids = [next(pool.numbers) for _ in uuids]
    offer = replace(OFFER, gpus=gpus)
    pool.write(nodes.create_node(node, name, owner, None, f"s{node}", offer, ids, pool.now()))
    return node


def withheld(pool: Pool, node: NodeId) -> set[int]:
    return set(pool.read(nodes.node(node)).node.gpus_withheld)


def bind(pool: Pool, node: NodeId, owner: UserId, *uuids: str, wallet: str = "") -> tuple[str, ...]:
    return pool.write(gpu_bindings.bind(node, owner, wallet or None, uuids, pool.now()))


def gpu_on(pool: Pool, node: NodeId, place: int = 0) -> GpuId:
    return [row for row in pool.read(gpu_bindings.gpu_rows()) if row.node == node][place].id


def test_a_gpu_is_bound_to_its_owner_and_the_owners_wallet(pool: Pool) -> None:
    box = joined(pool, "box", pool.ann, "G1", "G2")
    at = pool.now()
    assert pool.write(gpu_bindings.bind(box, pool.ann, "0xa", ["G1", "G2"], at)) == ()
    assert pool.read(gpu_bindings.binding("G1")) == Binding("G1", pool.ann, "0xa", at, None)
    assert bind(pool, box, pool.ann, "G1", wallet="0xb") == ()
    assert pool.read(gpu_bindings.binding("G1")) == Binding("G1", pool.ann, "0xb", at, None)
    assert pool.write(gpu_bindings.rebind_wallet(pool.ann, None)) == 2
    assert pool.read(gpu_bindings.binding("G2")).wallet is None
    assert pool.read(gpu_bindings.binding("G3")) is None
    assert bind(pool, box, pool.ann) == ()
    row = pool.read(gpu_bindings.gpu(gpu_on(pool, box)))
    assert (row.owner, row.uuid, row.available, row.flagged) == (pool.ann, "G1", True, None)
    assert pool.read(gpu_bindings.gpu(GpuId(1))) is None


def test_a_claim_on_a_bound_uuid_flags_the_claimant_only(pool: Pool) -> None:
    bob, eve = pool.user("bob"), pool.user("eve")
    mine = joined(pool, "mine", pool.ann, "G0", "G1")
    spare = joined(pool, "spare", pool.ann, "G1")
    bind(pool, mine, pool.ann, "G0", "G1")
    assert bind(pool, spare, pool.ann, "G1") == ()  # moved between her own machines
    theirs, hers = joined(pool, "theirs", bob, "G1", "G2"), joined(pool, "hers", eve, "G0", "G1")
    assert bind(pool, theirs, bob, "G1", "G2") == ("G1",)
    assert bind(pool, hers, eve, "G0", "G1") == ("G0", "G1")
    wanted = {mine: set(), spare: set(), theirs: {0}, hers: {0, 1}}
    assert {node: withheld(pool, node) for node in wanted} == wanted
    picture = pool.read(leases.picture())
    assert {row.node.id: set(row.node.gpus_withheld) for row in picture.nodes} == wanted
    assert pool.read(gpu_bindings.nodes_with(["G1"])) == (mine, spare, theirs, hers)
    assert {row.node for row in pool.read(gpu_bindings.flagged())} == {theirs, hers}
    assert bind(pool, mine, pool.ann, "G0", "G1") == ()
    assert bind(pool, theirs, bob, "G1", "G2") == ("G1",)  # repeating the claim does not help
    later = joined(pool, "later", pool.ann, "G1")
    assert bind(pool, later, pool.ann, "G1") == ()
    assert withheld(pool, later) == set()
    assert pool.read(gpu_bindings.binding("G1")).owner == pool.ann


def test_a_plan_made_before_the_flag_grants_nothing_on_the_gpu(pool: Pool) -> None:
    bob = pool.user("bob")
    mine, theirs = joined(pool, "mine", pool.ann, "G1"), joined(pool, "theirs", bob, "G0", "G1")
    bind(pool, mine, pool.ann, "G1")
    bind(pool, theirs, bob, "G0", "G1")
    first, second, third, fourth = pool.submit(4)
    assert pool.grant(theirs, [first], number=0, slices=(Slice(1, 1, 500),)).lines == ()
    assert pool.view(first).row.status is TaskStatus.QUEUED
    assert len(pool.grant(theirs, [second], number=0, slices=(Slice(0, 1, 500),)).lines) == 1
    assert len(pool.grant(mine, [third], number=0, slices=(Slice(0, 1, 500),)).lines) == 1
    assert len(pool.grant(theirs, [fourth], number=2).lines) == 1  # its processors are still fine
    pool.write(gpu_bindings.unflag(gpu_on(pool, theirs, 1), pool.now()))
    assert len(pool.grant(theirs, [first], number=1, slices=(Slice(1, 1, 500),)).lines) == 1


def test_a_flag_outlives_a_hello(pool: Pool) -> None:
    bob = pool.user("bob")
    mine, theirs = joined(pool, "mine", pool.ann, "G1"), joined(pool, "theirs", bob, "G1")
    bind(pool, mine, pool.ann, "G1")
    bind(pool, theirs, bob, "G1")
    offer = pool.read(nodes.node(theirs)).node.offer
    pool.write(nodes.greet(theirs, offer, [next(pool.numbers)], pool.now()))
    assert withheld(pool, theirs) == {0}
    pool.write(nodes.set_gpu_available(gpu_on(pool, theirs), bob, True))
    assert withheld(pool, theirs) == {0}


def test_a_holder_s_flag_from_before_stays_until_an_operator_settles_it(pool: Pool) -> None:
    """Earlier versions flagged the holder's row too; reconnecting neither clears nor repeats it."""
    mine = joined(pool, "mine", pool.ann, "G1")
    bind(pool, mine, pool.ann, "G1")
    pool.write(_flag_as_before(mine))
    assert bind(pool, mine, pool.ann, "G1") == ()
    assert withheld(pool, mine) == {0}
    pool.write(gpu_bindings.unflag(gpu_on(pool, mine), pool.now()))
    assert withheld(pool, mine) == set()


@operation
def _flag_as_before(node: NodeId) -> Operation[None]:
    yield Statement("UPDATE gpus SET flagged = 'two owners' WHERE node_id = :node", {"node": node})


def test_an_operator_settles_whose_it_is_and_a_later_claim_harms_only_the_claimant(
    pool: Pool,
) -> None:
    bob = pool.account("bob", wallet="0xbb")
    mine, theirs = joined(pool, "mine", pool.ann, "G1"), joined(pool, "theirs", bob, "G1")
    bind(pool, mine, pool.ann, "G1", wallet="0xaa")
    bind(pool, theirs, bob, "G1", wallet="0xbb")
    at = pool.now()
    row = pool.write(gpu_bindings.unflag(gpu_on(pool, theirs), at))
    assert (row.node, row.flagged) == (theirs, None)
    assert pool.read(gpu_bindings.binding("G1")) == Binding("G1", bob, "0xbb", at, at)
    assert [withheld(pool, node) for node in (mine, theirs)] == [{0}, set()]
    assert bind(pool, mine, pool.ann, "G1", wallet="0xaa") == ("G1",)
    assert [withheld(pool, node) for node in (mine, theirs)] == [{0}, set()]
    assert bind(pool, theirs, bob, "G1", wallet="0xbc") == ()
    assert pool.read(gpu_bindings.binding("G1")).wallet == "0xbc"
    pool.write(gpu_bindings.unflag(gpu_on(pool, mine), pool.now()))
    assert [withheld(pool, node) for node in (mine, theirs)] == [set(), {0}]
    assert pool.read(gpu_bindings.binding("G1")).owner == pool.ann
    assert pool.write(gpu_bindings.unflag(GpuId(1), at)) is None


def test_of_owners_who_claim_a_uuid_at_once_one_keeps_it_and_the_others_are_flagged(
    pool: Pool, database: Database
) -> None:
    owners = [pool.user(f"u{i}") for i in range(6)]

    @operation
    def join(number: int, owner: UserId) -> Operation[tuple[str, ...]]:
        node = NodeId(number)
        gpu = Gpu(0, "G1", "H100", "nvidia", 1)
        offer = replace(OFFER, gpus=(gpu,))
        yield from nodes.create_node(
            node, "box", owner, None, f"s{number}", offer, [number + 100], Instant(1)
        )
        return (yield from gpu_bindings.bind(node, owner, None, ["G1"], Instant(1)))

    answers = race(database, [join(i + 1, owner) for i, owner in enumerate(owners)])
    assert sorted(answers) == [()] + [("G1",)] * 5
    rows = pool.read(gpu_bindings.gpu_rows())
    assert len(rows) == 6
    holder = pool.read(gpu_bindings.binding("G1")).owner
    assert [row.owner for row in rows if row.flagged is None] == [holder]
    assert pool.read(gpu_bindings.gpu_rows(owners[0]))[0].owner == owners[0]


# ---- nodes' keys


def test_a_node_is_found_by_the_key_it_joined_with(pool: Pool) -> None:
    made = nodes.create_node(
        NodeId(5), "box", pool.ann, None, "", OFFER, (), pool.now(), public_key="k5"
    )
    who = pool.write(made)
    assert who.public_key == "k5"
    assert pool.read(nodes.node_by_key("k5")) == pool.read(nodes.credentials_of(NodeId(5))) == who
    assert pool.read(nodes.node_by_key("k6")) is None
    assert pool.read(nodes.credentials_of(NodeId(6))) is None
    old = pool.node("old")
    assert pool.read(nodes.credentials_of(old)).public_key is None
    with pytest.raises(Invalid, match="key or a secret"):
        pool.write(nodes.create_node(NodeId(7), "x", pool.ann, None, "", OFFER, (), pool.now()))


def test_a_key_is_one_nodes_only(pool: Pool, database: Database) -> None:
    def join(number: int) -> Operation:
        return nodes.create_node(
            NodeId(number), f"n{number}", pool.ann, None, "", OFFER, (), Instant(1), "key"
        )

    answers = race(database, [join(number) for number in range(1, 9)])
    assert sum(isinstance(answer, Conflict) for answer in answers) == 7
    assert len(pool.read(nodes.nodes())) == 1


def test_a_join_link_works_once_whoever_comes_at_once(pool: Pool, database: Database) -> None:
    at = pool.now()
    pool.write(nodes.create_invite("invite", pool.ann, Instant(at + 10), at))
    made = [
        nodes.create_node(NodeId(i), f"n{i}", None, "invite", "", OFFER, (), at, f"k{i}")
        for i in range(1, 9)
    ]
    answers = race(database, made)
    assert sum(not isinstance(answer, Exception) for answer in answers) == 1
    assert pool.read(accounts.account(pool.ann)) is not None


def test_a_sick_gpu_stays_in_quarantine_until_somebody_says_it_is_well(pool: Pool) -> None:
    box = joined(pool, "box", pool.ann, "G1", "G2")
    well = pool.read(nodes.node(box)).node.offer
    ills = (replace(well.gpus[0], health=Health.QUARANTINED, ails="XID 79"), well.gpus[1])
    ids = [next(pool.numbers) for _ in ills]
    pool.write(nodes.greet(box, replace(well, gpus=ills), ids, pool.now()))
    assert withheld(pool, box) == {0}
    worse = (replace(ills[0], ails="XID 95"), ills[1])
    pool.write(nodes.greet(box, replace(well, gpus=worse), ids, pool.now()))
    sick = gpu_on(pool, box)
    assert pool.read(gpu_bindings.gpu(sick)).quarantined == "XID 79"
    pool.write(nodes.greet(box, well, ids, pool.now()))
    assert withheld(pool, box) == {0}
    assert pool.write(gpu_bindings.quarantine(sick, None)).quarantined is None
    assert withheld(pool, box) == set()
    assert pool.write(gpu_bindings.quarantine(GpuId(1), "by hand")) is None


# ---- claims that are gone


def remove(pool: Pool, node: NodeId) -> tuple[str, ...]:
    uuids = pool.read(gpu_bindings.uuids_of(node))
    pool.write(nodes.remove_node(node, None))
    return pool.write(gpu_bindings.lapse(uuids, pool.now(), everyone(pool)))


def everyone(pool: Pool, *, proof: bool = False) -> gpu_bindings.Claimants:
    connected = frozenset(row.node.id for row in pool.read(nodes.nodes()))
    return gpu_bindings.Claimants(connected, proof)


def test_a_flag_lapses_for_the_earliest_claimant_when_the_holder_is_gone(pool: Pool) -> None:
    bob, eve = pool.account("bob", wallet="0xbb"), pool.user("eve")
    mine, spare = joined(pool, "mine", pool.ann, "G1", "G2"), joined(pool, "spare", pool.ann, "G1")
    theirs, hers = joined(pool, "theirs", bob, "G1"), joined(pool, "hers", eve, "G1")
    bind(pool, mine, pool.ann, "G1", "G2")
    bind(pool, spare, pool.ann, "G1")
    for node, owner in ((theirs, bob), (hers, eve)):
        assert bind(pool, node, owner, "G1") == ("G1",)
    assert remove(pool, mine) == (), "another node of the holder still has it"
    assert [withheld(pool, node) for node in (theirs, hers)] == [{0}, {0}]
    assert pool.read(gpu_bindings.binding("G2")) is None
    assert remove(pool, spare) == ("G1",)
    assert [withheld(pool, node) for node in (theirs, hers)] == [set(), {0}]
    bound = pool.read(gpu_bindings.binding("G1"))
    assert (bound.owner, bound.wallet) == (bob, "0xbb")


def judged(pool: Pool, node: NodeId, *uuids: str) -> None:
    for uuid in uuids:
        pool.write(gpu_bindings.judge(node, uuid, GpuVerdict.PASSED, pool.now()))


def proving(pool: Pool, node: NodeId, owner: UserId, *uuids: str) -> tuple[str, ...]:
    return pool.write(gpu_bindings.bind(node, owner, None, uuids, pool.now(), proof=True))


def test_where_gpus_are_verified_a_name_binds_nothing_and_a_verdict_does(pool: Pool) -> None:
    bob = pool.account("bob", wallet="0xbb")
    mine, theirs = joined(pool, "mine", pool.ann, "G1"), joined(pool, "theirs", bob, "G1")
    assert proving(pool, mine, pool.ann, "G1") == ()
    assert pool.read(gpu_bindings.binding("G1")) is None
    judged(pool, theirs, "G1")
    bound = pool.read(gpu_bindings.binding("G1"))
    assert (bound.owner, bound.wallet) == (bob, "0xbb")
    assert proving(pool, mine, pool.ann, "G1") == ("G1",)
    judged(pool, mine, "G1")  # an equal card under the same name
    assert [withheld(pool, node) for node in (mine, theirs)] == [{0}, set()]
    assert pool.read(gpu_bindings.binding("G1")).owner == bob


def test_a_binding_lapses_to_claimants_who_are_connected_and_proved(pool: Pool) -> None:
    bob, eve = pool.user("bob"), pool.user("eve")
    mine = joined(pool, "mine", pool.ann, "G1")
    theirs, hers = joined(pool, "theirs", bob, "G1"), joined(pool, "hers", eve, "G1")
    judged(pool, mine, "G1")
    for node, owner in ((theirs, bob), (hers, eve)):
        assert proving(pool, node, owner, "G1") == ("G1",)
    judged(pool, hers, "G1")
    pool.write(nodes.remove_node(mine, None))
    away = gpu_bindings.Claimants(frozenset({theirs}), proof=True)
    assert pool.write(gpu_bindings.lapse(["G1"], pool.now(), away)) == ("G1",)
    assert pool.read(gpu_bindings.binding("G1")) is None, "nobody who may bind is connected"
    assert [withheld(pool, node) for node in (theirs, hers)] == [set(), set()]
    assert proving(pool, theirs, bob, "G1") == ()
    assert proving(pool, hers, eve, "G1") == ()
    assert pool.read(gpu_bindings.binding("G1")).owner == eve


def test_of_claimants_at_once_on_two_servers_the_one_that_proved_binds(
    pool: Pool, database: Database
) -> None:
    owners = [pool.user(f"u{i}") for i in range(6)]
    box = [joined(pool, "box", owner, "G1") for owner in owners]

    @operation
    def claim(node: NodeId, owner: UserId) -> Operation[tuple[str, ...]]:
        return (yield from gpu_bindings.bind(node, owner, None, ["G1"], Instant(1), proof=True))

    claims = [claim(node, owner) for node, owner in zip(box, owners, strict=True)]
    race(database, [*claims, gpu_bindings.judge(box[3], "G1", GpuVerdict.PASSED, Instant(1))])
    assert pool.read(gpu_bindings.binding("G1")).owner == owners[3]
    rows = {row.node: row for row in pool.read(gpu_bindings.gpu_rows())}
    assert rows[box[3]].flagged is None


def test_a_simulated_gpu_is_admitted_without_binding_its_name(pool: Pool) -> None:
    bob = pool.user("bob")
    mine, theirs = joined(pool, "mine", pool.ann, "SIM-1"), joined(pool, "theirs", bob, "SIM-1")
    for node in (mine, theirs):
        pool.write(gpu_bindings.judge(node, "SIM-1", GpuVerdict.SIMULATED, pool.now()))
    assert pool.read(nodes.node(mine)).node.gpus_unproven == {0}
    assert pool.write(gpu_bindings.unflag(gpu_on(pool, mine), pool.now())).unproven is None
    assert pool.read(gpu_bindings.binding("SIM-1")) is None
    found = [pool.read(nodes.node(node)).node for node in (mine, theirs)]
    assert [node.gpus_unproven for node in found] == [set(), {0}]
    assert [node.gpus_withheld for node in found] == [set(), set()]


def test_an_abandoned_binding_is_taken_over_by_the_next_claim(pool: Pool) -> None:
    bob = pool.user("bob")
    mine, theirs = joined(pool, "mine", pool.ann, "G1"), joined(pool, "theirs", bob, "G1")
    bind(pool, mine, pool.ann, "G1")
    assert bind(pool, theirs, bob, "G1") == ("G1",)
    pool.write(nodes.remove_node(mine, None))  # as by an earlier version
    assert bind(pool, theirs, bob, "G1") == ()
    assert withheld(pool, theirs) == set()


def test_an_operator_s_decision_outlives_the_nodes(pool: Pool) -> None:
    bob = pool.user("bob")
    mine, theirs = joined(pool, "mine", pool.ann, "G1"), joined(pool, "theirs", bob, "G1")
    bind(pool, mine, pool.ann, "G1")
    pool.write(gpu_bindings.unflag(gpu_on(pool, mine), pool.now()))
    bind(pool, theirs, bob, "G1")
    assert remove(pool, mine) == ()
    assert withheld(pool, theirs) == {0}


def test_a_disabled_holder_gives_up_its_claim_and_a_disabled_claimant_gets_none(pool: Pool) -> None:
    bob, eve = pool.user("bob"), pool.user("eve")
    holder = joined(pool, "mine", pool.ann, "G1")
    theirs, hers = joined(pool, "theirs", bob, "G1"), joined(pool, "hers", eve, "G1")
    for node, owner in ((holder, pool.ann), (theirs, bob), (hers, eve)):
        bind(pool, node, owner, "G1")
    for user in (bob, pool.ann):
        pool.write(accounts.set_disabled(user, True, pool.now()))
    assert pool.write(gpu_bindings.lapse(["G1"], pool.now(), everyone(pool))) == ("G1",)
    assert pool.read(gpu_bindings.binding("G1")).owner == eve
    assert [withheld(pool, node) for node in (theirs, hers)] == [{0}, set()]


def test_gpus_that_left_the_offer_soon_are_forgotten_with_their_bindings(pool: Pool) -> None:
    box, twin = (
        joined(pool, "box", pool.ann, "G1", "G2", "G3"),
        joined(pool, "twin", pool.ann, "G3"),
    )
    bind(pool, box, pool.ann, "G1", "G2", "G3")
    pool.write(nodes.set_gpu_available(gpu_on(pool, box, 1), None, False))
    gpu = Gpu(0, "G4", "H100", "nvidia", 80 << 30)
    pool.write(nodes.greet(box, replace(OFFER, gpus=(gpu,)), [next(pool.numbers)], pool.now()))
    assert pool.read(gpu_bindings.binding("G1")) is None
    assert pool.read(gpu_bindings.binding("G2")) is not None  # withdrawn: remembered
    assert pool.read(gpu_bindings.binding("G3")) is not None  # on another node of the owner
    assert {row.uuid for row in pool.read(gpu_bindings.gpu_rows())} == {"G3", "G4"}
    assert pool.read(gpu_bindings.gpu(gpu_on(pool, twin))) is not None


def test_an_owner_has_so_many_nodes_and_gpus(pool: Pool) -> None:
    bob = pool.user("bob")
    joined(pool, "one", bob, "G1", "G2")
    offer = replace(OFFER, gpus=(Gpu(0, "G3", "H100", "nvidia", 80 << 30),))

    def join(quota: OwnerQuota) -> None:
        node, ids = NodeId(next(pool.numbers)), [next(pool.numbers)]
        pool.write(
            nodes.create_node(
                node, f"n{node}", bob, None, f"s{node}", offer, ids, pool.now(), quota=quota
            )
        )

    with pytest.raises(Forbidden, match="1 of 1 nodes"):
        join(OwnerQuota(nodes=1))
    with pytest.raises(Forbidden, match="2 of 2 GPUs; 1 more"):
        join(OwnerQuota(gpus=2))
    join(OwnerQuota(nodes=2, gpus=3))
