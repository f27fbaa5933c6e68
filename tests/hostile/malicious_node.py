"""A malicious node over the real channel: every frame and every lie that a node's key allows it to send.

`LIES_ABOUT_OTHERS` are told about a lease of an honest node, `LIES_ABOUT_ITSELF` about the node's own lease.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import msgspec
from websockets.exceptions import ConnectionClosed

from gpool.core.model import GIB, EndReason, Gpu, Offer, OutputFile, Phase
from gpool.wire.frames import (
    PROTOCOL,
    AgentFrame,
    Beat,
    Checkpointed,
    Finished,
    HandedBack,
    Hello,
    Hold,
    LogChunk,
    OfferChanged,
    Reached,
    Recorded,
    Refused,
    Released,
    ReportItem,
    Reports,
    Started,
    encode,
)
from tests.tools.scripted_agent import ScriptedAgent, offer

LABEL = "malicious"
MANY = 1 << 62
NOBODY = hashlib.sha256(b"never uploaded").hexdigest()


@dataclass(frozen=True, slots=True)
class Victim:
    """An honest node's running lease and GPU."""

    lease: Hold
    gpu: str


class MaliciousNode(ScriptedAgent):
    __slots__ = ()

    @property
    def own_offer(self) -> Offer:
        return replace(offer(self.cpus), labels=frozenset({LABEL}))

    def attack(self, *frames: AgentFrame | bytes) -> Refused | None:
        """Send frames as they are; return the refusal if the server closes the connection."""
        before = len(self.heard)
        try:
            for frame in frames:
                assert self._socket is not None
                data = frame if isinstance(frame, bytes) else encode(self.badge.stamped(frame))
                self._socket.send(data)
            self.beat()
        except ConnectionClosed:
            self._hear_the_rest()
        refusals = [frame for frame in self.heard[before:] if isinstance(frame, Refused)]
        return refusals[-1] if refusals else None

    def _hear_the_rest(self) -> None:
        """Read frames that came before the end: a send fails at once, whatever has not been read."""
        with contextlib.suppress(ConnectionClosed):
            while True:
                self.awaited(Refused)

    def ahead(self, count: int) -> int:
        """Number of a heartbeat that lies `count` ahead; later ones continue from there."""
        self._beat += count
        return self._beat

    def claim(self, *items: ReportItem) -> tuple[Hold, ...]:
        """Report; return the leases whose reports the server refused."""
        recorded: Recorded = self.report(*items)
        return recorded.refused


def finished(hold: Hold, reason: EndReason = EndReason.EXITED, **lies: object) -> Finished:
    end = Finished(hold.task, hold.epoch, reason, 0, duration_us=1000)
    return msgspec.structs.replace(end, **lies)


def every_report(hold: Hold) -> Iterator[ReportItem]:
    task, epoch = hold.task, hold.epoch
    stolen = (OutputFile("out", NOBODY, 1),)
    yield Started(task, epoch)
    yield LogChunk(task, epoch, 0, 1, b"forged output\n")
    yield Reached(task, epoch, Phase.BUILD)
    yield Checkpointed(task, epoch, stolen)
    yield HandedBack(task, epoch)
    yield Released(task, epoch)
    for reason in EndReason:
        yield finished(hold, reason, value=b"forged", error_text="forged")


def invented(count: int, *uuids: str) -> Offer:
    names = [*uuids, *(f"GPU-{os.urandom(8).hex()}" for _ in range(count - len(uuids)))]
    gpus = tuple(
        Gpu(index, name, "NVIDIA H200", "nvidia", 141 * GIB) for index, name in enumerate(names)
    )
    return replace(offer(64), gpus=gpus, labels=frozenset({LABEL}))


def _reports_of_another(node: MaliciousNode, victim: Victim) -> None:
    for item in every_report(victim.lease):
        assert node.claim(item) == (victim.lease,), item


def _reports_of_the_next_lease(node: MaliciousNode, victim: Victim) -> None:
    following = Hold(victim.lease.task, victim.lease.epoch + 1)
    for item in every_report(following):
        assert node.claim(item) == (following,), item


