"""Commit-then-reveal: a sibling sends a hash of its answer before any answer is shown. Pure.

    node            server
     | commitment      |     SHA-256(node, parent, salt, digest of the answer)
     |---------------->|
     |   reveal        |     only when every sibling of the round has committed
     |<----------------|
     | digest, salt    |     refused unless they open the commitment of this node and parent
     |---------------->|

The node and the parent are part of the hash, so that a copied commitment opens for its author only. The salt (32 random
bytes of the node) hides answers of a small domain such as true and false. A node that does not open its commitment in
time has given no answer.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from gpool.core.ids import NodeId, TaskId
from gpool.core.model import SECOND, Instant, Span

HASH_BYTES = 32
SALT_BYTES = 32
OPEN_WITHIN = Span(600 * SECOND)
"""From the last commitment of a round until a missing answer counts as none: enough for an agent to reconnect."""

_NEVER = Instant(0)


@dataclass(frozen=True, slots=True)
class AnswerOpening:
    """Digest of an answer in canonical form, and the salt of its commitment."""

    digest: bytes
    salt: bytes


@dataclass(frozen=True, slots=True)
class Sibling:
    """One run of a parent on one node; `committed` and `opening` are what the server has received of it."""

    node: NodeId
    committed: bytes | None = None
    committed_at: Instant = _NEVER
    opening: AnswerOpening | None = None


class RoundStep(StrEnum):
    COMMITTING = "committing"
    """A sibling has not committed: no answer may be shown or requested."""
    REVEALING = "revealing"
    """All have committed; the server requests the openings."""
    COMPLETE = "complete"
    """Every sibling has opened its commitment, or its time to open it has passed."""


def commitment(node: NodeId, parent: TaskId, opening: AnswerOpening) -> bytes:
    head = b"gpool.commitment\0" + node.to_bytes(8) + parent.to_bytes(8)
    return hashlib.sha256(head + opening.salt + opening.digest).digest()


def opens(sibling: Sibling, parent: TaskId, opening: AnswerOpening) -> bool:
    """Return whether an opening belongs to the sibling's commitment; lengths are checked because fields are joined."""
    if (
        sibling.committed is None
        or len(opening.salt) != SALT_BYTES
        or len(opening.digest) != HASH_BYTES
    ):
        return False
    return hmac.compare_digest(sibling.committed, commitment(sibling.node, parent, opening))


def round_step(siblings: Iterable[Sibling], now: Instant) -> RoundStep:
    """Return what a round waits for. Siblings of nodes that were lost before committing are not part of it."""
    present = list(siblings)
    if any(one.committed is None for one in present):
        return RoundStep.COMMITTING
    last = max((one.committed_at for one in present), default=_NEVER)
    if now >= last + OPEN_WITHIN or all(one.opening is not None for one in present):
        return RoundStep.COMPLETE
    return RoundStep.REVEALING
