"""Proof of GPU: what is asked of a GPU, by when, and how an answer is bound to its question. Pure; multiplies nothing.

The claim to prove: this node has a device of its own with so much memory and so fast. The steps, timed by the server:

1. *commit*: from a fresh seed come pairs of matrices A, B (n × K and K × n bytes of a keyed stream). The node computes every
   C = A·B exactly, keeps X = bits 8..11 of each element in the GPU's memory (most of it is full then), and sends the Merkle root
   over the digests of all tiles (64 × 64 elements) of X, within `commit_within`.
2. *answer*: the server sends a nonce; the node goes over all of X in `rounds`, each giving the root over the digests of the same
   tiles keyed by the nonce and the root before, within `answer_within`. A digest takes in every element, so X must be there:
   sampling would not do, since a single element is cheap to compute again. The rounds follow one another and together read as
   much as the claimed memory can deliver: X kept elsewhere (in the host's memory, say) comes too slowly.
3. *open*: the server names tiles by chance; the node sends their C with the paths to all roots. The server checks C·r = A·(B·r)
   for a random r (Freivalds), so the whole tile is right or it knows; then every digest and path.

Why it holds. The middle bits of C depend on every bit of a row and a column, so there is nothing to save by fewer bits, and a
digest is not linear, so nothing commutes with the product. X of a tile has one right value: a cheap digest suffices, as there is
nothing to choose; the tree above must be SHA-256, since siblings could be chosen. `length` is set so that even at the peak rate of
the claimed model, no more than `RECOMPUTED` of X can be computed again within `answer_within`. Those who may sit on one device are
asked together: nobody gets a nonce before all have committed or run out of time, so one memory would have to hold both X at once.
A tile that was not computed is found if it is opened: with `opened` tiles, work done to 95 % passes once in 3,700 trials.

What it does not show: that the device is of the claimed make, when another is as fast and as large.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from gpool.core.model import Instant, Span

TILE = 64
TILE_BYTES = TILE * TILE // 2
GROUP = 8
"""Digests of eight bytes under one leaf of the tree: SHA-256 takes 64 bytes."""
HASH_BYTES = 32
STEP = 64
MAX_LENGTH = 65_536
"""Sums stay exact in a double when the server multiplies by a vector of `PROBE_BITS` bits."""
PROBE_BITS = 15
RECOMPUTED = 0.1
FILLED = 0.88
"""Of the claimed memory; the rest is for the tree, two matrices, and what the driver and a desktop hold."""
OPENED = 160
ANSWER_WITHIN = Span(500_000)
START_ALLOWANCE = Span(3_000_000)
"""For taking the memory and compiling the kernels."""
ROUNDS_SHARE = 0.36
"""Of `answer_within` at the memory's peak rate: kernels reach 60 % of it, and take 60 % of the time."""
MAX_ROUNDS = 8
OPEN_WITHIN = Span(30_000_000)
"""For the opened tiles, some megabytes, over the owner's line; nothing rests on this time."""
JOINED_TOGETHER = Span(3_600_000_000)
EFFICIENCY = 0.25
"""Of the peak; the slowest that an honest agent's kernels may be."""
MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Make:
    """Of a model, by its maker's figures: the fastest that anybody could answer with it."""

    teraops: int  # dense int8 operations a second
    gigabytes_per_s: int  # of its memory


MAKES: Mapping[str, Make] = {
    "H200": Make(1979, 4800),
    "H100": Make(1979, 3350),
    "H100PCIE": Make(1513, 2000),
    "B200": Make(4500, 8000),
    "A100": Make(624, 2039),
    "A10G": Make(140, 600),
    "A10": Make(250, 600),
    "A40": Make(299, 696),
    "L4": Make(242, 300),
    "L40": Make(362, 864),
    "L40S": Make(733, 864),
    "T4": Make(130, 320),
    "RTX2080TI": Make(215, 616),
    "RTX3060": Make(102, 360),
    "RTX3070": Make(163, 448),
    "RTX3080": Make(238, 760),
    "RTX3090": Make(284, 936),
    "RTX4060": Make(242, 272),
    "RTX4070": Make(233, 504),
    "RTX4080": Make(390, 717),
    "RTX4090": Make(661, 1008),
    "RTX5090": Make(838, 1792),
    "RTXA4000": Make(153, 448),
    "RTXA5000": Make(222, 768),
    "RTXA6000": Make(310, 768),
    "RTX6000ADA": Make(728, 960),
}
"""By normalised model (`core.gpuspec`)."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Operations and bytes a second, as an agent measured them; 0: this device has no such thing."""

    fp32_gigaflops: int
    tf32_gigaflops: int
    bf16_gigaflops: int
    int8_gigaops: int
    memory_bytes_per_s: int
    host_bytes_per_s: int


