"""GPU verification: challenge, deadlines, and binding of answers to challenges. Pure; multiplies nothing.

The claim: this node has its own device with this memory and speed. Steps, timed by the server:

1. *commit*: pairs of matrices A, B (n × K and K × n bytes of a keyed stream) come from a fresh seed. The node computes
   every C = A·B exactly, keeps X = bits 8..11 of each element in GPU memory (filling most of it) and sends, within
   `commit_within`, the Merkle root over the digests of all tiles (64 × 64 elements) of X.
2. *answer*: the server sends a nonce; the node reads all of X in `rounds`, each giving the root over the tiles' digests
   keyed by the nonce and the previous root, within `answer_within`. Digests cover every element, since a sampled one is
   cheap to recompute. The sequential rounds read as much as the claimed memory can deliver: host memory is too slow.
3. *open*: the server picks random tiles; the node sends their C with the paths to all roots. The server checks
   C·r = A·(B·r) for a random r (Freivalds), then every digest and path.

Why it holds. The middle bits of C depend on every bit of a row and a column, so fewer bits save nothing; a digest is
not linear, so nothing commutes with the product. X of a tile has one right value, so a cheap digest suffices; the tree
above must be SHA-256, since siblings could be chosen. `length` is set so that even at the claimed model's peak rate at
most `RECOMPUTED` of X can be recomputed within `answer_within`. GPUs that may be one device share a batch: nonces are
sent only after all have committed or timed out, so one memory would have to hold both X. With 160 opened tiles, work
done to 95 % passes once in 3,700 verifications.

Not shown: that the device is of the claimed model if another is as fast and as large.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from gpool.core.model import GIB, Instant, Span
from gpool.core.specs.gpu import is_model

TILE = 64
TILE_BYTES = TILE * TILE // 2
GROUP = 8
"""Eight-byte digests per leaf of the tree: SHA-256 takes 64 bytes."""
HASH_BYTES = 32
STEP = 64
MAX_LENGTH = 65_536
"""Sums stay exact in a double when the server multiplies by a vector of `PROBE_BITS` bits."""
PROBE_BITS = 15
RECOMPUTED = 0.1
FILLED = 0.88
"""Part of the claimed memory; the rest is for the tree, two matrices, the driver and a desktop."""
OPENED = 160
ANSWER_WITHIN = Span(500_000)
START_ALLOWANCE = Span(3_000_000)
"""For allocating the memory and compiling the kernels."""
ROUNDS_SHARE = 0.36
"""Part of `answer_within` at the memory's peak rate: kernels reach 60 % of it and take 60 % of the time."""
MAX_ROUNDS = 8
OPEN_WITHIN = Span(30_000_000)
"""For a few megabytes of opened tiles over the owner's uplink; not security-relevant."""
JOINED_TOGETHER = Span(3_600_000_000)
EFFICIENCY = 0.25
"""Part of the peak that the slowest honest kernels reach."""
MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Make:
    """Row of the reference table: peak rates of a model's data sheet, and the memory of its largest variant."""

    teraops: int  # dense int8 operations a second
    gigabytes_per_s: int  # of its memory
    memory_gib: int


GpuModels = Mapping[str, Make]
"""Reference table, by normalised model (`core.specs.gpu`)."""


def make_of(model: str, memory_bytes: int, models: GpuModels) -> Make | None:
    """Row for a claimed model and memory; None: not in the table, or more memory than the model has.

    Without the second condition a claim of very much memory would set a deadline of hours, and GPUs in the same
    verification batch would wait for it.
    """
    names = [name for name in models if is_model(name, model)]
    if not names:
        return None
    make = models[max(names, key=len)]  # H100PCIE before H100
    return make if memory_bytes <= make.memory_gib * GIB else None


@dataclass(frozen=True, slots=True)
class MeasuredSpeed:
    """Operations and bytes per second; 0: not supported."""

    fp32_gigaflops: int
    tf32_gigaflops: int
    bf16_gigaflops: int
    int8_gigaops: int
    memory_bytes_per_s: int
    host_bytes_per_s: int


@dataclass(frozen=True, slots=True)
class Size:
    """`blocks` products of side × length by length × side."""

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
        """A power of two, padded with zero digests."""
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
class VerificationTerms:
    size: Size
    rounds: int  # of step 2
    opened: int
    commit_within: Span
    answer_within: Span


def terms_for(memory_bytes: int, make: Make) -> VerificationTerms:
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
    return VerificationTerms(size, rounds, OPENED, commit, ANSWER_WITHIN)


@dataclass(frozen=True, slots=True)
class VerificationKeys:
    stream: tuple[int, int]
    digest: tuple[int, int]


def keys_of(seed: bytes, node: int, uuid: str, number: int) -> VerificationKeys:
    """Derive keys bound to node, GPU and challenge number: no answer serves another node."""
    return _keys(b"gpool gpu proof\n%d\n%s\n%d\n" % (node, uuid.encode(), number) + seed)


def round_key(nonce: bytes, before: bytes) -> tuple[int, int]:
    """Key of digests in step 2. `before`: the previous root, at first the commitment."""
    return _keys(b"gpool gpu round\n" + nonce + before).digest


def _keys(material: bytes) -> VerificationKeys:
    drawn = hashlib.sha256(material).digest()
    first, second, third, fourth = (
        int.from_bytes(drawn[at : at + 8], "little") for at in (0, 8, 16, 24)
    )
    return VerificationKeys((first, second), (third, fourth))


@dataclass(frozen=True, slots=True)
class Path:
    """Eight digests of the tile's leaf, and the siblings upwards."""

    group: bytes
    siblings: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Opening:
    """C as 64 × 64 little-endian int32 in row order, and its paths, the commitment's first."""

    tile: int
    product: bytes
    paths: tuple[Path, ...]


