"""Signatures of the work of priced leases, sent with the report of their end. Pure: Ed25519 needs no randomness.

Works that leave in one batch of reports are signed together (`wallet.receipt_keys.sign_works`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from gpool.agent.state_machine.lease_queues import AgentLease
from gpool.agent.state_machine.outbox import UnsignedWork, Works
from gpool.core.ids import encode
from gpool.core.model import Gpu, Offer, Slice
from gpool.wallet.receipt_keys import (
    NO_RESULT,
    ReceiptGpu,
    ReceiptWork,
    opaque_gpu_id,
    result_hash,
    sign_works,
)
from gpool.wire.frames import Finished, Released, ReportItem, SignedGpu, WorkSignature

WHOLE_MILLI = 1000


class WorkSigner:
    """`node`: id of this node as text. `sign`: Ed25519 signature by the node's key."""

    def __init__(self, node: str, sign: Callable[[bytes], bytes]) -> None:
        self._node, self._sign = node, sign
        self._gpus: dict[int, Gpu] = {}
        self._together = False

    def learn(self, offer: Offer) -> None:
        """Remember the GPUs of an offer: a lease may end after its GPU has left the offer."""
        self._gpus.update((gpu.index, gpu) for gpu in offer.gpus)

    def sign_jointly(self, *, allowed: bool) -> None:
        """Sign works that leave together once, if the server at the other end can verify that."""
        self._together = allowed

    def work(self, lease: AgentLease, end: Finished | None) -> UnsignedWork:
        """Describe what a lease did. `end` None: it was stopped and left no result."""
        gpus = tuple(map(self._gpu, lease.terms.allocation.slices))
        work = ReceiptWork(
            lease.terms.receipts,
            encode("task", lease.task),
            lease.epoch,
            self._node,
            gpus,
            NO_RESULT if end is None else _result(end),
        )
        named = tuple(SignedGpu(each.gpu, each.model, each.slice) for each in gpus)
        return UnsignedWork(work.message(), named)

    def signed(self, items: Sequence[ReportItem], works: Works) -> list[ReportItem]:
        """Add the signatures of `works`, by task and epoch, to the ends among the items."""
        ends = [
            number
            for number, item in enumerate(items)
            if (type(item) is Finished or type(item) is Released)
            and (item.task, item.epoch) in works
        ]
        found = list(items)
        named = [works[items[number].task, items[number].epoch] for number in ends]
        messages = [work.message for work in named]
        if self._together:
            proofs = sign_works(messages, self._sign)
        else:
            proofs = [proof for each in messages for proof in sign_works([each], self._sign)]
        for number, work, proof in zip(ends, named, proofs, strict=True):
            signature = WorkSignature(proof.signature, work.gpus, proof.path)
            found[number] = msgspec.structs.replace(items[number], work=signature)
        return found

    def _gpu(self, part: Slice) -> ReceiptGpu:
        gpu = self._gpus.get(part.gpu_index)
        if gpu is None:  # never offered by this agent: the server does not accept the signature
            return ReceiptGpu("gpu-unknown", "unknown", "unknown")
        shared = "exclusive" if part.share_milli >= WHOLE_MILLI else gpu.sharing.value
        return ReceiptGpu(opaque_gpu_id(gpu.uuid), gpu.model[:100], part.profile[:100] or shared)


def _result(end: Finished) -> str:
    files = [(file.path, file.sha256) for file in end.outputs]
    return result_hash(end.value, end.value_sha256, files)
