"""Trials of GPUs at a real server: kept back before, judged after, told why; those who could be one device sit together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from gpool.core.gpu_verification import GpuVerdict, MeasuredSpeed, Size, VerificationTerms, keys_of
from gpool.core.model import Gpu, Offer, Permission, Span
from gpool.server.app import make_app
from gpool.server.nodes.gpu_models import packaged_models
from gpool.server.nodes.gpu_verifier import (
    AGAIN_AFTER,
    TRIES,
    GpuVerifier,
    VerificationSettings,
    terms_of,
)
from gpool.wire.frames import (
    AnswerNow,
    ExamineGpu,
    FromGpu,
    GpuAnswered,
    GpuCommitted,
    GpuJudged,
    GpuMeasured,
    GpuOpened,
    GpuUnable,
    MeasureGpu,
    OpenTiles,
    decode_from_agent,
    encode,
)
from tests.server.server_desk import Agent, Desk, StoppedClock, an_offer, open_desk
from tests.tools.gpu_prover import NumpyProver

pytestmark = pytest.mark.anyio
SECOND = 1_000_000
TERMS = VerificationTerms(Size(1, 256, 64), 2, 8, Span(20 * SECOND), Span(SECOND // 2))
NEVER = Span(10**18)


@pytest.fixture
async def strict(data: Path) -> AsyncIterator[Desk]:
    """A server that examines before it schedules; its loops stand still."""
    desk = await open_desk(data, StoppedClock())
    server = desk.server
    wanted = VerificationSettings(
        examine=True, measure=False, again_every=NEVER, terms=lambda *_: TERMS
    )
    examiner = GpuVerifier(server.store, server.picture, desk.clock.now, wanted, Random(1))
    desk.server = replace(server, examiner=examiner)
    desk.app = make_app(desk.server)
    async with desk.http:
        yield desk
    await server.store.close()


def with_gpu(uuid: str = "GPU-a", *, simulated: bool = False) -> Offer:
    gpu = Gpu(0, uuid, "NVIDIA H200", "nvidia", 141 << 30, simulated)
    return replace(an_offer(), gpus=(gpu,), hostname=f"host of {uuid}")


async def tick(desk: Desk, seconds: float = 0) -> None:
    assert desk.server.examiner is not None
    await desk.server.examiner.run_once(desk.clock.advance(seconds))


async def say(agent: Agent, frame: FromGpu) -> None:
    """Through the wire's form and back."""
    await agent.channel.receive(decode_from_agent(encode(frame)))


def last(agent: Agent, kind: type) -> object:
    return agent.frames(kind)[-1]


def prover_for(agent: Agent) -> tuple[int, NumpyProver]:
    asked = last(agent, ExamineGpu)
    assert isinstance(asked, ExamineGpu)
    keys = keys_of(asked.seed, asked.node, asked.uuid, asked.trial)
    return asked.trial, NumpyProver(asked.size, keys)


async def answer(agent: Agent, trial: int, prover: NumpyProver, root: bytes) -> None:
    asked = last(agent, AnswerNow)
    assert isinstance(asked, AnswerNow)
    await say(agent, GpuAnswered(trial, prover.answer(asked.nonce, root, TERMS.rounds)))


async def open_tiles(agent: Agent, trial: int, prover: NumpyProver) -> None:
    asked = last(agent, OpenTiles)
    assert isinstance(asked, OpenTiles)
    await say(agent, GpuOpened(trial, prover.open(asked.tiles)))


async def prove(agent: Agent) -> None:
    """Honestly, to the end."""
    trial, prover = prover_for(agent)
    root = prover.commit()
    await say(agent, GpuCommitted(trial, root))
    await answer(agent, trial, prover, root)
    await open_tiles(agent, trial, prover)


def verdict(agent: Agent) -> GpuVerdict:
    judged = last(agent, GpuJudged)
    assert isinstance(judged, GpuJudged)
    return judged.verdict


async def flag(desk: Desk) -> str | None:
    items = (await desk.get("/v1/resources")).json()["items"]
    found: str | None = next(each["flagged"] for each in items if each["kind"] == "gpu")
    return found


async def test_a_gpu_gets_a_task_only_once_it_has_proved_what_it_claims(strict: Desk) -> None:
    agent = await strict.agent(offer=with_gpu())
    await strict.command(gpu="1")
    await strict.schedule()
    assert agent.leases() == []
    assert "not proved yet" in str(await flag(strict))
    await tick(strict)
    await prove(agent)
    assert verdict(agent) is GpuVerdict.PASSED
    assert await flag(strict) is None
    await strict.schedule()
    assert len(agent.leases()) == 1


