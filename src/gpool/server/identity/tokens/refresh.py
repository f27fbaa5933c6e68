"""Refresh tokens: a family per sign-in, one token at a time, each use gives the next. Pure; the store does the writing.

A token names its family and generation and carries a tag under the family's own random seed:
`gpr_FAMILY.GENERATION.TAG`. So no token is stored, nor a hash of each: the row holds the seed (sealed by the envelope)
and the generation that is good now. From these follow
- the same successor again for a client whose answer was lost: it is computed, not remembered;
- reuse of *any* earlier token is recognised, however old, and a made-up one is never mistaken for it: whoever merely
  knows a family's name cannot end it.

Rules. The current generation rotates. The one before it, within `grace` of the rotation, gets the current token again.
Anything older, or later than that, is reuse: somebody else holds a copy, and the family ends for both.

The write. Read the row, ask `present`, then carry out its decision, guarded:

    Rotate:  UPDATE refresh_families SET generation = :next, rotated_at = :now, idle_until = :idle_until
             WHERE id = :id AND generation = :next - 1 AND ended_at IS NULL
    FamilyEnd:     UPDATE refresh_families SET ended_at = :now, end_reason = :reason
             WHERE id = :id AND generation = :generation AND ended_at IS NULL
    Repeat, Refuse:  nothing to write

Zero rows mean that somebody was faster: read again and ask `present` again (`MAX_TURNS` bounds it; each turn means
another request succeeded). Of fifty parallel refreshes with one token one UPDATE finds `generation = n`; the other 49
then see themselves as the previous generation within the grace, and get the same successor.

A thief who copies a token and refreshes in lockstep with its owner, each time within the grace, stays unseen while that
lasts; that is the price of the window, and why it is short.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from dataclasses import dataclass, field, replace
from enum import StrEnum

from gpool.core.ids import ALPHABET, UserId
from gpool.core.model import SECOND, Instant, Span

PREFIX = "gpr_"
SEED_BYTES = 32
MAX_TURNS = 8
_TOKEN = re.compile(
    rf"{PREFIX}(?P<family>[{ALPHABET}]{{26}})\.(?P<generation>0|[1-9][0-9]{{0,8}})\.(?P<tag>[A-Za-z0-9_-]{{43}})"
)


@dataclass(frozen=True, slots=True)
class RefreshTerms:
    grace: Span
    idle: Span  # unused for so long: over
    life: Span  # since the sign-in, whatever the use


DAY = 86_400 * SECOND
TERMS = RefreshTerms(grace=Span(30 * SECOND), idle=Span(30 * DAY), life=Span(180 * DAY))


class FamilyEnd(StrEnum):
    SIGNED_OUT = "signed_out"
    REVOKED = "revoked"  # by an operator, or a changed password
    REUSED = "reused"
    AHEAD = "ahead"  # a genuine token the row has not reached: the store went back to a backup


@dataclass(frozen=True, slots=True)
class Family:
    """One row. `seed` is stored sealed; `generation` is of the token that is good now."""

    id: str
    user: UserId
    seed: bytes = field(repr=False)
    generation: int
    rotated_at: Instant  # when the current generation came; the sign-in for 0
    idle_until: Instant
    expires_at: Instant
    ended_at: Instant | None = None
    end_reason: FamilyEnd | None = None


@dataclass(frozen=True, slots=True)
class Presented:
    """A refresh token taken apart; nothing about it is proved yet."""

    family: str
    generation: int
    tag: str = field(repr=False)


# ---- decisions


@dataclass(frozen=True, slots=True)
class Rotate:
    """Write `row`, guarded by the generation before it; then hand out `token`."""

    row: Family
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Repeat:
    """Hand out the same successor as before; nothing to write."""

    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class EndFamily:
    """Write `row`, guarded; the caller is not signed in, and neither is anybody with a token of this family."""

    row: Family


class Refusal(StrEnum):
    UNKNOWN = "unknown"  # no such family, or no token of it: changes nothing
    ENDED = "ended"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class Refuse:
    why: Refusal


Decision = Rotate | Repeat | EndFamily | Refuse


# ---- the machine


def begin(
    user: UserId, entropy: bytes, now: Instant, terms: RefreshTerms = TERMS
) -> tuple[Family, str]:
    """A new family for a sign-in, and its first token. `entropy`: 48 random bytes, 16 for the name, 32 for the seed."""
    if len(entropy) != 16 + SEED_BYTES:
        raise ValueError(f"{16 + SEED_BYTES} random bytes are needed, not {len(entropy)}")
    family = Family(
        id=_name(entropy[:16]),
        user=user,
        seed=entropy[16:],
        generation=0,
        rotated_at=now,
        idle_until=Instant(now + terms.idle),
        expires_at=Instant(now + terms.life),
    )
    return family, token_of(family, 0)


def parse(text: str) -> Presented | None:
    """None when it cannot be one of ours: no need to ask the store."""
    match = _TOKEN.fullmatch(text)
    if match is None:
        return None
    return Presented(match["family"], int(match["generation"]), match["tag"])


def present(
    family: Family | None, presented: Presented, now: Instant, terms: RefreshTerms = TERMS
) -> Decision:
    """What follows from this token being shown now. Changes nothing itself."""
    if family is None or family.id != presented.family:
        return Refuse(Refusal.UNKNOWN)
    if not hmac.compare_digest(_tag(family, presented.generation), presented.tag):
        return Refuse(Refusal.UNKNOWN)
    if family.ended_at is not None:
        return Refuse(Refusal.ENDED)
    if now >= family.expires_at or now >= family.idle_until:
        return Refuse(Refusal.EXPIRED)
    behind = family.generation - presented.generation
    if behind == 0:
        row = replace(
            family,
            generation=family.generation + 1,
            rotated_at=now,
            idle_until=Instant(now + terms.idle),
        )
        return Rotate(row, token_of(row, row.generation))
    if behind == 1 and now - family.rotated_at <= terms.grace:
        return Repeat(token_of(family, family.generation))
    return EndFamily(ended(family, FamilyEnd.REUSED if behind > 0 else FamilyEnd.AHEAD, now))


def ended(family: Family, reason: FamilyEnd, now: Instant) -> Family:
    """The row of a family that is over; an end that was before stays."""
    if family.ended_at is not None:
        return family
    return replace(family, ended_at=now, end_reason=reason)


def token_of(family: Family, generation: int) -> str:
    return f"{PREFIX}{family.id}.{generation}.{_tag(family, generation)}"


def _tag(family: Family, generation: int) -> str:
    message = f"gpool refresh 1\0{family.id}\0{generation}".encode()
    digest = hmac.new(family.seed, message, hashlib.sha256).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def _name(raw: bytes) -> str:
    number = int.from_bytes(raw, "big")
    return "".join(ALPHABET[number >> shift & 31] for shift in range(125, -1, -5))