def _numbers_out_of_range(node: MaliciousNode, victim: Victim) -> None:
    for task, epoch in ((1 << 63, 1), ((1 << 64) - 1, 1), (victim.lease.task, 1 << 63)):
        with contextlib.suppress(ConnectionClosed):
            node.claim(Released(task, epoch))


def _heartbeats_for_another(node: MaliciousNode, victim: Victim) -> None:
    assert node.beat(victim.lease).drop == (victim.lease,)


def _a_hello_with_anothers_leases(node: MaliciousNode, victim: Victim) -> None:
    assert node.connect(victim.lease).drop == (victim.lease,)


def _an_upload_under_anothers_lease(node: MaliciousNode, victim: Victim) -> None:
    assert node.upload(b"forged", victim.lease).status_code in (403, 404, 409)


def _anothers_gpu(node: MaliciousNode, victim: Victim) -> None:
    node.attack(OfferChanged(invented(2, victim.gpu)))


def _a_thousand_gpus(node: MaliciousNode, _: Victim) -> None:
    node.attack(OfferChanged(invented(1024)))


def _no_frames(node: MaliciousNode, _: Victim) -> None:
    for junk in (b"", b"\x00", b"\xff" * 100, b"[" * 10_000, os.urandom(4096)):
        node.connect()
        refusal = node.attack(junk)
        assert refusal is not None
        assert refusal.code == "invalid"


def _a_second_hello(node: MaliciousNode, victim: Victim) -> None:
    hello = Hello(PROTOCOL, "zzz", node.own_offer, MANY, (victim.lease,))
    assert node.attack(hello, hello) is not None


def _numbers_from_the_future(node: MaliciousNode, victim: Victim) -> None:
    node.attack(Reports(MANY, ()), Beat(-1, ()), Beat(node.ahead(1000), (victim.lease,)))


def _frames_too_large(node: MaliciousNode, _: Victim) -> None:
    node.attack(b"\x00" * (9 << 20))
    node.connect()
    node.attack(Beat(1 << 20, tuple(Hold(n, 1) for n in range(200_001))))


LIES_ABOUT_OTHERS: dict[str, Callable[[MaliciousNode, Victim], None]] = {
    "every report about another node's lease": _reports_of_another,
    "every report about the lease that comes next": _reports_of_the_next_lease,
    "tasks and epochs out of range": _numbers_out_of_range,
    "heartbeats for another node's lease": _heartbeats_for_another,
    "a hello with another node's lease": _a_hello_with_anothers_leases,
    "an upload under another node's lease": _an_upload_under_anothers_lease,
    "another node's GPU": _anothers_gpu,
    "a thousand invented GPUs": _a_thousand_gpus,
    "bytes that are no frame": _no_frames,
    "a second hello": _a_second_hello,
    "heartbeats and reports numbered far ahead": _numbers_from_the_future,
    "frames over their limits": _frames_too_large,
}


@dataclass(frozen=True, slots=True)
class OwnLie:
    """Items reported about the node's own running lease, and how the consumer must see the task then."""

    items: Callable[[Hold], tuple[ReportItem, ...]]
    ends: tuple[str, str]  # status, reason


LIES_ABOUT_ITSELF: dict[str, OwnLie] = {
    "outputs it never uploaded": OwnLie(
        lambda hold: (finished(hold, outputs=(OutputFile("out", NOBODY, 1),)),),
        ("failed", "bad_output"),
    ),
    "a value it never uploaded": OwnLie(
        lambda hold: (finished(hold, EndReason.RETURNED, value_sha256=NOBODY),),
        ("failed", "bad_output"),
    ),
    "a run time of a million years": OwnLie(
        lambda hold: (finished(hold, duration_us=MANY),), ("succeeded", "exited")
    ),
    "an exit code that no process has": OwnLie(
        lambda hold: (finished(hold, exit_code=MANY),), ("failed", "bad_output")
    ),
    "two ends": OwnLie(
        lambda hold: (finished(hold, exit_code=1), finished(hold)), ("failed", "exited")
    ),
    "a start after the end": OwnLie(
        lambda hold: (finished(hold), Started(hold.task, hold.epoch)), ("succeeded", "exited")
    ),
    "an error text of a megabyte": OwnLie(
        lambda hold: (finished(hold, exit_code=1, error_text="x" * (1 << 20)),),
        ("failed", "exited"),
    ),
}
