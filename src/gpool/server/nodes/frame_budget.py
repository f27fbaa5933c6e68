"""How much one node may say: a budget of what its frames cost us, and of their bytes. Reads no clock, refuses nothing itself.

A node over its budget is held back: its next frame is taken when it has been paid for. What an honest agent sends fits many
times over; and it waits for answers, so held back it has a few frames under way and no more. One that goes on sending
all the same is flooding, and is told so. The budget is the node's, not the connection's: coming again does not renew it.
"""

from __future__ import annotations

from collections.abc import Callable

from gpool.core.ids import NodeId
from gpool.core.model import MIB
from gpool.wire.frames import Beat, FromAgent, Hello, OfferChanged, Reports

BYTES_PER_S = 16 * MIB
BURST_S = 5.0
"""A rested node may send what it would be given for so long at once (of bytes somewhat more)."""
BURST_BYTES = 128 * MIB
LONGEST_DEBT_S = 30.0
"""Nobody waits longer, whatever was sent before."""

MOST_AHEAD = 256
"""Frames of a node that is held back: an agent has at most four reports unanswered, and beats every few seconds."""
MOST_AHEAD_BYTES = MIB
"""More is left where it is: the connection's own buffers then hold the sender back."""

COST_OF_BEAT, COST_OF_OFFER, COST_OF_HELLO, COST_OF_OTHERS = 24.0, 120.0, 300.0, 10.0
"""Against one for a frame of reports: beats come every few seconds, offers and hellos hardly ever."""
ITEMS_FOR_ONE = 200
SHUT_S = 30.0
"""For so long a node that flooded is not let in again: to greet it costs more than to hear it."""
FLOODING = (
    f"this node sends frames much faster than they are answered, more than {MOST_AHEAD} of them wait; "
    f"its agent is broken or not gpool's own. It may connect again in {SHUT_S:g} seconds"
)


def cost_of(frame: FromAgent) -> float:
    """In frames of reports."""
    if type(frame) is Reports:
        return 1.0 + len(frame.items) / ITEMS_FOR_ONE
    if type(frame) is Beat:
        return COST_OF_BEAT + len(frame.holds) / ITEMS_FOR_ONE
    if type(frame) is OfferChanged:
        return COST_OF_OFFER
    return COST_OF_HELLO if type(frame) is Hello else COST_OF_OTHERS


class Pace:
    """One node's. `frames_per_s` of reports, or what costs as much; 0: no limit."""

    __slots__ = ("_at", "_bytes", "_frames", "_frames_per_s", "_shut_until_s")

    def __init__(self, frames_per_s: float, now_s: float) -> None:
        self._frames_per_s = frames_per_s
        self._frames = BURST_S * frames_per_s
        self._bytes = float(BURST_BYTES)
        self._at = now_s
        self._shut_until_s = now_s

    def shut(self, now_s: float) -> None:
        """It floods."""
        self._shut_until_s = now_s + SHUT_S

    def shut_for_s(self, now_s: float) -> float:
        """For how long it is not let in."""
        return max(0.0, self._shut_until_s - now_s)

    def spend(self, frames: float, size_bytes: int, now_s: float) -> float:
        """For how many seconds to wait before it is taken."""
        if not self._frames_per_s:
            return 0.0
        if frames <= self._frames and size_bytes <= self._bytes:  # what it has now is enough
            self._frames -= frames
            self._bytes -= size_bytes
            return 0.0
        self._earn(now_s)
        lowest = -LONGEST_DEBT_S
        self._frames = max(self._frames - frames, lowest * self._frames_per_s)
        self._bytes = max(self._bytes - size_bytes, lowest * BYTES_PER_S)
        return max(0.0, -self._frames / self._frames_per_s, -self._bytes / BYTES_PER_S)

    def is_rested(self, now_s: float) -> bool:
        """It has all it can have: as if it had never sent anything."""
        self._earn(now_s)
        if self.shut_for_s(now_s):
            return False
        return self._frames >= BURST_S * self._frames_per_s and self._bytes >= BURST_BYTES

    def _earn(self, now_s: float) -> None:
        passed, self._at = max(0.0, now_s - self._at), now_s
        most = BURST_S * self._frames_per_s
        self._frames = min(most, self._frames + passed * self._frames_per_s)
        self._bytes = min(float(BURST_BYTES), self._bytes + passed * BYTES_PER_S)


class Paces:
    """Of all nodes that have connected lately."""

    def __init__(self, frames_per_s: float, most: int = 10_000) -> None:
        self._frames_per_s, self._most = frames_per_s, most
        self._of: dict[NodeId, Pace] = {}

    def __len__(self) -> int:
        return len(self._of)

    def of(self, node: NodeId, now_s: Callable[[], float]) -> Pace:
        found = self._of.get(node)
        if found is None:
            if len(self._of) >= self._most:
                self._forget(now_s())
            found = self._of[node] = Pace(self._frames_per_s, now_s())
        return found

    def _forget(self, now_s: float) -> None:
        """Those that lose nothing by it; their connections, if they have any, go on with what they know."""
        self._of = {id_: pace for id_, pace in self._of.items() if not pace.is_rested(now_s)}
        self._most = max(self._most, 2 * len(self._of))
