"""The node's credentials: its key answers challenges, its token goes on reports, a signed proof on every request.

Proof times derive from the token's `server_at_us` and the boot clock: a wrong wall clock does no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

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
from gpool.transfer.private_files import write_private
from gpool.transfer.requests import Request
from gpool.wire.frames import AgentFrame, Challenge, Prove, Proven, Reports

SECOND_US = 1_000_000
BOOTS_FILE = "boots"


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    node: str
    server: str


class AgentCredentials:
    def __init__(self, key: NodeKey, identity: NodeIdentity, clock: Callable[[], int]) -> None:
        self._key, self.identity, self._clock = key, identity, clock
        self._token = ""
        self._server_ahead_us = 0  # the server's time minus our boot clock
        self._expires_at = 0  # by our boot clock

    def answer(self, challenge: Challenge, *, is_open: bool) -> Prove | None:
        """None for a purpose that is not due now: nothing else is ever signed."""
        purpose = Purpose.TOKEN if is_open else Purpose.CHANNEL
        if challenge.purpose != purpose:
            return None
        identity = self.identity
        statement = ChallengeStatement(
            purpose, identity.server, identity.node, self._key.public, challenge.nonce
        )
        return Prove(challenge.nonce, self._key.sign(statement))

    def take(self, proven: Proven) -> None:
        now = self._clock()
        self._token = proven.token
        self._server_ahead_us = proven.server_at_us - now
        self._expires_at = now + proven.lives_us

    def stamped(self, frame: AgentFrame) -> AgentFrame:
        if type(frame) is Reports:
            return Reports(frame.sequence, frame.items, self._token)
        return frame

    def vouch(self, request: Request) -> Mapping[str, str]:
        now = self._clock()
        if now >= self._expires_at:
            raise Unreachable(
                "the channel to the server is down and this node's token has expired; "
                "the agent gets a new one when it reconnects"
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


def next_boot(data_dir: Path) -> str:
    """Count this start on disk. Names sort by start, so the server can ignore late frames of an earlier one."""
    file = data_dir / BOOTS_FILE
    try:
        started = int(file.read_text(encoding="ascii"))
    except (FileNotFoundError, ValueError):  # the first start, or a damaged file
        started = 0
    write_private(file, str(started + 1).encode("ascii"), replace=True)
    return f"{started + 1:012d}"
