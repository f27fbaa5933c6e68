"""What one alternative of a shape knows about the nodes: which kinds could run it, what it would take there, how good each is."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gpool.core.model import GpuRequest, Node, Shape
from gpool.core.scheduler.place.board import CPU, DISK, IDLE, MAX_GPUS, MEMORY, NEEDED, Board
from gpool.core.scheduler.place.fit import (
    cpu_price,
    gpu_price,
    is_slice,
    memory_for,
    slice_of,
    unfit,
    usable,
)
from gpool.core.scheduler.place.fragmentation import Floats, Ints
from gpool.core.scheduler.place.remnants import GPU
from gpool.core.scheduler.place.start_cost import MAKING, Stakes

NEVER = 1 << 60
MAX_PRICE_STEP = (1 << 11) - 1


class Row:
    """One alternative of one shape: for each slot how good it is, and which GPU a slice would be of."""

    __slots__ = (
        "able",
        "full",
        "generation",
        "gpu",
        "is_priced",
        "is_uneven",
        "key",
        "kinds",
        "learnt_in",
        "least",
        "like",
        "memory",
        "parts",
        "price",
        "read",
        "request",
        "seconds",
        "shape",
        "stakes",
        "taken",
        "usable",
    )

    def __init__(
        self,
        shape: Shape,
        request: GpuRequest | None,
        stakes: Stakes | None,
        like: Row | None = None,
    ) -> None:
        self.shape = shape
        self.like = like  # another user's: what the kinds mean is the same for both
        self.request = request
        self.full = (-1, -1)  # the board's generation and log when there was no room
        self.stakes = stakes  # None: nowhere does a start lose any time
        self.generation = -1
        self.learnt_in = -1  # the board's generation whose kinds these are
        self.read = 0
        self.kinds = 0
        self.key: Ints = np.empty(0, np.int64)
        self.gpu: NDArray[np.int16] = np.empty(0, np.int16)
        self.able: NDArray[np.bool_] = np.empty(0, bool)  # by kind: could ever run it
        self.memory: Ints = np.empty(0, np.int64)  # ... memory it takes there, or never enough
        self.seconds: Ints = np.empty(0, np.int64)  # ... until it starts
        self.taken: Ints = np.empty(0, np.int64)  # ... GPU memory of a card
        self.usable: NDArray[np.bool_] = np.empty((0, 0), bool)  # by kind and GPU
        self.price: Ints = np.empty(0, np.int64)  # ... what it costs in an hour, as a step
        self.is_priced = False  # anywhere
        self.least: Floats = np.empty((NEEDED, 0))  # by kind: what a node must have free
        self.is_uneven = False  # kinds of which only some GPUs will do: idle ones are not enough
        # A slice's share, its memory, and what it takes of the free thousandths; never enough of an unusable GPU.
        self.parts: Ints = np.empty((0, 3, 0), np.int64)

    def learn(self, board: Board) -> None:
        """What the kinds of nodes mean for this row; asked once for each kind."""
        kinds = board.kinds
        if self.learnt_in != board.generation:  # kinds are others, or GPUs more
            self.learnt_in, self.kinds = board.generation, 0
        if self.kinds == len(kinds):
            return
        if self.like is not None:
            self._learn_from(self.like, board)
            return
        new = [self._of_kind(node, board.width) for node in kinds[self.kinds :]]
        columns = list(zip(*new, strict=True))
        is_first = self.kinds == 0

        def grown(old: Ints, column: int) -> Ints:
            fresh: Ints = np.array(columns[column], np.int64)
            return fresh if is_first else np.concatenate([old, fresh])

        able: NDArray[np.bool_] = np.array(columns[0], bool)
        self.able = able if is_first else np.concatenate([self.able, able])
        self.memory = grown(self.memory, 1)
        self.seconds = grown(self.seconds, 2)
        self.taken = grown(self.taken, 3)
        self.parts = grown(self.parts, 4)
        self.price = grown(self.price, 5)
        self.is_priced = bool(self.price.any())
        self.usable = self.parts[:, 0] < NEVER
        self.kinds = len(kinds)
        self._bound(kinds)

    def _learn_from(self, like: Row, board: Board) -> None:
        like.learn(board)
        self.able, self.memory, self.seconds, self.taken = (
            like.able,
            like.memory,
            like.seconds,
            like.taken,
        )
        self.parts, self.price, self.is_priced = like.parts, like.price, like.is_priced
        self.usable, self.least, self.is_uneven = like.usable, like.least, like.is_uneven
        self.kinds = like.kinds

    def _bound(self, kinds: list[Node | None]) -> None:
        needs, request = self.shape.requirements, self.request
        self.least = np.zeros((NEEDED, len(kinds)))
        self.least[CPU] = needs.cpu_milli
        self.least[MEMORY] = self.memory
        self.least[DISK] = needs.disk_bytes or 0
        if request is not None and not is_slice(request):
            self.least[IDLE] = request.count
            lent = [0 if node is None else min(len(node.offer.gpus), MAX_GPUS) for node in kinds]
            self.is_uneven = bool((self.able & (self.usable.sum(1) < lent)).any())

    def _of_kind(self, node: Node | None, width: int) -> tuple[object, ...]:
        request = self.request
        never = [NEVER] * width
        unable = (False, NEVER, 0, 0, (never, never, never), 0)
        if node is None or unfit(node, self.shape) is not None:
            return unable
        ready = self.shape.environment in node.offer.environments
        share, vram, need, taken = list(never), list(never), list(never), 0
        needs = self.shape.requirements
        costs = 0 if request is not None else cpu_price(node, needs.cpu_milli)
        if request is not None:
            lent = node.offer.gpus[:MAX_GPUS]
            cap = needs.max_price_microcredits
            cards = {gpu.index: gpu for gpu in lent if usable(node, gpu, request, cap)}
            if len(cards) < request.count:
                return unable
            taken = min(gpu.memory_bytes for gpu in cards.values()) >> 20
            if node.offer.price_microcredits:
                costs = min(gpu_price(node, gpu, request) for gpu in cards.values())
            for place, gpu in enumerate(lent):
                if gpu.index in cards:
                    part = slice_of(gpu, request)
                    share[place], vram[place] = part.share_milli, part.memory_bytes
                    by_memory = GPU * part.memory_bytes // max(1, gpu.memory_bytes)
                    need[place] = max(part.share_milli, by_memory)
        seconds = 0 if ready else MAKING
        return True, memory_for(node, needs), seconds, taken, (share, vram, need), price_step(costs)


def price_step(price: int) -> int:
    """Prices in steps of about a thirtieth: below `MAX_PRICE_STEP`, and the dearer the higher."""
    if price < 32:
        return max(0, price)
    octave = price.bit_length() - 6
    return min(MAX_PRICE_STEP, (octave << 5) + (price >> octave))
