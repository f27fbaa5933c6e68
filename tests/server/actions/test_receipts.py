"""From a signed end to the payout: receipts, vesting, forfeits, statements, rewards and closed periods on a real server."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpool.core.ids import NodeId, decode, encode
from gpool.core.model import Instant, Permission
from gpool.server.receipts.loops import GRACE, IssueReceipts, VestEarnings
from gpool.server.store.operations.money import receipts, vesting
from gpool.server.store.protocol import Operation, operation
from gpool.transfer.node_proofs import NodeKey
from gpool.wallet import canonical_json, payouts
from gpool.wallet.errors import BadReceipt
from gpool.wallet.receipt_keys import (
    NO_RESULT,
    KeyHistory,
    ReceiptGpu,
    ReceiptWork,
    opaque_gpu_id,
    parse_history,
    sign_works,
)
from gpool.wallet.receipts import receipts_root, verified
from gpool.wire.frames import Finished, Grants, Lease, SignedGpu, WorkSignature
from tests.server.actions.test_charging import PRICE, Headers, charged, give, person, started
from tests.server.actions.test_market import lent
from tests.server.server_desk import Agent, Desk, StoppedClock, exited, open_desk

pytestmark = pytest.mark.anyio

AMOUNT, FEE = 10_000, 1_000
DAY = 86_400


@pytest.fixture
async def desk(data: Path) -> AsyncIterator[Desk]:
    made = await open_desk(data, StoppedClock(), prices=True, fee_ppm=100_000, vest_hours=96)
    async with made.http:
        yield made
    await made.server.store.close()


def work_of(desk: Desk, agent: Agent, lease: Lease) -> ReceiptWork:
    [line] = [
        line for frame in agent.frames(Grants) for line in frame.lines if lease in line.leases
    ]
    assert line.receipts == desk.server.identity.receipts.pool
    gpus = tuple(
        ReceiptGpu(opaque_gpu_id(gpu.uuid), gpu.model, "exclusive") for gpu in agent.offer.gpus[:1]
    )
    node = encode("node", agent.credentials.node)
    task = encode("task", lease.task)
    return ReceiptWork(line.receipts, task, lease.epoch, node, gpus, NO_RESULT)


def signed(desk: Desk, agent: Agent, lease: Lease, key: NodeKey | None = None) -> Finished:
    """The end of a lease, signed as an agent does."""
    work = work_of(desk, agent, lease)
    own = key or NodeKey(hashlib.sha256(b"n1").digest())
    named = tuple(SignedGpu(each.gpu, each.model, each.slice) for each in work.gpus)
    proof = WorkSignature(own.sign_work(work.message()), named)
    return msgspec.structs.replace(exited(lease), work=proof)


async def paid_task(
    desk: Desk, bob: Headers, agent: Agent, *, key: NodeKey | None = None, is_signed: bool = True
) -> str:
    """A task that ran for ten seconds and whose charge is posted."""
    task = await desk.command(bob, gpu="1")
    lease = await started(desk, agent)
    desk.clock.advance(10)
    report = signed(desk, agent, lease, key) if is_signed else exited(lease)
    await agent.report(report)
    await charged(desk)
    return task


async def opened(desk: Desk) -> tuple[Headers, Agent]:
    bob, id_ = await person(desk)
    agent = await desk.agent("n1", lent(PRICE))
    await give(desk, id_, 10_000_000)
    return bob, agent


async def looped(desk: Desk) -> None:
    await IssueReceipts(desk.server).run_once(desk.server.now)
    await VestEarnings(desk.server).run_once(desk.server.now)


async def history(desk: Desk) -> KeyHistory:
    return parse_history(canonical_json.encode((await desk.get("/v1/receipt-keys")).json()))


async def receipts_of(desk: Desk, who: Headers | None, query: str = "") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await desk.get(f"/v1/receipts{query}", headers=who)).json()[
        "items"
    ]
    return found


async def is_sound(desk: Desk) -> bool:
    found = (await desk.get("/v1/admin/ledger/check")).json()
    assert found["findings"] == []
    return bool(found["sound"])


async def test_a_receipt_is_issued_with_the_first_key_and_outlives_key_and_node(desk: Desk) -> None:
    bob, agent = await opened(desk)
    task = await paid_task(desk, bob, agent)
    await looped(desk)
    [mine] = await receipts_of(desk, bob)
    assert (mine["side"], mine["task"], mine["amount_microcredits"]) == ("paid", task, AMOUNT)
    [owned] = await receipts_of(desk, None, f"?task={task}")
    assert (owned["id"], owned["side"]) == (mine["id"], "earned")
    assert await receipts_of(desk, bob, "?month=2001-01") == []
    data = (await desk.get(f"/v1/receipts/{mine['id']}", headers=bob)).content
    await desk.post("/v1/admin/receipt-keys/rotate", {})
    assert (await desk.http.delete(f"/v1/nodes/{mine['node']}")).status_code < 300
    receipt = verified(data, await history(desk))
    assert (receipt.charge.amount, receipt.charge.fee) == (AMOUNT, FEE)
    assert receipt.charge.charged_ms == 10_000
    eve = await desk.person("eve", Permission.CONSUMER)
    assert (await desk.get(f"/v1/receipts/{mine['id']}", headers=eve)).status_code == 404
    assert await receipts_of(desk, eve) == []


async def test_every_altered_byte_of_an_issued_receipt_is_found(desk: Desk) -> None:
    bob, agent = await opened(desk)
    await paid_task(desk, bob, agent)
    await looped(desk)
    [mine] = await receipts_of(desk, bob)
    data = (await desk.get(f"/v1/receipts/{mine['id']}", headers=bob)).content
    keys = await history(desk)
    verified(data, keys)
    for place in range(len(data)):
        altered = bytearray(data)
        altered[place] ^= 1
        with pytest.raises(BadReceipt):
            verified(bytes(altered), keys)


@pytest.mark.parametrize("kind", ["none", "wrong"])
async def test_work_without_its_nodes_signature_earns_nothing_and_returns(
    desk: Desk, kind: str
) -> None:
    bob, agent = await opened(desk)
    before = (await desk.get("/v1/ledger", headers=bob)).json()["balance_microcredits"]
    other = NodeKey(b"\1" * 32)
    await paid_task(desk, bob, agent, key=other, is_signed=kind == "wrong")
    await looped(desk)
    assert await receipts_of(desk, bob) == []
    desk.clock.advance(GRACE / 1_000_000 + 60)
    await looped(desk)
    after = (await desk.get("/v1/ledger", headers=bob)).json()["balance_microcredits"]
    assert after == before
    desk.clock.advance(10 * DAY)
    await looped(desk)
    found = (await desk.get("/v1/earnings")).json()
    assert (found["unvested_microcredits"], found["vested_microcredits"]) == (0, 0)
    assert await is_sound(desk)


async def test_earnings_vest_after_the_window_and_are_paid_in_a_closed_period(desk: Desk) -> None:
    bob, agent = await opened(desk)
    await paid_task(desk, bob, agent)
    await looped(desk)
    share = AMOUNT - FEE
    found = (await desk.get("/v1/earnings")).json()
    assert (found["unvested_microcredits"], found["vested_microcredits"]) == (share, 0)
    assert [(one["state"], one["microcredits"]) for one in found["items"]] == [("posted", share)]
    desk.clock.advance(96 * 3600 + 1)
    await looped(desk)
    found = (await desk.get("/v1/earnings")).json()
    assert (found["unvested_microcredits"], found["vested_microcredits"]) == (0, share)
    assert await is_sound(desk)
    month = found["items"][0]["month"]
    page = (await desk.get("/nodes", headers={"accept": "text/html"})).text
    assert f"<td>{month}</td>" in page
    assert "paid with the next period</dt><dd>0.01 cr" in page
    wanted = {"month": month}
    assert (await desk.post("/v1/admin/payouts", wanted)).status_code == 409  # it is not over
    desk.clock.advance(40 * DAY)
    tried = (await desk.post("/v1/admin/payouts", {**wanted, "dry_run": True})).json()
    done = (await desk.post("/v1/admin/payouts", wanted)).json()
    assert done == tried
    file = payouts.parse(done["file"].encode())
    assert file.total_due == str(share)
    [mine] = await receipts_of(desk, bob)
    data = (await desk.get(f"/v1/receipts/{mine['id']}", headers=bob)).content
    assert file.receipts_root == "0x" + receipts_root([data]).hex()
    [period] = (await desk.get("/v1/payouts")).json()["items"]
    assert (period["own_microcredits"], period["month"]) == (share, month)
    assert (await desk.get("/v1/payouts/1")).content == done["file"].encode()
    assert (await desk.get("/v1/payouts/2")).status_code == 404
    assert (await desk.get("/v1/earnings")).json()["paid_microcredits"] == share
    assert (await desk.post("/v1/admin/payouts", wanted)).status_code == 409
    assert await is_sound(desk)


@operation
def caught(node: NodeId, at: Any) -> Operation[vesting.Forfeited]:
    return (yield from vesting.forfeit(node, at))


async def test_a_caught_nodes_unvested_charges_return_to_their_payers(desk: Desk) -> None:
    bob, agent = await opened(desk)
    before = (await desk.get("/v1/ledger", headers=bob)).json()["balance_microcredits"]
    first = await paid_task(desk, bob, agent)
    await looped(desk)
    desk.clock.advance(97 * 3600)
    await looped(desk)  # the first one has vested
    agent = agent.again()
    await agent.connect()
    second = await paid_task(desk, bob, agent)
    await looped(desk)
    done = await desk.server.write(caught(agent.credentials.node, desk.server.now))
    assert [encode("task", task) for task, _ in done.leases] == [second]
    assert done.microcredits == AMOUNT
    after = (await desk.get("/v1/ledger", headers=bob)).json()["balance_microcredits"]
    assert after == before - AMOUNT  # of the first task
    states = {one["task"]: one["state"] for one in await usage_of(desk, bob)}
    assert states == {first: "vested", second: "forfeited"}
    again = await desk.server.write(caught(agent.credentials.node, desk.server.now))
    assert again.leases == ()
    assert await is_sound(desk)


async def usage_of(desk: Desk, who: Headers | None, query: str = "") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    months = (await desk.get("/v1/earnings?months=24")).json()["items"]
    for month in sorted({one["month"] for one in months}):
        page = (await desk.get(f"/v1/usage?month={month}{query}", headers=who)).json()
        found += page["items"]
    return found


async def test_usage_has_both_sides_of_a_charge_in_pages(desk: Desk) -> None:
    bob, agent = await opened(desk)
    tasks = [await paid_task(desk, bob, agent) for _ in range(3)]
    await looped(desk)
    spent = await usage_of(desk, bob)
    assert [one["task"] for one in spent] == tasks
    assert {one["side"] for one in spent} == {"spent"}
    assert all(one["receipt"].startswith("rc-") for one in spent)
    assert spent[0]["gpus"] == [agent.offer.gpus[0].model]
    earned = await usage_of(desk, None)
    assert [(one["side"], one["amount_microcredits"]) for one in earned] == [("earned", AMOUNT)] * 3
    page = (await desk.get("/v1/usage?limit=2", headers=bob)).json()
    rest = (await desk.get(f"/v1/usage?limit=2&cursor={page['next']}", headers=bob)).json()
    assert [one["task"] for one in page["items"] + rest["items"]] == tasks
    assert (await desk.get("/v1/usage?month=2026-13")).status_code == 400
    assert (await desk.get("/v1/usage?cursor=x")).status_code == 400


async def totals_of(desk: Desk, who: Headers | None, query: str = "") -> dict[str, Any]:
    answer = await desk.get(f"/v1/usage/totals{query}", headers=who)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_charges_of_several_months_are_one_list(desk: Desk) -> None:
    bob, agent = await opened(desk)
    first = await paid_task(desk, bob, agent)
    desk.clock.advance(40 * DAY)
    await give(desk, (await desk.get("/v1/me", headers=bob)).json()["id"], 1)
    assert (await desk.get("/v1/usage", headers=bob)).json()["items"] == []
    both = (await desk.get("/v1/usage?months=3", headers=bob)).json()["items"]
    assert [one["task"] for one in both] == [first]
    assert (await desk.get("/v1/usage?months=25", headers=bob)).status_code == 400


async def test_totals_have_the_use_of_an_account_and_of_its_nodes(desk: Desk) -> None:
    bob, agent = await opened(desk)
    await paid_task(desk, bob, agent)
    model, node = agent.offer.gpus[0].model, encode("node", agent.credentials.node)
    [mine] = (await totals_of(desk, bob))["items"]
    assert mine == {"side": "used", "group": model, "attempts": 1, "run_s": 10.0, "gpu_s": 10.0}
    [owned] = (await totals_of(desk, None, "?by=node"))["items"]
    assert owned == {"side": "served", "group": node, "attempts": 1, "run_s": 10.0, "gpu_s": 10.0}
    await paid_task(desk, bob, agent)
    month = (await totals_of(desk, bob))["month"]
    [by_month] = (await totals_of(desk, bob, "?by=month&months=2"))["items"]
    assert (by_month["group"], by_month["attempts"]) == (month, 2)
    assert (await totals_of(desk, bob, "?month=2001-01"))["items"] == []


async def test_totals_are_shown_by_a_pool_without_prices_in_pages(data: Path) -> None:
    desk = await open_desk(data, StoppedClock(), prices=False)
    async with desk.http:
        bob, _ = await person(desk)
        agent = await desk.agent("n1", lent(PRICE))
        for gpu in ("1", None):
            await desk.command(bob, gpu=gpu)
            lease = await started(desk, agent)
            desk.clock.advance(10)
            await agent.report(exited(lease))
        assert (await desk.get("/v1/usage", headers=bob)).json()["items"] == []
        page = await totals_of(desk, bob, "?limit=1")
        rest = await totals_of(desk, bob, f"?limit=1&cursor={page['next']}")
        found = [(one["group"], one["gpu_s"]) for one in page["items"] + rest["items"]]
        assert found == [("", 0.0), (agent.offer.gpus[0].model, 10.0)]
        assert (await desk.get("/v1/usage/totals?cursor=x")).status_code == 400
        assert (await desk.get("/v1/usage/totals?by=colour")).status_code == 400
    await desk.server.store.close()


async def test_a_project_is_on_charges_and_totals_of_its_payer_only(desk: Desk) -> None:
    bob, agent = await opened(desk)
    for project in ("thesis", None):
        await desk.command(bob, gpu="1", project=project)
        lease = await started(desk, agent)
        desk.clock.advance(10)
        await agent.report(signed(desk, agent, lease))
        await charged(desk)
    spent = (await desk.get("/v1/usage", headers=bob)).json()["items"]
    assert [one["project"] for one in spent] == ["thesis", None]
    earned = (await desk.get("/v1/usage")).json()["items"]
    assert [one["project"] for one in earned] == [None, None]
    used = (await totals_of(desk, bob, "?by=project"))["items"]
    assert [(one["side"], one["group"], one["gpu_s"]) for one in used] == [
        ("used", "", 10.0),
        ("used", "thesis", 10.0),
    ]
    [served] = (await totals_of(desk, None, "?by=project"))["items"]
    assert (served["side"], served["group"], served["attempts"]) == ("served", "", 2)


@pytest.mark.parametrize("project", ["", "=1+1", "a b", "x" * 64, "-x", "a\n", "<b>", "caf\u00e9"])
async def test_a_project_is_a_short_plain_word(desk: Desk, project: str) -> None:
    wanted = {"command": ["true"], "project": project}
    assert (await desk.post("/v1/tasks", wanted)).status_code == 400
    control = await desk.post("/v1/tasks", {**wanted, "project": "lab/vision-2026"})
    assert control.status_code == 202


async def test_rewards_are_shared_by_contribution_once(desk: Desk) -> None:
    bob, agent = await opened(desk)
    await paid_task(desk, bob, agent)
    month = (await desk.get("/v1/earnings")).json()["items"][0]["month"]
    desk.clock.advance(40 * DAY)
    wanted = {"month": month, "pool_microcredits": 1_000}
    tried = (await desk.post("/v1/admin/rewards", {**wanted, "dry_run": True})).json()
    assert sum(one["microcredits"] for one in tried["items"]) == 1_000
    assert (await desk.post("/v1/admin/rewards", wanted)).json() == tried
    assert (await desk.post("/v1/admin/rewards", wanted)).status_code == 409
    found = (await desk.get("/v1/earnings")).json()
    assert found["rewards"] == [{"month": month, "microcredits": 1_000}]
    assert found["vested_microcredits"] == 1_000
    empty = await desk.post("/v1/admin/rewards", {**wanted, "month": "2001-01"})
    assert empty.status_code == 400
    assert await is_sound(desk)
    assert json.dumps(tried)
    assert decode("user", tried["items"][0]["owner"])


@pytest.mark.parametrize(
    "work",
    [
        WorkSignature(b"\1" * 63),
        WorkSignature(b"\1" * 64, (), b"\1" * 32),
        WorkSignature(b"\1" * 64, (), b"\2" * 33),
        WorkSignature(b"\1" * 64, (), b"\1" * 33 * 17),
        WorkSignature(b"\1" * 64, (SignedGpu("gpu-1", "H100", "exclusive"),) * 65),
        WorkSignature(b"\1" * 64, (SignedGpu("not opaque", "H100", "exclusive"),)),
        WorkSignature(b"\1" * 64, (SignedGpu("gpu-1", "H" * 101, "exclusive"),)),
        WorkSignature(b"\1" * 64, (SignedGpu("gpu-1", "H\0", "exclusive"),)),
    ],
)
async def test_a_malformed_signature_is_dropped_and_the_end_recorded(
    desk: Desk, work: WorkSignature
) -> None:
    bob, agent = await opened(desk)
    task = await desk.command(bob, gpu="1")
    lease = await started(desk, agent)
    await agent.report(msgspec.structs.replace(exited(lease), work=work))
    found = (await desk.get(f"/v1/tasks/{task}", headers=bob)).json()
    assert found["status"] == "succeeded"
    later = Instant(desk.server.now + 1)
    assert not await desk.server.store.read(receipts.has_signatures(later))


async def test_receipts_are_issued_for_ends_that_were_signed_together(desk: Desk) -> None:
    bob, agent = await opened(desk)
    tasks, leases = [], []
    for _ in range(2):
        tasks.append(await desk.command(bob, gpu="1"))
        leases.append(await started(desk, agent))
    desk.clock.advance(10)
    ends = [signed(desk, agent, lease) for lease in leases]
    own = NodeKey(hashlib.sha256(b"n1").digest())
    proofs = sign_works([work_of(desk, agent, lease).message() for lease in leases], own.sign_work)
    joint = [
        msgspec.structs.replace(end, work=WorkSignature(proof.signature, end.work.gpus, proof.path))
        for end, proof in zip(ends, proofs, strict=True)
        if end.work is not None
    ]
    await agent.report(*joint)
    await charged(desk)
    await looped(desk)
    found = await receipts_of(desk, bob)
    assert sorted(each["task"] for each in found) == sorted(tasks)
    keys = await history(desk)
    for each in found:
        data = (await desk.get(f"/v1/receipts/{each['id']}", headers=bob)).content
        assert verified(data, keys).node_path
