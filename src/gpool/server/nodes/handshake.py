"""One agent's connection as its proof stands: nothing passes before it, and no report without its token. No transport.

`Channel` behind it never sees these frames; whoever carries frames asks `take` what to do with each.
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
"""A challenge lives longer than this: an answer under way is still good."""

_FOR_NOW = frozenset({NotProven.STALE, NotProven.FULL})


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
        self._key = ""  # the thumbprint that was proved; empty: nothing yet
        self._renew_at = Instant(0)
        self._token = ""  # the last that was verified
        self._token_until = Instant(0)

    @property
    def is_proven(self) -> bool:
        return bool(self._key)

    def begin(self) -> None:
        self._ask(Purpose.CHANNEL)

    async def take(self, frame: FromAgent) -> AgentFrame | Refused | None:
        """The frame, when it may pass; None when it was meant for us; or why the connection ends."""
        if isinstance(frame, Prove):
            return await self._judge(frame)
        if not self._key:
            return Refused("not_signed_in", "the first frame must be Prove", False)
        now = self._now()
        if type(frame) is Reports and not self._holds(frame.token, now):
            return Refused(
                "not_signed_in", "a report without a token that holds; connect again", True
            )
        if now >= self._renew_at and (self._asked_at is None or now - self._asked_at >= ASK_AGAIN):
            self._ask(Purpose.TOKEN)
        return frame

    def _holds(self, token: str, now: Instant) -> bool:
        """A token is verified when it first comes; after that it is compared, and its end looked at."""
        if token != self._token:
            until = self._gate.good_until(token, self._who.node, self._key)
            if until is None:
                return False
            self._token, self._token_until = token, until
        return now < self._token_until

    def _ask(self, purpose: Purpose) -> None:
        self._asked_at = self._now()
        self._send(Challenge(self._gate.challenge(purpose, self._who.node), purpose.value))

    async def _judge(self, frame: Prove) -> Refused | None:
        if self._asked_at is None:
            return Refused("invalid", "a proof nobody asked for", False)
        purpose = Purpose.TOKEN if self._key else Purpose.CHANNEL
        who = await self._gate.node(self._who.node)  # as of now: it may be gone, or have a new key
        if who is None:
            return Refused("not_signed_in", JOIN_AGAIN, False)
        found = self._gate.proves(who, purpose, frame.nonce, frame.signature)
        if isinstance(found, NotProven):
            if found in _FOR_NOW:
                return Refused("not_signed_in", "the proof came too late; connect again", True)
            return Refused("not_signed_in", JOIN_AGAIN, False)
        self._who, self._asked_at, self._key = who, None, found.thumbprint
        self._give(self._gate.token(who))
        return None

    def _give(self, issued: IssuedToken) -> None:
        self._renew_at = Instant(issued.at + RENEW_AFTER)
        self._send(Proven(issued.token, issued.at, issued.lives))
