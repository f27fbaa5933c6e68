"""What GPUs measured and proved: kept with the GPU, and what is unproven is not scheduled."""

from __future__ import annotations

from dataclasses import replace

from gpool.core.gpu_verification import GpuVerdict
from gpool.core.ids import NodeId
from gpool.core.model import Gpu, Offer
from gpool.server.store.operations import gpus as gpu_bindings
from gpool.server.store.operations import gpus as gpu_verification
from gpool.server.store.operations import nodes
from tests.store.store_pool import Pool

OFFER = Offer(1000, 1 << 30, 1 << 30)


def joined(pool: Pool, name: str, *uuids: str) -> NodeId:
    gpus = tuple(Gpu(i, uuid, "H100", "nvidia", 80 << 30) for i, uuid in enumerate(uuids))
    node, ids = NodeId(next(pool.numbers)), [next(pool.numbers) for _ in uuids]
    offer = replace(OFFER, gpus=gpus)
    pool.write(nodes.create_node(node, name, pool.ann, None, f"s{node}", offer, ids, pool.now()))
    return node


def kept_back(pool: Pool, node: NodeId) -> set[int]:
    here = pool.read(nodes.node(node)).node
    assert here.gpus_flagged <= here.gpus_withheld
    return set(here.gpus_flagged)


def test_a_gpu_is_kept_back_until_it_passes_and_again_when_it_fails(pool: Pool) -> None:
    box, other = joined(pool, "box", "G0", "G1"), joined(pool, "other", "G0")
    row = pool.write(gpu_verification.keep_back(box, ["G0", "G1"], "its trial comes"))
    assert row.node.gpus_flagged == {0, 1}
    at = pool.now()
    pool.write(gpu_verification.judge(box, "G1", GpuVerdict.PASSED, at))
    assert kept_back(pool, box) == {0}
    assert kept_back(pool, other) == set()  # another node's, whatever its uuid
    pool.write(gpu_verification.judge(box, "G1", GpuVerdict.WRONG_PRODUCT, at))
    assert kept_back(pool, box) == {0, 1}
    first, second = pool.read(gpu_verification.records([box]))
    assert (first.verdict, first.unproven) == (None, "its trial comes")
    assert (second.verdict, second.judged_at) == (GpuVerdict.WRONG_PRODUCT, at)
    assert "wrong results" in str(second.unproven)
    assert len(pool.read(gpu_verification.records([other, box]))) == 3
    assert pool.read(gpu_verification.records([])) == ()


def test_an_unproven_gpu_is_no_dispute_between_owners(pool: Pool) -> None:
    box = joined(pool, "box", "G0")
    pool.write(gpu_verification.judge(box, "G0", GpuVerdict.LATE_COMMIT, pool.now()))
    assert pool.write(gpu_bindings.bind(box, pool.ann, None, ["G0"], pool.now())) == ()
    (row,) = [each for each in pool.read(gpu_bindings.gpu_rows()) if each.node == box]
    assert row.flagged is None
    assert row.unproven is not None
    assert pool.write(gpu_bindings.unflag(row.id, pool.now())).unproven is None
    assert kept_back(pool, box) == set()


def test_what_was_measured_stays_with_the_gpu(pool: Pool) -> None:
    box = joined(pool, "box", "G0", "G1")
    pool.write(gpu_verification.note_measured(box, "G1", '{"fp32_gigaflops":1}'))
    offer = pool.read(nodes.node(box)).node.offer
    pool.write(nodes.greet(box, offer, [next(pool.numbers), next(pool.numbers)], pool.now()))
    assert [each.measured for each in pool.read(gpu_verification.records([box]))] == [
        None,
        '{"fp32_gigaflops":1}',
    ]