PRODUCT_BYTES = TILE * TILE * 4


def parent(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(left + right).digest()


def leads_to(root: bytes, tile: int, digest: int, path: Path, depth: int) -> bool:
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


class GpuVerdict(StrEnum):
    PASSED = "passed"
    SIMULATED = "simulated"
    UNABLE = "unable"
    UNKNOWN_MODEL = "unknown_model"
    LATE_COMMIT = "late_commit"
    LATE_ANSWER = "late_answer"
    LATE_OPENING = "late_opening"
    MALFORMED = "malformed"
    WRONG_PRODUCT = "wrong_product"
    WRONG_COMMIT = "wrong_commit"
    WRONG_ANSWER = "wrong_answer"

    @property
    def is_late(self) -> bool:
        """Whether a slow network may be the cause: worth another batch."""
        return self in (GpuVerdict.LATE_COMMIT, GpuVerdict.LATE_ANSWER, GpuVerdict.LATE_OPENING)

    @property
    def is_unproven(self) -> bool:
        """Whether nothing was shown, neither that the claim is true nor that it is false."""
        return self in UNPROVEN

    @property
    def text(self) -> str:
        return VERDICT_TEXT[self]


UNPROVEN = frozenset({GpuVerdict.SIMULATED, GpuVerdict.UNABLE, GpuVerdict.UNKNOWN_MODEL})

VERDICT_TEXT: Mapping[GpuVerdict, str] = {
    GpuVerdict.PASSED: "it did what it claims",
    GpuVerdict.SIMULATED: "it is simulated, and proves nothing",
    GpuVerdict.UNABLE: "its agent could not run the proof; see the agent's log, free the GPU and let it join again",
    GpuVerdict.UNKNOWN_MODEL: "the pool's table of GPU models has no row for this model and memory; an operator can add one",
    GpuVerdict.LATE_COMMIT: "it computes slower than its model; end what else runs on it and let it join again",
    GpuVerdict.LATE_ANSWER: "it did not hold its results in memory of its own: less memory than claimed, or a shared device",
    GpuVerdict.LATE_OPENING: "it did not show the results that were asked for in time",
    GpuVerdict.MALFORMED: "its answer was not of the agreed form; install the same gpool version",
    GpuVerdict.WRONG_PRODUCT: "it computed wrong results",
    GpuVerdict.WRONG_COMMIT: "it had not computed what it committed to",
    GpuVerdict.WRONG_ANSWER: "it did not hold its results in memory when asked",
}


@dataclass(frozen=True, slots=True)
class VerifiedGpu:
    terms: VerificationTerms
    began_at: Instant
    root: bytes | None = None
    asked_at: Instant | None = None  # the nonce was sent
    answer: tuple[bytes, ...] | None = None  # a root per round
    opened_by: Instant | None = None
    verdict: GpuVerdict | None = None

    def committed(self, root: bytes, at: Instant) -> VerifiedGpu:
        if self.verdict is not None:
            return self
        if self.root is not None or len(root) != HASH_BYTES:
            return replace(self, verdict=GpuVerdict.MALFORMED)
        return replace(self, root=root).at(at) if self._in_time(at) else self.at(at)

    def asked(self, at: Instant) -> VerifiedGpu:
        return self if self.verdict is not None else replace(self, asked_at=at)

    def answered(self, answer: tuple[bytes, ...], at: Instant) -> VerifiedGpu:
        if self.verdict is not None:
            return self
        if (
            self.asked_at is None
            or self.answer is not None
            or [len(each) for each in answer] != [HASH_BYTES] * self.terms.rounds
        ):
            return replace(self, verdict=GpuVerdict.MALFORMED)
        if not self._in_time(at):
            return self.at(at)
        return replace(self, answer=answer, opened_by=Instant(at + OPEN_WITHIN))

    def judged(self, verdict: GpuVerdict) -> VerifiedGpu:
        return self if self.verdict is not None else replace(self, verdict=verdict)

    @property
    def due_at(self) -> Instant | None:
        """Next deadline; None while it waits for others or is done."""
        if self.verdict is not None:
            return None
        if self.root is None:
            return Instant(self.began_at + self.terms.commit_within)
        if self.asked_at is None:
            return None
        return self.opened_by or Instant(self.asked_at + self.terms.answer_within)

    def at(self, now: Instant) -> VerifiedGpu:
        """A passed deadline is final."""
        if self._in_time(now):
            return self
        late = (
            GpuVerdict.LATE_COMMIT
            if self.root is None
            else GpuVerdict.LATE_ANSWER
            if self.answer is None
            else GpuVerdict.LATE_OPENING
        )
        return replace(self, verdict=late)

    def _in_time(self, now: Instant) -> bool:
        return (due := self.due_at) is None or now <= due


def may_ask(seats: Iterable[VerifiedGpu]) -> bool:
    """Whether all have committed or failed: an earlier nonce would let one memory serve two in turn."""
    return all(seat.root is not None or seat.verdict is not None for seat in seats)


@dataclass(frozen=True, slots=True)
class DeviceIdentity:
    owner: int
    hostname: str
    uuid: str
    joined_at: Instant


def could_be_one(a: DeviceIdentity, b: DeviceIdentity) -> bool:
    """Whether two GPUs may be one device under two names: then they share a batch."""
    return (
        a.owner == b.owner
        or a.uuid == b.uuid
        or (a.hostname != "" and a.hostname == b.hostname)
        or abs(a.joined_at - b.joined_at) <= JOINED_TOGETHER
    )
