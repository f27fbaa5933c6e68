"""Refresh tokens: one family per sign-in session, one valid token at a time. Pure; the store does the writing.

Token. `gpr_FAMILY.GENERATION.TAG` with TAG = HMAC(seed, FAMILY, GENERATION); the seed is random per family. The row
holds the sealed seed and the valid generation, no token and no hash. Therefore:
- the successor is computed, so a client whose response was lost gets the same successor again;
- reuse of any earlier token is detected, however old, while a forged token never ends a family.

Rules for a token of generation g, if the row is at generation n:
- g = n: rotate to n + 1 and return its token;
- g = n - 1, within `grace` (30 s) of the rotation: return token n again (the response was lost);
- otherwise: reuse. Two parties hold copies, so the family ends for both.

Example: the client sends token 4 at 12:00:00, the row moves to 5, the response is lost. It sends 4 again at 12:00:10
and gets 5. A thief who sends 4 at 12:01:00 is 60 s late: the family ends, owner and thief must sign in again.

Concurrent writes. Read the row, call `present`, carry out the decision guarded by the generation:

    Rotate:    UPDATE … SET generation = n + 1, rotated_at, idle_until WHERE id AND generation = n AND ended_at IS NULL
    EndFamily: UPDATE … SET ended_at, end_reason WHERE id AND generation = n AND ended_at IS NULL
    Repeat, Refuse: no write

If no row was updated, another request was faster: read and call `present` again, at most `MAX_TURNS` times. Of fifty
parallel refreshes with one token, one UPDATE finds generation n; the other 49 present n - 1 within the grace and get
the same successor.

Browser cookie. `gpb_FAMILY.TAG` with a TAG of its own; it stays the same for the life of the session, which the store
decides. A browser cannot keep a rotating token: its tabs send requests at the same time. Its use extends `idle_until`.

Limit: a thief who refreshes in step with the owner, always within the grace, stays undetected; so the grace is short.
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


COOKIE_PREFIX = "gpb_"
_COOKIE = re.compile(
    rf"{COOKIE_PREFIX}(?P<family>[{ALPHABET}]{{26}})\.(?P<tag>[A-Za-z0-9_-]{{43}})"
)


@dataclass(frozen=True, slots=True)
class RefreshTerms:
    grace: Span  # how long the previous token returns the current one again
    idle: Span  # life without a refresh
    life: Span  # life since the sign-in


DAY = 86_400 * SECOND
TERMS = RefreshTerms(grace=Span(30 * SECOND), idle=Span(30 * DAY), life=Span(180 * DAY))


class FamilyEnd(StrEnum):
    SIGNED_OUT = "signed_out"
    REVOKED = "revoked"  # by an operator, or a changed password
    REUSED = "reused"
    AHEAD = "ahead"  # a genuine token of a later generation: the store was restored from a backup


@dataclass(frozen=True, slots=True)
class Family:
    """A row of `sessions`. `seed` is stored sealed; `generation` is that of the valid token."""

    id: str
    user: UserId
    seed: bytes = field(repr=False)
    generation: int
    rotated_at: Instant  # start of the current generation; of 0: the sign-in
    idle_until: Instant
    expires_at: Instant
    ended_at: Instant | None = None
    end_reason: FamilyEnd | None = None


@dataclass(frozen=True, slots=True)
class Presented:
    family: str
    generation: int
    tag: str = field(repr=False)


# ---- decisions


@dataclass(frozen=True, slots=True)
class Rotate:
    row: Family
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Repeat:
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class EndFamily:
    row: Family


class Refusal(StrEnum):
    UNKNOWN = "unknown"  # no such family, or a forged token of it
    ENDED = "ended"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class Refuse:
    why: Refusal


Decision = Rotate | Repeat | EndFamily | Refuse


# ---- transitions


def begin(
    user: UserId, entropy: bytes, now: Instant, terms: RefreshTerms = TERMS
) -> tuple[Family, str]:
    """Create a family and its first token. `entropy`: 16 random bytes for the id, 32 for the seed."""
    if len(entropy) != 16 + SEED_BYTES:
        raise ValueError(f"entropy must have {16 + SEED_BYTES} bytes, not {len(entropy)}")
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
    """Parse a token; None if malformed, so that the store need not be read."""
    match = _TOKEN.fullmatch(text)
    if match is None:
        return None
    return Presented(match["family"], int(match["generation"]), match["tag"])


def present(
    family: Family | None, presented: Presented, now: Instant, terms: RefreshTerms = TERMS
) -> Decision:
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
    if family.ended_at is not None:
        return family
    return replace(family, ended_at=now, end_reason=reason)


def token_of(family: Family, generation: int) -> str:
    return f"{PREFIX}{family.id}.{generation}.{_tag(family, generation)}"


# ---- browser cookies


@dataclass(frozen=True, slots=True)
class PresentedCookie:
    family: str
    tag: str = field(repr=False)


def parse_cookie(text: str) -> PresentedCookie | None:
    """Parse a cookie's value; None if malformed, so that the store need not be read."""
    match = _COOKIE.fullmatch(text)
    return None if match is None else PresentedCookie(match["family"], match["tag"])


def cookie_of(family: Family) -> str:
    tag = _signed(family, f"gpool browser 1\0{family.id}")
    return f"{COOKIE_PREFIX}{family.id}.{tag}"


def is_live(family: Family, presented: PresentedCookie, now: Instant) -> bool:
    """Whether the cookie is the session's and the session lasts."""
    tag = cookie_of(family).rpartition(".")[2]
    is_right = family.id == presented.family and hmac.compare_digest(tag, presented.tag)
    return is_right and family.ended_at is None and now < min(family.expires_at, family.idle_until)


def _tag(family: Family, generation: int) -> str:
    return _signed(family, f"gpool refresh 1\0{family.id}\0{generation}")


def _signed(family: Family, text: str) -> str:
    message = text.encode()
    digest = hmac.new(family.seed, message, hashlib.sha256).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def _name(raw: bytes) -> str:
    number = int.from_bytes(raw, "big")
    return "".join(ALPHABET[number >> shift & 31] for shift in range(125, -1, -5))
