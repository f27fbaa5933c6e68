"""Proof of GPU: what is asked of a GPU, by when, and how an answer is bound to its question. Pure; multiplies nothing.

The claim to prove: this node has a device of its own with so much memory and so fast. The steps, timed by the server:

1. *commit*: from a fresh seed come pairs of matrices A, B (n × K and K × n bytes of a keyed stream). The node computes every
   C = A·B exactly, keeps X = bits 8..11 of each element in the GPU's memory (most of it is full then), and sends the Merkle root
   over the digests of all tiles (64 × 64 elements) of X, within `commit_within`.
2. *answer*: the server sends a nonce; the node sends the root over the digests of the same tiles keyed by nonce and first root,
   within `answer_within`. A digest takes in every element, so X must be there: sampling elements would not do, since a single
   element is cheap to compute again.
3. *open*: the server names tiles by chance; the node sends their C with the paths to both roots. The server checks C·r = A·(B·r)
   for a random r (Freivalds), so the whole tile is right or it knows; then both digests and both paths.

Why it holds. The middle bits of C depend on every bit of a row and a column, so there is nothing to save by fewer bits, and a
digest is not linear, so nothing commutes with the product. X of a tile has one right value: a cheap digest suffices, as there is
nothing to choose; the tree above must be SHA-256, since siblings could be chosen. `length` is set so that even at the peak rate of
the claimed model, no more than `RECOMPUTED` of X can be computed again within `answer_within`. Those who may sit on one device are
asked together: nobody gets a nonce before all have committed or run out of time, so one memory would have to hold both X at once.
A tile that was not computed is found if it is opened: with `opened` tiles, work done to 95 % passes twice in a million times.

What it does not show: that the device is of the claimed make, when another is as fast and as large.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
OPENED = 256
ANSWER_WITHIN = Span(500_000)
START_ALLOWANCE = Span(3_000_000)
"""For taking the memory and compiling the kernels."""
EFFICIENCY = 0.25
"""Of the peak; the slowest that an honest agent's kernels may be."""
MASK = (1 << 64) - 1

PEAK_TERAOPS: Mapping[str, int] = {
    "H200": 1979,
    "H100": 1979,
    "H100PCIE": 1513,
    "B200": 4500,
    "A100": 624,
    "A10G": 140,
    "A10": 250,
    "A40": 299,
    "L4": 242,
    "L40": 362,
    "L40S": 733,
    "T4": 130,
    "RTX2080TI": 215,
    "RTX3060": 102,
    "RTX3070": 163,
    "RTX3080": 238,
    "RTX3090": 284,
    "RTX4060": 242,
    "RTX4070": 233,
    "RTX4080": 390,
    "RTX4090": 661,
    "RTX5090": 838,
    "RTXA4000": 153,
    "RTXA5000": 222,
    "RTXA6000": 310,
    "RTX6000ADA": 728,
}
"""Dense int8 operations a second at the makers' peak, by normalised model: the fastest that anybody could answer."""


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
    opened: int
    commit_within: Span
    answer_within: Span


def terms_for(
    memory_bytes: int, peak_teraops: float, *, answer_within: Span = ANSWER_WITHIN
) -> Terms:
    """For a claimed memory and the peak rate of the claimed model."""
    filled = int(memory_bytes * FILLED)
    side = 8192 if filled >= 1 << 34 else 4096 if filled >= 1 << 30 else 256
    blocks = max(1, filled // (side * side // 2))
    peak = peak_teraops * 1e12
    seconds = answer_within / 1e6
    wanted = seconds * peak / (RECOMPUTED * 4 * blocks * (side * side // 2))
    length = min(MAX_LENGTH, max(1024, -(-int(wanted) // 512) * 512))
    size = Size(blocks, side, length)
    commit = Span(int(size.operations / (peak * EFFICIENCY) * 1e6) + START_ALLOWANCE)
    return Terms(size, OPENED, commit, answer_within)


@dataclass(frozen=True, slots=True)
class Keys:
    """Of the stream that the matrices come from, and of the digests of the first step."""

    stream: tuple[int, int]
    digest: tuple[int, int]


def keys_of(seed: bytes, node: int, uuid: str, number: int) -> Keys:
    """Bound to the node, its GPU and the number of the challenge: nobody's answer serves another."""
    return _keys(b"gpool gpu proof\n%d\n%s\n%d\n" % (node, uuid.encode(), number) + seed)


def answer_key(nonce: bytes, root: bytes) -> tuple[int, int]:
    """Of the second step's digests."""
    return _keys(b"gpool gpu answer\n" + nonce + root).digest


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
    """One tile: C as 64 × 64 little-endian int32, row after row, and its place under both roots."""

    tile: int
    product: bytes
    commit: Path
    answer: Path


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
    LATE_COMMIT = "late_commit"
    LATE_ANSWER = "late_answer"
    NO_OPENING = "no_opening"
    MALFORMED = "malformed"
    WRONG_PRODUCT = "wrong_product"
    WRONG_COMMIT = "wrong_commit"
    WRONG_ANSWER = "wrong_answer"