@dataclass(frozen=True, slots=True)
class Size:
    """How much is computed: `blocks` products of side × length by length × side."""

    blocks: int
    side: int
    length: int

    def __post_init__(self) -> None:
        if self.blocks < 1 or self.side < 256 or self.side % 256:
            raise ValueError(
                f"{self.blocks} blocks of side {self.side}: a side is a multiple of 256"
            )
        if not STEP <= self.length <= MAX_LENGTH or self.length % STEP:
            raise ValueError(f"length {self.length}: a multiple of {STEP} up to {MAX_LENGTH}")

    @property
    def tiles_across(self) -> int:
        return self.side // TILE

    @property
    def tiles_per_block(self) -> int:
        return self.tiles_across**2

    @property
    def tiles(self) -> int:
        return self.blocks * self.tiles_per_block

    @property
    def leaves(self) -> int:
        """Of the tree: a power of two, filled up with digests of zero."""
        return 1 << max(0, (-(-self.tiles // GROUP) - 1).bit_length())

    @property
    def depth(self) -> int:
        return self.leaves.bit_length() - 1

    @property
    def result_bytes(self) -> int:
        return self.tiles * TILE_BYTES

    @property
    def operations(self) -> int:
        return 2 * self.blocks * self.side**2 * self.length


@dataclass(frozen=True, slots=True)
class Terms:
    """What one GPU must do, and by when."""

    size: Size
    rounds: int  # of the second step
    opened: int
    commit_within: Span
    answer_within: Span


def terms_for(memory_bytes: int, make: Make) -> Terms:
    """For a claimed memory and what the claimed model can do at best."""
    filled = int(memory_bytes * FILLED)
    side = 8192 if filled >= 1 << 34 else 4096 if filled >= 1 << 30 else 256
    blocks = max(1, filled // (side * side // 2))
    kept_bytes = blocks * (side * side // 2)
    peak, seconds = make.teraops * 1e12, ANSWER_WITHIN / 1e6
    wanted = seconds * peak / (RECOMPUTED * 4 * kept_bytes)
    length = min(MAX_LENGTH, max(1024, -(-int(wanted) // 512) * 512))
    size = Size(blocks, side, length)
    read = ROUNDS_SHARE * seconds * make.gigabytes_per_s * 1e9 / kept_bytes
    rounds = min(MAX_ROUNDS, max(1, int(read)))
    commit = Span(int(size.operations / (peak * EFFICIENCY) * 1e6) + START_ALLOWANCE)
    return Terms(size, rounds, OPENED, commit, ANSWER_WITHIN)


@dataclass(frozen=True, slots=True)
class Keys:
    """Of the stream that the matrices come from, and of the digests of the first step."""

    stream: tuple[int, int]
    digest: tuple[int, int]


def keys_of(seed: bytes, node: int, uuid: str, number: int) -> Keys:
    """Bound to the node, its GPU and the number of the challenge: nobody's answer serves another."""
    return _keys(b"gpool gpu proof\n%d\n%s\n%d\n" % (node, uuid.encode(), number) + seed)


def round_key(nonce: bytes, before: bytes) -> tuple[int, int]:
    """Of the digests of a round in the second step: `before` is the last round's root, at first the commitment's."""
    return _keys(b"gpool gpu round\n" + nonce + before).digest


def _keys(material: bytes) -> Keys:
    drawn = hashlib.sha256(material).digest()
    first, second, third, fourth = (
        int.from_bytes(drawn[at : at + 8], "little") for at in (0, 8, 16, 24)
    )
    return Keys((first, second), (third, fourth))


@dataclass(frozen=True, slots=True)
class Path:
    """From one tile's digest to a root: the eight digests of its leaf, and the siblings upwards."""

    group: bytes
    siblings: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Opening:
    """One tile: C as 64 × 64 little-endian int32, row after row, and its place under every root, the commitment's first."""

    tile: int
    product: bytes
    paths: tuple[Path, ...]


PRODUCT_BYTES = TILE * TILE * 4


def parent(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(left + right).digest()


def leads_to(root: bytes, tile: int, digest: int, path: Path, depth: int) -> bool:
    """Whether the path takes this tile's digest to the root."""
    if len(path.group) != GROUP * 8 or len(path.siblings) != depth:
        return False
    if any(len(each) != HASH_BYTES for each in path.siblings):
        return False
    index, within = divmod(tile, GROUP)
    if path.group[within * 8 : within * 8 + 8] != digest.to_bytes(8, "little"):
        return False
    hashed = hashlib.sha256(path.group).digest()
    for sibling in path.siblings:
        hashed = parent(sibling, hashed) if index & 1 else parent(hashed, sibling)
        index >>= 1
    return hashed == root


class Verdict(StrEnum):
    PASSED = "passed"
    SIMULATED = "simulated"
    UNABLE = "unable"
    LATE_COMMIT = "late_commit"
    LATE_ANSWER = "late_answer"
    LATE_OPENING = "late_opening"
    MALFORMED = "malformed"
    WRONG_PRODUCT = "wrong_product"
    WRONG_COMMIT = "wrong_commit"
    WRONG_ANSWER = "wrong_answer"

    @property
    def is_late(self) -> bool:
        """The network may have been slow: worth another sitting."""
        return self in (Verdict.LATE_COMMIT, Verdict.LATE_ANSWER, Verdict.LATE_OPENING)

    @property
    def text(self) -> str:
        """For the owner: what was seen, and what to do."""
        return VERDICT_TEXT[self]


VERDICT_TEXT: Mapping[Verdict, str] = {
    Verdict.PASSED: "it did what it claims",
    Verdict.SIMULATED: "it is simulated, and proves nothing",
    Verdict.UNABLE: "its agent could not run the proof; see the agent's log, free the GPU and let it join again",
    Verdict.LATE_COMMIT: "it computes slower than its model; end what else runs on it and let it join again",
    Verdict.LATE_ANSWER: "it did not hold its results in memory of its own: less memory than claimed, or a shared device",
    Verdict.LATE_OPENING: "it did not show the results that were asked for in time",
    Verdict.MALFORMED: "its answer was not of the agreed form; install the same gpool version",
    Verdict.WRONG_PRODUCT: "it computed wrong results",
    Verdict.WRONG_COMMIT: "it had not computed what it committed to",
    Verdict.WRONG_ANSWER: "it did not hold its results in memory when asked",
}


@dataclass(frozen=True, slots=True)
class Seat:
    """One GPU in a sitting: what it was asked, and what came when."""

    terms: Terms
    began_at: Instant
    root: bytes | None = None
    asked_at: Instant | None = None  # the nonce left
    answer: tuple[bytes, ...] | None = None  # a root for each round
    opened_by: Instant | None = None
    verdict: Verdict | None = None

    def committed(self, root: bytes, at: Instant) -> Seat:
        if self.verdict is not None:
            return self
        if self.root is not None or len(root) != HASH_BYTES:
            return replace(self, verdict=Verdict.MALFORMED)
        return replace(self, root=root).at(at) if self._in_time(at) else self.at(at)

    def asked(self, at: Instant) -> Seat:
        return self if self.verdict is not None else replace(self, asked_at=at)

    def answered(self, answer: tuple[bytes, ...], at: Instant) -> Seat:
        if self.verdict is not None:
            return self
        if (
            self.asked_at is None
            or self.answer is not None
            or [len(each) for each in answer] != [HASH_BYTES] * self.terms.rounds
        ):
            return replace(self, verdict=Verdict.MALFORMED)
        if not self._in_time(at):
            return self.at(at)
        return replace(self, answer=answer, opened_by=Instant(at + OPEN_WITHIN))

    def judged(self, verdict: Verdict) -> Seat:
        return self if self.verdict is not None else replace(self, verdict=verdict)

    @property
    def due_at(self) -> Instant | None:
        """When the next thing must have come; None while it waits for others, or is done."""
        if self.verdict is not None:
            return None
        if self.root is None:
            return Instant(self.began_at + self.terms.commit_within)
        if self.asked_at is None:
            return None
        return self.opened_by or Instant(self.asked_at + self.terms.answer_within)

    def at(self, now: Instant) -> Seat:
        """As it stands by then: too late is too late, whatever comes after."""
        if self._in_time(now):
            return self
        late = (
            Verdict.LATE_COMMIT
            if self.root is None
            else Verdict.LATE_ANSWER
            if self.answer is None
            else Verdict.LATE_OPENING
        )
        return replace(self, verdict=late)

    def _in_time(self, now: Instant) -> bool:
        return (due := self.due_at) is None or now <= due


def may_ask(seats: Iterable[Seat]) -> bool:
    """Nonces leave together, once everybody in the sitting has committed or is out: one memory cannot serve two in turn."""
    return all(seat.root is not None or seat.verdict is not None for seat in seats)


@dataclass(frozen=True, slots=True)
class Place:
    """What tells devices apart, as far as the server knows."""

    owner: int
    hostname: str
    uuid: str
    joined_at: Instant


def could_be_one(a: Place, b: Place) -> bool:
    """Whether two GPUs may be one device under two names: then they are examined in one sitting."""
    return (
        a.owner == b.owner
        or a.uuid == b.uuid
        or (a.hostname != "" and a.hostname == b.hostname)
        or abs(a.joined_at - b.joined_at) <= JOINED_TOGETHER
    )
