"""How this node shows who it is: its key answers challenges, its token goes on reports, a proof on every request.

Times it states are the server's, counted on by our boot clock from the token's `server_at_us`: a machine whose wall
clock is wrong is no less itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpool.core.errors import Unreachable
from gpool.transfer.artifacts import LEASE_HEADER
from gpool.transfer.node_proofs import (
    PROOF_HEADER,
    ChallengeStatement,
    NodeKey,
    Purpose,
    RequestStatement,
    new_nonce,
)
from gpool.transfer.requests import Request
from gpool.wire.frames import AgentFrame, Challenge, Prove, Proven, Reports

SECOND_US = 1_000_000


@dataclass(frozen=True, slots=True)
class Identity:
    """Who the node is (`n-…`), to whom: `server` is the name told when it joined."""

    node: str
    server: str


class Badge:
    def __init__(self, key: NodeKey, identity: Identity, clock: Callable[[], int]) -> None:
        self._key, self.identity, self._clock = key, identity, clock
        self._token = ""
        self._server_ahead_us = 0  # the server's time less our boot clock
        self._expires_at = 0  # by our boot clock

    def answer(self, challenge: Challenge, *, is_open: bool) -> Prove | None:
        """The proof asked for; None for a purpose that has no place here: nothing else is ever signed."""
        purpose = Purpose.TOKEN if is_open else Purpose.CHANNEL
        if challenge.purpose != purpose:
            return None
        who = self.identity
        statement = ChallengeStatement(
            purpose, who.server, who.node, self._key.public, challenge.nonce
        )
        return Prove(challenge.nonce, self._key.sign(statement))

    def take(self, proven: Proven) -> None:
        now = self._clock()
        self._token = proven.token
        self._server_ahead_us = proven.server_at_us - now
        self._expires_at = now + proven.lives_us

    def stamped(self, frame: AgentFrame) -> AgentFrame:
        """With our token, where one is wanted."""
        if type(frame) is Reports:
            return Reports(frame.sequence, frame.items, self._token)
        return frame

    def vouch(self, request: Request) -> Mapping[str, str]:
        """Headers for one request; `Unreachable` while there is no token that holds."""
        now = self._clock()
        if now >= self._expires_at:
            raise Unreachable(
                "the channel to the server is down, and this node's token has run out"
            )
        statement = RequestStatement(
            self.identity.server,
            request.method,
            request.path,
            self._token,
            (now + self._server_ahead_us) // SECOND_US,
            new_nonce(),
            request.headers.get(LEASE_HEADER, ""),
        )
        return {
            "Authorization": f"Bearer {self._token}",
            PROOF_HEADER: self._key.request_proof(statement),
        }
