"""The loops over GPUs read a bounded number of rows in a round, however many nodes there are, and all rows in turn."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from gpool.core.ids import NodeId
from gpool.server.nodes.gpu_verifier import MAX_NODES, GpuVerifier, VerificationSettings
from gpool.server.nodes.reliability import READ_ROUNDS, UpdateReliability
from gpool.server.store.operations.gpus import GpuVerificationRecord
from gpool.server.store.protocol import Store
from tests.server.gpu_proofs.test_trials import NEVER, TERMS, with_gpu
from tests.server.server_desk import Desk

pytestmark = pytest.mark.anyio
NODES = MAX_NODES + 12


class CountingStore:
    """The real store; it notes the nodes of the GPU rows that each read returned."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.reads: list[set[NodeId]] = []

    async def read(self, operation: Any) -> Any:
        found = await self._store.read(operation)
        if isinstance(found, tuple) and found and isinstance(found[0], GpuVerificationRecord):
            self.reads.append({each.node for each in found})
        return found

    async def write(self, operation: Any) -> Any:
        return await self._store.write(operation)


async def test_a_round_reads_a_page_of_nodes_and_every_node_gets_its_turn(desk: Desk) -> None:
    store: Any = CountingStore(desk.server.store)
    wanted = VerificationSettings(
        examine=True, measure=True, again_every=NEVER, terms=lambda *_: TERMS
    )
    picture, now = desk.server.picture, desk.clock.now
    verifier = GpuVerifier(store, picture, now, wanted, Random(1))
    desk.server = replace(desk.server, examiner=verifier)
    for number in range(NODES):
        desk.clock.advance(2)  # joins are rate limited
        await desk.agent(f"box-{number}", offer=with_gpu(f"GPU-{number}", simulated=True))
    everyone = set(picture.state.nodes)
    assert len(everyone) == NODES

    await verifier.run_once(now())  # reads all: they are new
    store.reads.clear()
    for _ in range(4):
        await verifier.run_once(desk.clock.advance(5))
    assert [len(each) for each in store.reads] == [12, MAX_NODES, 12, MAX_NODES]
    assert set.union(*store.reads[:2]) == everyone

    desk.clock.advance(2)
    late = await desk.agent("late", offer=with_gpu("GPU-late"))  # withheld: it waits for no page
    store.reads.clear()
    for _ in range(2):
        await verifier.run_once(desk.clock.advance(5))
        assert late.credentials.node in store.reads[-1]
        assert len(store.reads[-1]) <= MAX_NODES + 1

    reliability = UpdateReliability(replace(desk.server, store=store))
    store.reads.clear()
    await reliability.run_once(now())
    assert set.union(*store.reads) == {*everyone, late.credentials.node}
    store.reads.clear()
    for _ in range(READ_ROUNDS):
        await reliability.run_once(desk.clock.advance(60))
    share = -(-(NODES + 1) // READ_ROUNDS)
    assert max(len(each) for each in store.reads) == share
    assert set.union(*store.reads) == {*everyone, late.credentials.node}
