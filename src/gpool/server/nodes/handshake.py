"""Proof of a node's key on a connection: no frame passes before it, no report without a valid token. No transport.

The transport passes each frame through `take` first; the channel never sees frames of the handshake.
"""

from __future__ import annotations

from collections.abc import Callable

from gpool.core.model import SECOND, Instant, Span
from gpool.server.identity.node_proofs.proofs import NotProven
from gpool.server.identity.node_proofs.verifier import (
    JOIN_AGAIN,
    LIFE,
    IssuedToken,
    NodeAuthenticator,
)
from gpool.server.store.values import NodeCredentials
from gpool.transfer.node_proofs import Purpose
from gpool.wire.frames import (
    AgentFrame,
    Challenge,
    FromAgent,
    FromServer,
    Prove,
    Proven,
    Refused,
    Reports,
)

RENEW_AFTER = Span(LIFE // 2)
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
