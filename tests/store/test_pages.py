"""Pages of nodes, of GPUs and of the queue: filtered and cut by the store, on every database."""

from __future__ import annotations

from dataclasses import replace

from gpool.core.ids import NodeId, TaskId
from gpool.core.model import Availability, Gpu, Offer
from gpool.server.store.operations import gpus as gpu_bindings
from gpool.server.store.operations import node_pages, nodes
from gpool.server.store.operations.node_pages import NodeFilter
from gpool.server.store.operations.tasks import tasks
from tests.store.store_pool import Pool

OFFER = Offer(1000, 1 << 30, 1 << 30, hostname="box")


def join(pool: Pool, number: int, name: str, model: str = "", **changes: object) -> None:
    gpus = (Gpu(0, f"GPU-{number}", model, "nvidia", 1 << 30),) if model else ()
    offer = replace(OFFER, gpus=gpus)
    owner, at = changes.get("owner", pool.ann), pool.now()
    ids = [100 + number for _ in gpus]
    pool.write(
        nodes.create_node(NodeId(number), name, owner, None, f"s{number}", offer, ids, at)  # type: ignore[arg-type]
    )


def names(pool: Pool, wanted: NodeFilter, after: int | None = None, limit: int = 10) -> list[str]:
    page = pool.read(
        node_pages.node_page(wanted, None if after is None else NodeId(after), limit)
    ).rows
    return [row.node.name for row in page]


def test_nodes_are_cut_into_pages_by_their_ids(pool: Pool) -> None:
    for number, name in enumerate(("a", "b", "c"), 51):
        join(pool, number, name)
    assert names(pool, NodeFilter(), 50, 2) == ["a", "b"]
    assert names(pool, NodeFilter(), 52, 2) == ["c"]
    assert names(pool, NodeFilter(), 53) == []


def test_nodes_are_filtered_by_owner_availability_and_id(pool: Pool) -> None:
    bob = pool.user("bob")
    join(pool, 51, "hers")
    join(pool, 52, "his", owner=bob)
    pool.write(nodes.set_availability(NodeId(52), None, Availability.PAUSED, pool.now()))
    assert names(pool, NodeFilter(owner=bob)) == ["his"]
    assert names(pool, NodeFilter(availability=Availability.PAUSED)) == ["his"]
    assert names(pool, NodeFilter(node=NodeId(51))) == ["hers"]


def test_nodes_are_searched_by_name_and_gpu_model_and_patterns_are_literal(pool: Pool) -> None:
    join(pool, 51, "Attic", "NVIDIA H100")
    join(pool, 52, "cellar_1", 'the "big" one')
    join(pool, 53, "cellarX1", "100%")
    assert names(pool, NodeFilter(search="attic")) == ["Attic"]
    assert names(pool, NodeFilter(search="h100")) == ["Attic"]
    assert names(pool, NodeFilter(search="cellar_")) == ["cellar_1"]
    assert names(pool, NodeFilter(search='"big"')) == ["cellar_1"]
    assert names(pool, NodeFilter(search="0%")) == ["cellarX1"]


def test_the_gpus_of_some_nodes_are_read_without_the_others(pool: Pool) -> None:
    for number in (51, 52, 53):
        join(pool, number, f"n{number}", "H100")
    found = pool.read(gpu_bindings.gpus_of_nodes([NodeId(53), NodeId(51)]))
    assert [(row.node, row.id, row.uuid) for row in found] == [
        (51, 151, "GPU-51"),
        (53, 153, "GPU-53"),
    ]
    assert pool.read(gpu_bindings.gpus_of_nodes([])) == ()


def test_the_queue_is_read_oldest_first_and_counted_up_to_a_limit(pool: Pool) -> None:
    ids = sorted(pool.submit(5))
    first = pool.read(tasks.queued_page(pool.ann, None, None, 3))
    assert [view.row.id for view in first] == ids[:3]
    rest = pool.read(tasks.queued_page(None, None, TaskId(ids[2]), 3))
    assert [view.row.id for view in rest] == ids[3:]
    assert pool.read(tasks.queued_count(pool.ann, None, 100)) == 5
    assert pool.read(tasks.queued_count(None, None, 3)) == 3
    assert pool.read(tasks.queued_count(pool.user("bob"), None, 100)) == 0
    assert pool.read(tasks.queued_page(pool.ann, 77, None, 3)) == ()