async def test_it_is_not_examined_again_when_it_connects_again(strict: Desk) -> None:
    agent = await strict.agent(offer=with_gpu())
    await tick(strict)
    await prove(agent)
    again = agent.again()
    await again.connect()
    await tick(strict, 100)
    assert again.frames(ExamineGpu) == []
    assert await flag(strict) is None


async def test_one_that_answers_wrong_is_kept_out_and_told_why_until_it_joins_again(
    strict: Desk,
) -> None:
    agent = await strict.agent(offer=with_gpu())
    await tick(strict)
    trial, prover = prover_for(agent)
    prover.words[:] = 0
    root = prover.commit()
    await say(agent, GpuCommitted(trial, root))
    await answer(agent, trial, prover, root)
    await open_tiles(agent, trial, prover)
    assert verdict(agent) is GpuVerdict.WRONG_COMMIT
    assert GpuVerdict.WRONG_COMMIT.text in str(await flag(strict))
    await strict.command(gpu="1")
    await strict.schedule()
    assert agent.leases() == []
    await tick(strict, 60)
    assert len(agent.frames(ExamineGpu)) == 1
    strict.clock.advance(AGAIN_AFTER / SECOND)
    again = agent.again()
    await again.connect()
    await tick(strict, 10)
    await prove(again)
    assert await flag(strict) is None


async def test_an_operator_may_let_it_in_all_the_same(strict: Desk) -> None:
    agent = await strict.agent(offer=with_gpu())
    await tick(strict)
    trial, _ = prover_for(agent)
    await say(agent, GpuUnable(trial, "GPU-a", "out of memory"))
    assert verdict(agent) is GpuVerdict.UNABLE
    gpu = next(
        each["id"]
        for each in (await strict.get("/v1/resources")).json()["items"]
        if each["kind"] == "gpu"
    )
    answered = await strict.http.patch(f"/v1/resources/{gpu}", json={"flagged": None})
    assert answered.status_code == 200, answered.text
    assert await flag(strict) is None


async def test_one_that_is_late_may_try_again_but_not_for_ever(strict: Desk) -> None:
    agent = await strict.agent(offer=with_gpu())
    for number in range(TRIES):
        await tick(strict, 6)
        assert len(agent.frames(ExamineGpu)) == number + 1
        trial, _ = prover_for(agent)
        strict.clock.advance(21)
        await say(agent, GpuCommitted(trial, b"r" * 32))
        assert verdict(agent) is GpuVerdict.LATE_COMMIT
    await tick(strict, 6)
    assert len(agent.frames(ExamineGpu)) == TRIES
    assert GpuVerdict.LATE_COMMIT.text in str(await flag(strict))


async def test_silence_is_lateness(strict: Desk) -> None:
    agent = await strict.agent(offer=with_gpu())
    await tick(strict)
    await tick(strict, 21)
    assert verdict(agent) is GpuVerdict.LATE_COMMIT


async def test_an_answer_half_a_second_late_does_not_count(strict: Desk) -> None:
    agent = await strict.agent(offer=with_gpu())
    await tick(strict)
    trial, prover = prover_for(agent)
    root = prover.commit()
    await say(agent, GpuCommitted(trial, root))
    strict.clock.advance(0.51)
    await answer(agent, trial, prover, root)
    assert verdict(agent) is GpuVerdict.LATE_ANSWER
    assert agent.frames(OpenTiles) == []


async def test_two_that_could_be_one_device_are_asked_only_when_both_have_committed(
    strict: Desk,
) -> None:
    one = await strict.agent("one", with_gpu("GPU-a"))
    two = await strict.agent("two", with_gpu("GPU-b"))
    await tick(strict)
    (trial, prover), (_, _) = prover_for(one), prover_for(two)
    root = prover.commit()
    await say(one, GpuCommitted(trial, root))
    assert one.frames(AnswerNow) == []  # it has to keep its results meanwhile
    await tick(strict, 19)
    assert one.frames(AnswerNow) == []
    await tick(strict, 2)  # the other is out of time
    assert verdict(two) is GpuVerdict.LATE_COMMIT
    await answer(one, trial, prover, root)
    await open_tiles(one, trial, prover)
    assert verdict(one) is GpuVerdict.PASSED


