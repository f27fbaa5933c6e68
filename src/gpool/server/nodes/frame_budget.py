"""Rate limit of one node's frames: token buckets of their cost and bytes. Reads no clock, refuses nothing.

A node over its budget is delayed. An honest agent uses a fraction of the budget and waits for answers; one that keeps
sending is flooding and is disconnected. The budget belongs to the node: reconnecting does not renew it.
"""

from __future__ import annotations

from collections.abc import Callable

from gpool.core.ids import NodeId
from gpool.core.model import MIB
from gpool.wire.frames import Beat, FromAgent, Hello, OfferChanged, Reports

BYTES_PER_S = 16 * MIB
BURST_S = 5.0
"""Size of the full bucket, in seconds of its rate (of bytes somewhat more)."""
BURST_BYTES = 128 * MIB
LONGEST_DEBT_S = 30.0
"""Longest delay, whatever was sent before."""

MAX_AHEAD = 256
"""Unprocessed frames of a delayed node: an agent has at most four unanswered reports and a few heartbeats."""
MAX_AHEAD_BYTES = MIB
"""More is not read: the connection's own buffers then slow the sender down."""

COST_OF_BEAT, COST_OF_OFFER, COST_OF_HELLO, COST_OF_OTHERS = 24.0, 120.0, 300.0, 10.0
"""Relative to 1 for a frame of reports: heartbeats come every few seconds, offers and hellos seldom."""
ITEMS_FOR_ONE = 200
BLOCKED_S = 30.0
"""Time a flooding node is refused: a Hello costs more than any other frame."""
FLOODING = (
    f"this node sends frames much faster than they are answered: more than {MAX_AHEAD} wait; "
    f"its agent is broken or not gpool's own. It may connect again in {BLOCKED_S:g} seconds"
)


def cost_of(frame: FromAgent) -> float:
    if type(frame) is Reports:
        return 1.0 + len(frame.items) / ITEMS_FOR_ONE
    if type(frame) is Beat:
        return COST_OF_BEAT + len(frame.holds) / ITEMS_FOR_ONE
    if type(frame) is OfferChanged:
        return COST_OF_OFFER
    return COST_OF_HELLO if type(frame) is Hello else COST_OF_OTHERS


class FrameBudget:
    """`frames_per_s`: frames of reports, or others of the same cost; 0: no limit."""

    __slots__ = ("_at", "_blocked_until_s", "_bytes", "_frames", "_frames_per_s")

    def __init__(self, frames_per_s: float, now_s: float) -> None:
        self._frames_per_s = frames_per_s
        self._frames = BURST_S * frames_per_s
        self._bytes = float(BURST_BYTES)
        self._at = now_s
        self._blocked_until_s = now_s

    def block(self, now_s: float) -> None:
        self._blocked_until_s = now_s + BLOCKED_S

    def blocked_for_s(self, now_s: float) -> float:
        return max(0.0, self._blocked_until_s - now_s)

    def spend(self, frames: float, size_bytes: int, now_s: float) -> float:
        if not self._frames_per_s:
            return 0.0
        if frames <= self._frames and size_bytes <= self._bytes:  # without refilling the bucket
            self._frames -= frames
            self._bytes -= size_bytes
            return 0.0
        self._refill(now_s)
        lowest = -LONGEST_DEBT_S
        self._frames = max(self._frames - frames, lowest * self._frames_per_s)
        self._bytes = max(self._bytes - size_bytes, lowest * BYTES_PER_S)
        return max(0.0, -self._frames / self._frames_per_s, -self._bytes / BYTES_PER_S)

    def is_full(self, now_s: float) -> bool:
        self._refill(now_s)
        if self.blocked_for_s(now_s):
            return False
        return self._frames >= BURST_S * self._frames_per_s and self._bytes >= BURST_BYTES

    def _refill(self, now_s: float) -> None:
        passed, self._at = max(0.0, now_s - self._at), now_s
        most = BURST_S * self._frames_per_s
        self._frames = min(most, self._frames + passed * self._frames_per_s)
        self._bytes = min(float(BURST_BYTES), self._bytes + passed * BYTES_PER_S)


class FrameBudgets:
    def __init__(self, frames_per_s: float, most: int = 10_000) -> None:
        self._frames_per_s, self._most = frames_per_s, most
        self._of: dict[NodeId, FrameBudget] = {}

    def __len__(self) -> int:
        return len(self._of)

    def of(self, node: NodeId, now_s: Callable[[], float]) -> FrameBudget:
        found = self._of.get(node)
        if found is None:
            if len(self._of) >= self._most:
                self._forget(now_s())
            found = self._of[node] = FrameBudget(self._frames_per_s, now_s())
        return found

    def _forget(self, now_s: float) -> None:
        """Drop full budgets; connections that use one keep it."""
        self._of = {id_: budget for id_, budget in self._of.items() if not budget.is_full(now_s)}
        self._most = max(self._most, 2 * len(self._of))
