"""Rows of the placement index: for one alternative of a shape, the score of each slot and facts about each kind of node.

**Start cost.** Seconds that a start costs: preparing an environment, loading inputs, and work lost if the node fails. A
node with mean time between failures `mtbf` loses `run / mtbf` runs; each loses half a checkpoint interval (half the run
without checkpoints) and a restart, for the whole gang. Seconds count in steps of 1/200 of the run: to a task of a day, a
minute of loading is not worth a fragmented GPU. Run times are rounded to powers of two, so that similar shapes share
rows; unknown: ten minutes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpool.core.ids import UserId
from gpool.core.model import SECOND, GpuRequest, Node, Shape, Span, Tier
from gpool.core.money.prices import is_priced
from gpool.core.scheduler.place.board import CPU, DISK, IDLE, MEMORY, NEEDED, Board
from gpool.core.scheduler.place.fit import (
    cpu_price,
    gpu_price,
    is_slice,
    slice_of,
    unfit_for_any_owner,
    usable,
)
from gpool.core.scheduler.place.kinds import MAX_GPUS, lent_gpus
from gpool.core.scheduler.place.pricing import GPU, Bools, Floats, Ints
from gpool.core.scheduler.place.shares import least_memory, most_cpu, most_memory
from gpool.core.scheduler.state.state import State
from gpool.core.specs import fields

MAX_CELLS = 8_000_000  # numbers kept in all rows together, about 80 MB
MAX_SHAPES = 20_000
MAX_PRICE_STEP = (1 << 11) - 1
NEVER = 1 << 60
UNKNOWN_RUN = Span(600 * SECOND)
RESTART = 60  # seconds until a lost task runs again
PREPARATION = 60  # seconds to prepare an environment, roughly
LOAD_BYTES_PER_S = 100_000_000
STEPS = 200  # to a run
_PREPARED = (fields.PIP_ENVIRONMENT, fields.IMAGE_ENVIRONMENT)


class StartCost(NamedTuple):
    """Seconds. `exposure`: lost by one run, times the node's mean time between failures; `step`: of one step."""

    exposure: int
    loading: int
    step: int