async def test_nobody_answers_for_another_node(strict: Desk) -> None:
    one = await strict.agent("one", with_gpu("GPU-a"))
    two = await strict.agent("two", with_gpu("GPU-b"))
    await tick(strict)
    trial, prover = prover_for(one)
    await say(two, GpuCommitted(trial, prover.commit()))
    await say(two, GpuUnable(trial, "GPU-a", "not mine to say"))
    assert one.frames(GpuJudged) == []
    await prove_both(one, two)
    assert (verdict(one), verdict(two)) == (GpuVerdict.PASSED, GpuVerdict.PASSED)


async def prove_both(*agents: Agent) -> None:
    found = [(agent, *prover_for(agent)) for agent in agents]
    roots = [prover.commit() for _, _, prover in found]
    for (agent, trial, _), root in zip(found, roots, strict=True):
        await say(agent, GpuCommitted(trial, root))
    for (agent, trial, prover), root in zip(found, roots, strict=True):
        await answer(agent, trial, prover, root)
        await open_tiles(agent, trial, prover)


async def test_frames_out_of_turn_or_out_of_nowhere_are_harmless(strict: Desk) -> None:
    agent = await strict.agent(offer=with_gpu())
    await say(agent, GpuCommitted(77, b"r" * 32))
    await say(agent, GpuMeasured("GPU-nobodys", MeasuredSpeed(1, 1, 1, 1, 1, 1)))
    await tick(strict)
    trial, prover = prover_for(agent)
    prover.commit()
    await say(agent, GpuOpened(trial, ()))
    assert verdict(agent) is GpuVerdict.MALFORMED


async def test_a_simulated_gpu_never_passes_and_serves_its_owner_only(strict: Desk) -> None:
    agent = await strict.agent(offer=with_gpu(simulated=True))
    await tick(strict)
    assert agent.frames(ExamineGpu) == []
    assert await flag(strict) is None
    [shown] = (await strict.get("/v1/resources?kind=gpu")).json()["items"]
    assert "simulated" in shown["unproven"]
    stranger = await strict.person("stranger", Permission.CONSUMER)
    task = await strict.command(gpu="1", headers=stranger)
    await strict.schedule()
    assert agent.leases() == []
    told = (await strict.get(f"/v1/tasks/{task}/explain", headers=stranger)).json()
    assert told["code"] == "unproven", told
    await strict.command(gpu="1")
    await strict.schedule()
    assert len(agent.leases()) == 1


async def test_what_a_gpu_measured_is_shown_with_it_and_its_trial_comes_after(strict: Desk) -> None:
    server = strict.server
    wanted = VerificationSettings(
        examine=True, measure=True, again_every=NEVER, terms=lambda *_: TERMS
    )
    examiner = GpuVerifier(server.store, server.picture, strict.clock.now, wanted, Random(1))
    strict.server = replace(server, examiner=examiner)
    agent = await strict.agent(offer=with_gpu())
    await tick(strict)
    await tick(strict, 10)
    assert agent.frames(ExamineGpu) == []  # it would slow the measurement down
    assert agent.frames(MeasureGpu) == [MeasureGpu("GPU-a")]
    await say(
        agent,
        GpuMeasured("GPU-a", MeasuredSpeed(40_000, 150_000, 300_000, 650_000, 10**12, 10**10)),
    )
    items = (await strict.get("/v1/resources")).json()["items"]
    shown = next(each["measured"] for each in items if each["kind"] == "gpu")
    assert shown["bf16_gigaflops"] == 300_000
    await tick(strict)
    assert len(agent.frames(MeasureGpu)) == len(agent.frames(ExamineGpu)) == 1


async def test_without_examining_nothing_is_kept_back(desk: Desk) -> None:
    agent = await desk.agent(offer=with_gpu())
    await desk.command(gpu="1")
    await desk.schedule()
    assert len(agent.leases()) == 1


def test_models_are_known_by_the_names_that_drivers_give() -> None:
    def terms(model: str, gib: int = 80, vendor: str = "nvidia") -> VerificationTerms | None:
        return terms_of(Gpu(0, "GPU-a", model, vendor, gib << 30), packaged_models())

    sxm, pcie = terms("NVIDIA H100 80GB HBM3"), terms("NVIDIA H100 PCIe")
    assert sxm is not None
    assert pcie is not None
    assert sxm.size.length > pcie.size.length
    assert terms("NVIDIA GeForce RTX 4090", 24) is not None
    assert terms("NVIDIA GeForce RTX 4090", 25) is None  # more memory than any of them has
    assert terms("Radeon RX 7900", 24, "amd") is None
    assert terms("NVIDIA NeverHeardOf") is None
