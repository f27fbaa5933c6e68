"""Guards of a node's connection: proof of its key before any frame, rate limit of its frames. Reads no clock.

A node over its budget is delayed. An honest agent uses a fraction of the budget and waits for answers; one that keeps
sending is flooding and is disconnected. The budget belongs to the node: reconnecting does not renew it.

The transport passes each frame through `take` first; the channel never sees frames of the handshake.
"""

from __future__ import annotations

from collections.abc import Callable

from gpool.core.ids import NodeId
from gpool.core.model import MIB, SECOND, Instant, Span
from gpool.server.identity.node_proofs import (
    JOIN_AGAIN,
    TOKEN_LIFE,
    IssuedToken,
    NodeAuthenticator,
    NotProven,
)
from gpool.server.store.values import NodeCredentials
from gpool.transfer.node_proofs import Purpose
from gpool.wire.frames import (
    AgentFrame,
    Beat,
    Challenge,
    FromAgent,
    FromServer,
    Hello,
    OfferChanged,
    Prove,
    Proven,
    Refused,
    Reports,
)

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
COST_OF_OFFERED_GPU, COST_OF_CHANGED_GPU = 0.25, 4.0
"""Cost of an offer's GPUs: all are stored with the node, each changed one takes rows of its own."""
ITEMS_FOR_ONE = 200
BLOCKED_S = 30.0
"""Time a flooding node is refused: a Hello costs more than any other frame."""
FLOODING = (
    f"this node sends frames much faster than they are answered: more than {MAX_AHEAD} wait; "
    f"its agent is broken or not gpool's own. It may connect again in {BLOCKED_S:g} seconds"
)


def cost_of(frame: FromAgent, changed_gpus: int = 0) -> float:
    """Cost of a frame; `changed_gpus`: GPUs that its offer adds, changes or removes."""
    if type(frame) is Reports:
        return 1.0 + len(frame.items) / ITEMS_FOR_ONE
    if type(frame) is Beat:
        return COST_OF_BEAT + len(frame.holds) / ITEMS_FOR_ONE
    if type(frame) is OfferChanged or type(frame) is Hello:
        base = COST_OF_HELLO if type(frame) is Hello else COST_OF_OFFER
        stored = COST_OF_OFFERED_GPU * len(frame.offer.gpus)
        return base + stored + COST_OF_CHANGED_GPU * changed_gpus
    return COST_OF_OTHERS


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


RENEW_AFTER = Span(TOKEN_LIFE // 2)
ASK_AGAIN = Span(20 * SECOND)
"""Shorter than a challenge's life time: an answer under way is still valid."""

_TEMPORARY = frozenset({NotProven.STALE, NotProven.FULL})


class Handshake:
    def __init__(
        self,
        gate: NodeAuthenticator,
        who: NodeCredentials,
        now: Callable[[], Instant],
        send: Callable[[FromServer], None],
    ) -> None:
        self._gate, self._who, self._now, self._send = gate, who, now, send
        self._asked_at: Instant | None = None
        self._key = ""  # thumbprint of the proven key; empty: none yet
        self._renew_at = Instant(0)
        self._token = ""  # last verified
        self._token_until = Instant(0)

    @property
    def is_proven(self) -> bool:
        return bool(self._key)

    def begin(self) -> None:
        self._ask(Purpose.CHANNEL)

    async def take(self, frame: FromAgent) -> AgentFrame | Refused | None:
        """Return the frame if it may pass, None if it belonged to the handshake, or the refusal that ends the connection."""
        if isinstance(frame, Prove):
            return await self._verify(frame)
        if not self._key:
            return Refused("not_signed_in", "the first frame must be Prove", False)
        now = self._now()
        if type(frame) is Reports and not self._is_valid(frame.token, now):
            return Refused("not_signed_in", "a report without a valid token; connect again", True)
        if now >= self._renew_at and (self._asked_at is None or now - self._asked_at >= ASK_AGAIN):
            self._ask(Purpose.TOKEN)
        return frame

    def _is_valid(self, token: str, now: Instant) -> bool:
        if token != self._token:
            until = self._gate.good_until(token, self._who.node, self._key)
            if until is None:
                return False
            self._token, self._token_until = token, until
        return now < self._token_until

    def _ask(self, purpose: Purpose) -> None:
        self._asked_at = self._now()
        self._send(Challenge(self._gate.challenge(purpose, self._who.node), purpose.value))

    async def _verify(self, frame: Prove) -> Refused | None:
        if self._asked_at is None:
            return Refused("invalid", "a proof without a challenge", False)
        purpose = Purpose.TOKEN if self._key else Purpose.CHANNEL
        who = await self._gate.node(
            self._who.node
        )  # read again: it may be removed, or have a new key
        if who is None:
            return Refused("not_signed_in", JOIN_AGAIN, False)
        found = self._gate.proves(who, purpose, frame.nonce, frame.signature)
        if isinstance(found, NotProven):
            if found in _TEMPORARY:
                return Refused("not_signed_in", "the proof came too late; connect again", True)
            return Refused("not_signed_in", JOIN_AGAIN, False)
        self._who, self._asked_at, self._key = who, None, found.thumbprint
        self._send_token(self._gate.token(who))
        return None

    def _send_token(self, issued: IssuedToken) -> None:
        self._renew_at = Instant(issued.at + RENEW_AFTER)
        self._send(Proven(issued.token, issued.at, issued.lives))