def start_cost(shape: Shape, predicted: Span | None) -> StartCost:
    run = _rounded(UNKNOWN_RUN if predicted is None else predicted)
    kept = run if shape.checkpoint_every is None else min(run, shape.checkpoint_every // SECOND)
    lost = kept // 2 + RESTART
    exposure = run * lost * shape.requirements.nodes
    return StartCost(exposure, shape.data_bytes // LOAD_BYTES_PER_S, max(1, run // STEPS))


def _rounded(run: Span) -> int:
    seconds: int = max(1, run // SECOND)
    return 1 << (seconds - 1).bit_length()


class KindFacts:
    __slots__ = (
        "_count",
        "_generation",
        "_request",
        "_shape",
        "able",
        "is_priced",
        "is_uneven",
        "least",
        "memory",
        "more",
        "parts",
        "price",
        "seconds",
        "taken",
        "usable",
    )

    def __init__(self, shape: Shape, request: GpuRequest | None) -> None:
        self._shape, self._request = shape, request
        self._generation = -1  # of the board whose kinds these are
        self._count = 0
        self.able: Bools = np.empty(0, bool)  # could ever run it
        self.memory: Ints = np.empty(0, np.int64)  # memory it takes, or NEVER
        self.seconds: Ints = np.empty(0, np.int64)  # until it starts
        self.taken: Ints = np.empty(0, np.int64)  # memory of the smallest usable GPU, MiB
        self.usable: Bools = np.empty((0, 0), bool)  # by kind and GPU
        self.price: Ints = np.empty(0, np.int64)  # an hour's, as a step
        self.is_priced = False  # any kind
        self.least: Floats = np.empty((NEEDED, 0))  # what a node must have free
        self.is_uneven = (
            False  # of some kinds only some GPUs are usable: counting idle ones is not enough
        )
        # By kind: CPU and memory beyond the least that it takes with each GPU, where they are free (`shares`).
        self.more: Ints | None = None  # None: it takes the least everywhere
        # By kind: share, memory and free thousandths that a slice takes of each GPU; NEVER of an unusable one.
        self.parts: Ints = np.empty((0, 3, 0), np.int64)

    def learn(self, board: Board) -> None:
        kinds, needs = board.kinds.nodes, self._shape.requirements
        if self._generation != board.generation:  # kinds are others, or nodes have more GPUs
            self._generation, self._count = board.generation, 0
        if self._count == len(kinds):
            return
        new = [self._of_kind(node, board.columns.width) for node in kinds[self._count :]]
        able, memory, seconds, taken, parts, price, more = zip(*new, strict=True)
        is_first = self._count == 0

        def grown(old: Ints, column: Sequence[object]) -> Ints:
            fresh: Ints = np.array(column, np.int64)
            return fresh if is_first else np.concatenate([old, fresh])

        now_able: Bools = np.array(able, bool)
        self.able = now_able if is_first else np.concatenate([self.able, now_able])
        self.memory = grown(self.memory, memory)
        self.seconds = grown(self.seconds, seconds)
        self.taken = grown(self.taken, taken)
        self.parts = grown(self.parts, parts)
        self.price = grown(self.price, price)
        self.is_priced = bool(self.price.any())
        if needs.cpu_by_gpus or needs.memory_by_gpus:
            before = np.empty((0, 2, 0), np.int64) if self.more is None else self.more
            self.more = grown(before, more)
        self.usable = self.parts[:, 0] < NEVER
        self._count = len(kinds)
        self._bound(kinds)

    def _bound(self, kinds: list[Node | None]) -> None:
        needs, request = self._shape.requirements, self._request
        self.least = np.zeros((NEEDED, len(kinds)))
        self.least[CPU] = needs.cpu_milli
        self.least[MEMORY] = self.memory
        self.least[DISK] = needs.disk_bytes or 0
        if request is not None and not is_slice(request):
            self.least[IDLE] = request.count
            lent = [lent_gpus(node) for node in kinds]
            self.is_uneven = bool((self.able & (self.usable.sum(1) < lent)).any())

    def _of_kind(self, node: Node | None, width: int) -> tuple[object, ...]:
        request = self._request
        never = [NEVER] * width
        nothing = [0] * width
        unable = (False, NEVER, 0, 0, (never, never, never), 0, (nothing, nothing))
        if node is None or unfit_for_any_owner(node, self._shape) is not None:
            return unable
        share, vram, need, taken = list(never), list(never), list(never), 0
        needs = self._shape.requirements
        costs = 0 if request is not None else cpu_price(node, needs.cpu_milli, self._shape)
        memory, more = least_memory(node, needs), (list(nothing), list(nothing))
        if request is not None:
            lent = node.offer.gpus[:MAX_GPUS]
            cap = needs.max_price_microcredits
            cards = {gpu.index: gpu for gpu in lent if usable(node, gpu, request, cap, self._shape)}
            if len(cards) < request.count:
                return unable
            taken = min(gpu.memory_bytes for gpu in cards.values()) >> 20
            if is_priced(node.offer):
                costs = min(gpu_price(node, gpu, request, self._shape) for gpu in cards.values())
            for place, gpu in enumerate(lent):
                if gpu.index in cards:
                    part = slice_of(gpu, request)
                    share[place], vram[place] = part.share_milli, part.memory_bytes
                    by_memory = GPU * part.memory_bytes // max(1, gpu.memory_bytes)
                    need[place] = max(part.share_milli, by_memory)
                    milli = request.count * part.share_milli
                    more[0][place] = most_cpu(node, needs, milli) - needs.cpu_milli
                    more[1][place] = most_memory(node, needs, milli) - memory
        seconds = 0 if self._shape.environment in node.offer.environments else PREPARATION
        parts = (share, vram, need)
        return True, memory, seconds, taken, parts, price_step(costs), more


def price_step(price: int) -> int:
    """Price in steps of about 3 %, at most `MAX_PRICE_STEP`; monotone."""
    if price < 32:
        return max(0, price)
    octave = price.bit_length() - 6
    return min(MAX_PRICE_STEP, (octave << 5) + (price >> octave))


class PlacementRow:
    __slots__ = ("cost", "facts", "full_at", "generation", "gpu", "key", "read", "request", "shape")

    def __init__(
        self,
        shape: Shape,
        request: GpuRequest | None,
        cost: StartCost | None,
        facts: KindFacts | None = None,
    ) -> None:
        self.shape = shape
        self.request = request
        self.cost = cost  # None: no start loses any time
        self.facts = KindFacts(shape, request) if facts is None else facts
        self.full_at = (-1, -1)  # the board's generation and change number when no slot had room
        self.generation = -1
        self.read = 0  # number of the board's last change that was read
        self.key: Ints = np.empty(0, np.int64)
        self.gpu: NDArray[np.int16] = np.empty(0, np.int16)


class RowCache:
    """Shapes with equal requests and allowed nodes share rows; predicted run times are looked up in each pass."""

    def __init__(self, state: State, board: Board) -> None:
        self._state, self._board = state, board
        self._rows: dict[tuple[object, ...], list[PlacementRow]] = {}
        self._facts: dict[tuple[object, ...], list[KindFacts]] = {}
        self._count = 0
        self._by_shape: dict[int, tuple[Shape, list[PlacementRow], int]] = {}
        self._pass = 1
        self._is_uneven = False  # some nodes fail more often than others
        self._has_audiences = False
        self._favoured: set[tuple[UserId | None, int | None]] = set()  # (user, None), (None, team)

    def end_pass(self) -> None:
        self._pass += 1

    def restrict(self) -> None:
        if not self._has_audiences:
            self._has_audiences = True
            self._forget()

    def favour(self, node: Node) -> None:
        """Keep separate rows for accounts to which this priced node is free."""
        free = node.free_for
        found: set[tuple[UserId | None, int | None]] = {(node.owner, None)}
        if free is not None:
            found |= {(UserId(user), None) for user in free.users}
            found |= {(None, team) for team in free.teams}
        if found <= self._favoured:
            return
        self._favoured |= found
        self._by_shape.clear()
        shared = (row.shape for rows in self._rows.values() for row in rows)
        if any(map(self._is_favoured, shared)):  # others may use rows made for this account
            self._forget()

    def _is_favoured(self, shape: Shape) -> bool:
        favoured = self._favoured
        return bool(favoured) and ((shape.user, None) in favoured or (None, shape.team) in favoured)

    def of(self, shape: Shape) -> list[PlacementRow]:
        is_uneven = len(self._board.mtbfs) > 1
        if is_uneven != self._is_uneven:
            self._is_uneven = is_uneven
            self._by_shape.clear()
        rows = self.of_this_pass(shape)
        if rows is not None:
            return rows
        cost = None
        if is_uneven or shape.data or fields.environment_kind(shape.environment) in _PREPARED:
            cost = start_cost(shape, self._state.predictions.of(shape))
        rows = self._shared(shape, cost)
        if len(self._by_shape) >= MAX_SHAPES:
            self._by_shape.clear()
        self._by_shape[id(shape)] = (shape, rows, 0 if cost is None else self._pass)
        return rows

    def of_this_pass(self, shape: Shape) -> list[PlacementRow] | None:
        known = self._by_shape.get(id(shape))
        if known is not None:
            asked, rows, valid_in = known
            if asked is shape and valid_in in (0, self._pass):
                return rows
        return None

    def of_earlier_pass(self, shape: Shape) -> list[PlacementRow] | None:
        """Rows of an earlier pass: scores may be outdated, free room is not."""
        known = self._by_shape.get(id(shape))
        if known is not None:
            asked, rows, valid_in = known
            if asked is shape and valid_in not in (0, self._pass):
                return rows
        return None

    def _shared(self, shape: Shape, cost: StartCost | None) -> list[PlacementRow]:
        needs = shape.requirements
        is_open_to_all = needs.tier is not Tier.NONE and not self._has_audiences
        is_open_to_all = is_open_to_all and not self._is_favoured(shape)
        is_anyones = is_open_to_all and not any(is_slice(request) for request in needs.gpu)
        whose = None if is_anyones else (shape.user, shape.team)
        key = (needs, shape.environment, whose, cost, shape.data)
        rows = self._rows.get(key)
        if rows is None:
            if self._count * (self._board.columns.size + 64) >= MAX_CELLS:
                self._forget()
            requests = needs.gpu or (None,)
            if is_anyones or not is_open_to_all:
                rows = [PlacementRow(shape, request, cost) for request in requests]
            else:
                pairs = zip(requests, self._facts_of(shape), strict=True)
                rows = [PlacementRow(shape, request, cost, facts) for request, facts in pairs]
            self._rows[key] = rows
            self._count += len(rows)
        return rows

    def _facts_of(self, shape: Shape) -> list[KindFacts]:
        needs = shape.requirements
        key = (needs, shape.environment)
        facts = self._facts.get(key)
        if facts is None:
            facts = self._facts[key] = [KindFacts(shape, request) for request in needs.gpu]
        return facts

    def _forget(self) -> None:
        self._rows.clear()
        self._facts.clear()
        self._count = 0
        self._by_shape.clear()
