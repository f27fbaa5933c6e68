"""An owner's word: counts of GPUs are bounded, unverified GPUs are marked, certified labels are an operator's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpool.core.gpu_verification import GpuVerdict
from gpool.core.model import Gpu
from gpool.server.store.operations import gpus as gpu_operations
from gpool.server.store.operations import rules as rule_operations
from gpool.wire.frames import Refused
from tests.server.actions.test_owners import BOTH, has, lend, submitted
from tests.server.server_desk import Desk, an_offer, exited

pytestmark = pytest.mark.anyio


def _gpus(count: int) -> tuple[Gpu, ...]:
    return tuple(Gpu(n, f"GPU-{n}", "NVIDIA H200", "nvidia", 141 << 30) for n in range(count))


async def test_a_node_offers_as_many_gpus_as_the_pool_allows_and_no_more(desk: Desk) -> None:
    eve = await desk.person("eve", *BOTH)
    honest = await lend(desk, eve, "honest", gpus=_gpus(64))
    assert not honest.frames(Refused)
    liar = await lend(desk, eve, "liar", gpus=_gpus(65))
    [refused] = liar.frames(Refused)
    assert refused.detail == "an offer of 65 GPUs; a node of this pool offers at most 64"
    listed = [{"index": n, "uuid": f"L-{n}", "model": "H200", "memory_bytes": 1} for n in range(65)]
    answer = await desk.post("/register_gpu", {"name": "many", "gpus": listed}, headers=eve)
    assert answer.status_code == 400
    answer = await desk.post("/register_gpu", {"name": "few", "gpus": listed[:64]}, headers=eve)
    assert answer.status_code == 201, answer.text


async def test_a_gpu_is_marked_until_it_has_passed_verification(desk: Desk) -> None:
    agent = await desk.agent(offer=replace(an_offer(), gpus=_gpus(2)))
    node = agent.credentials.node
    await desk.server.write(
        gpu_operations.judge(node, "GPU-1", GpuVerdict.PASSED, desk.clock.now())
    )
    items = (await desk.get("/v1/resources?kind=gpu")).json()["items"]
    assert [one["verified"] for one in items] == [False, True]


async def test_a_certified_label_is_an_operators_word_and_no_owners(desk: Desk) -> None:
    ada, eve = await desk.person("ada", *BOTH), await desk.person("eve", *BOTH)
    trap = await lend(desk, eve, "trap", labels=frozenset({"hipaa"}))
    sound = await lend(desk, ada, "sound")
    forger = await lend(desk, eve, "forger", labels=frozenset({"certified:hipaa"}))
    assert "not a label" in forger.frames(Refused)[0].detail
    task = await submitted(desk, ada, labels=["certified:hipaa"])
    assert await desk.schedule() == 0
    owners_word = await submitted(desk, ada, labels=["hipaa"])
    assert await desk.schedule() == 1
    assert has(trap, owners_word), "the control: an owner's label is believed where it is asked for"
    path = f"/v1/admin/certified/{sound.badge.identity.node}"
    wanted = {"labels": ["hipaa", "tier=vm"]}
    assert (await desk.http.put(path, json=wanted, headers=eve)).status_code == 403
    done = await desk.http.put(path, json=wanted)
    assert (done.status_code, done.json()["labels"]) == (200, ["hipaa", "tier=vm"])
    assert await desk.schedule() == 1
    assert has(sound, task)
    [shown] = [
        one for one in (await desk.get("/v1/nodes")).json()["items"] if one["name"] == "sound"
    ]
    assert shown["labels"] == ["certified:hipaa", "certified:tier=vm"]
    await sound.report(*(exited(lease) for lease in sound.leases()))
    assert (await desk.http.put(path, json={"labels": []})).status_code == 200
    await submitted(desk, ada, labels=["certified:hipaa"])
    assert await desk.schedule() == 0


async def test_the_rules_about_a_node_are_deleted_with_it(desk: Desk) -> None:
    removed, kept = [await desk.node(name) for name in ("removed", "kept")]
    for agent in (removed, kept):
        node = agent.badge.identity.node
        labels = await desk.http.put(f"/v1/admin/certified/{node}", json={"labels": ["hipaa"]})
        assert labels.status_code == 200, labels.text
        cordon = await desk.http.put(f"/v1/admin/cordons/{node}", json={"why": "disks"})
        assert cordon.status_code == 200, cordon.text
    await desk.http.delete(f"/v1/nodes/{removed.badge.identity.node}")
    stored = await desk.server.store.read(rule_operations.rules())
    assert list(stored.certified) == list(stored.cordons) == [kept.credentials.node]
