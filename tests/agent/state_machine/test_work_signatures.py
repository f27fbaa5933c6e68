"""The node signs the ends of priced leases, and nothing else."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest

from gpool.agent.state_machine.agent_state import AgentState
from gpool.agent.state_machine.instructions import CommandEnded
from gpool.agent.state_machine.outbox import LINGER_US
from gpool.agent.state_machine.work_signatures import WorkSigner
from gpool.core.ids import encode
from gpool.core.model import EndReason, Gpu, OutputFile
from gpool.transfer.node_proofs import NodeKey
from gpool.wallet.receipt_keys import (
    NO_RESULT,
    ReceiptGpu,
    ReceiptWork,
    SignedWork,
    opaque_gpu_id,
    result_hash,
)
from gpool.wire.frames import Finished, Grants, Lease, Line, Released, WorkSignature
from tests.agent.state_machine.state_case import OFFER, Case, allocation, command

KEY = NodeKey(b"\7" * 32)
NODE = encode("node", 5)
POOL = "p-test"
GPU = Gpu(0, "GPU-8d1f2c3e", "H100", "nvidia", 80 << 30)
LENT = replace(OFFER, gpus=(GPU,))
OUTPUT = OutputFile("model/a.bin", "ab" * 32, 3)


def case() -> Case:
    made = Case()
    made.state = AgentState("boot", LENT, WorkSigner(NODE, KEY.sign_work))
    made.welcome()
    return made


def granted(at: Case, receipts: str, gpu: int | None = None) -> None:
    line = Line(allocation(0, gpu), 7, False, 1, (Lease(9, 3),), None, receipts)
    at.arrive(Grants(0, ((1, command()),), (line,)))


def ended(at: Case) -> Finished:
    outputs = (OUTPUT,)
    event = CommandEnded(9, 3, EndReason.EXITED, 0, "", 50, outputs)
    at.feed(event)
    [report] = [each for each in at.take_reports() if isinstance(each, Finished)]
    return report


def is_genuine(work: WorkSignature | None, result: str) -> bool:
    assert work is not None
    gpus = tuple(ReceiptGpu(each.gpu, each.model, each.slice) for each in work.gpus)
    signed = ReceiptWork(POOL, encode("task", 9), 3, NODE, gpus, result)
    return SignedWork(signed, KEY.public.hex(), work.signature.hex()).is_genuine()


def test_the_end_of_a_priced_lease_is_signed_with_the_hash_of_its_files() -> None:
    at = case()
    granted(at, POOL, gpu=0)
    report = ended(at)
    lines = f"{OUTPUT.sha256}  {OUTPUT.path}\n"
    assert is_genuine(report.work, hashlib.sha256(lines.encode()).hexdigest())
    assert not is_genuine(report.work, NO_RESULT)
    assert report.work is not None
    [gpu] = report.work.gpus
    assert gpu.gpu == opaque_gpu_id(GPU.uuid)
    assert GPU.uuid not in gpu.gpu
    assert (gpu.model, gpu.slice) == (GPU.model, "exclusive")


def test_the_end_of_a_free_lease_is_not_signed() -> None:
    at = case()
    granted(at, "")
    assert ended(at).work is None


def test_a_stopped_lease_is_signed_once_it_had_begun() -> None:
    at = case()
    granted(at, POOL)
    at.stop(9, epoch=3)
    at.feed(CommandEnded(9, 3, EndReason.CANCELLED, None, "", 50, ()))
    [report] = [each for each in at.take_reports() if isinstance(each, Released)]
    assert is_genuine(report.work, NO_RESULT)


@pytest.mark.parametrize(
    ("value", "named", "files", "result"),
    [
        (b"v", "", [], hashlib.sha256(b"v").hexdigest()),
        (b"", "cd" * 32, [], "cd" * 32),
        (b"", "", [], NO_RESULT),
        (b"", "", [("b", "2"), ("a", "1")], hashlib.sha256(b"1  a\n2  b\n").hexdigest()),
    ],
)
def test_the_hash_of_a_result(
    value: bytes, named: str, files: list[tuple[str, str]], result: str
) -> None:
    assert result_hash(value, named, files) == result


def several(joint: bool) -> list[Finished]:
    """Three priced leases that end while a batch is in flight: their ends leave together."""
    made = Case()
    made.state = AgentState("boot", LENT, WorkSigner(NODE, KEY.sign_work))
    made.welcome(joint=joint)
    for task in (1, 2, 3, 4):
        line = Line(allocation(task), 7, False, 1, (Lease(task, 3),), None, POOL)
        made.arrive(Grants(0, ((1, command()),), (line,)))
    made.recording = False
    for task in (1, 2, 3, 4):
        made.feed(CommandEnded(task, 3, EndReason.EXITED, 0, "", 50, ()))
    made.pass_time(LINGER_US)
    found = [each for each in made.take_reports() if isinstance(each, Finished)]
    assert [each.task for each in found] == [1, 2, 3, 4]
    return found[1:]


@pytest.mark.parametrize(("joint", "signatures"), [(False, 3), (True, 1)])
def test_ends_that_leave_together_have_one_signature_if_the_server_knows_it(
    joint: bool, signatures: int
) -> None:
    works = [(each.task, each.work) for each in several(joint)]
    assert len({work.signature for _, work in works if work}) == signatures
    for task, work in works:
        assert work is not None
        done = ReceiptWork(POOL, encode("task", task), 3, NODE, (), NO_RESULT)
        signed = SignedWork(done, KEY.public.hex(), work.signature.hex(), work.path.hex())
        assert signed.is_genuine()
        assert bool(work.path) == joint
