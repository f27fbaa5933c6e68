"""How nodes fared: kept with the node, the newest word counts, and gone with it."""

from __future__ import annotations

from gpool.core.ids import NodeId
from gpool.core.model import Instant, Span
from gpool.core.reliability import ReliabilityRecord
from gpool.server.store.operations import node_pages, nodes
from tests.store.store_pool import Pool


def test_a_record_is_kept_and_an_older_one_never_replaces_it(pool: Pool) -> None:
    box, other = pool.node("box"), pool.node("other")
    first = {
        box: ReliabilityRecord(Span(5), 1000, Instant(10)),
        other: ReliabilityRecord(Span(7), 0, Instant(10)),
    }
    pool.write(node_pages.put_reliability_records(first))
    assert pool.read(node_pages.reliability_records()) == first
    pool.write(
        node_pages.put_reliability_records({box: ReliabilityRecord(Span(9), 2000, Instant(20))})
    )
    pool.write(
        node_pages.put_reliability_records({box: ReliabilityRecord(Span(1), 0, Instant(15))})
    )
    assert pool.read(node_pages.reliability_records())[box] == ReliabilityRecord(
        Span(9), 2000, Instant(20)
    )


def test_a_node_that_is_gone_leaves_no_record(pool: Pool) -> None:
    box = pool.node("box")
    pool.write(
        node_pages.put_reliability_records(
            {box: ReliabilityRecord(at=Instant(1)), NodeId(5): ReliabilityRecord()}
        )
    )
    assert set(pool.read(node_pages.reliability_records())) == {box}
    pool.write(nodes.remove_node(box, None))
    pool.write(node_pages.forget_reliability_records())
    assert pool.read(node_pages.reliability_records()) == {}
