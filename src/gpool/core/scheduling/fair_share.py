"""How much of the pool each team and each user has: dominant shares now, and lately under contention. It counts; orders compare.

**Who is compared.** A tenant is a team, or a user who works for none. Tenants are compared first, the users of one team
after that: a team of a thousand users has one share, not a thousand.

**What is compared.** The dominant share: of GPUs, CPU and memory, the one of which a holder has most, in millionths of what
the pool lends, divided by its weight. To what it holds now comes what it had lately *while others waited*, worn off with a
half-life (`HALF_LIFE`): who took large pieces gives way afterwards, and the roundings of small pools even out. What was taken
while nobody else wanted it is free, and who was away comes back with no credit: in any hour in which all have tasks waiting,
all get their share.

What is held is truth, rebuilt from the store with the rest. What was held lately is a hint: lost in a rebuild, which makes
everybody start even.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpool.core.ids import NodeId
from gpool.core.model import SECOND, Allocation, Instant, Node, Shape, Span
from gpool.core.scheduling.limits import Holder, gpus_of

HALF_LIFE = Span(1800 * SECOND)
ALL = 1_000_000
MAX_REMEMBERED = 10_000
Amounts = tuple[int, int, int]  # thousandths of GPUs, of CPUs, bytes of memory


def tenant_of(shape: Shape) -> Holder:
    return ("user", shape.user) if shape.team is None else ("team", shape.team)


def amounts_of(allocation: Allocation) -> Amounts:
    return gpus_of(allocation), allocation.cpu_milli, allocation.memory_bytes


def total(amounts: Iterable[Amounts]) -> Amounts:
    gpus = cpus = memory = 0
    for each in amounts:
        gpus, cpus, memory = gpus + each[0], cpus + each[1], memory + each[2]
    return gpus, cpus, memory


class Shares:
    """What holders have of what there is."""

    __slots__ = ("_all", "_held", "_lent", "_nodes")

    def __init__(self) -> None:
        self._lent, self._all = [0, 0, 0], [0, 0, 0]
        self._nodes: dict[NodeId, Amounts] = {}
        self._held: dict[Holder, list[int]] = {}

    def put(self, node: Node) -> None:
        self.remove(node.id)
        offer = node.offer
        lent = (1000 * len(offer.gpus), offer.cpu_milli, offer.memory_bytes)
        self._nodes[node.id] = lent
        self._add(self._lent, lent, 1)

    def remove(self, node: NodeId) -> None:
        lent = self._nodes.pop(node, None)
        if lent is not None:
            self._add(self._lent, lent, -1)

    def take(self, shape: Shape, amounts: Amounts) -> None:
        self._add(self._all, amounts, 1)
        for holder in {tenant_of(shape), ("user", shape.user)}:
            self._add(self._held.setdefault(holder, [0, 0, 0]), amounts, 1)

    def give(self, shape: Shape, amounts: Amounts) -> None:
        self._add(self._all, amounts, -1)
        for holder in {tenant_of(shape), ("user", shape.user)}:
            held = self._held.get(holder)
            if held is not None:
                self._add(held, amounts, -1)
                if not any(held):
                    del self._held[holder]

    @staticmethod
    def _add(total: list[int], amounts: Amounts, sign: int) -> None:
        total[0] += sign * amounts[0]
        total[1] += sign * amounts[1]
        total[2] += sign * amounts[2]

    def of(
        self, holder: Holder, weight_milli: int = 1000, more: Amounts | None = None
    ) -> int:
        """Its dominant share, in millionths of the pool for a weight of one; `more` is what it would have besides."""
        held = self._held.get(holder)
        if held is None and more is None:
            return 0
        gpu, cpu, memory = held or (0, 0, 0)
        if more is not None:
            gpu, cpu, memory = gpu + more[0], cpu + more[1], memory + more[2]
        gpus, cpus, memories = self._lent
        share = max(
            gpu * ALL // gpus if gpus else 0,
            cpu * ALL // cpus if cpus else 0,
            memory * ALL // memories if memories else 0,
        )
        return share * 1000 // max(1, weight_milli)

    @property
    def free_gpus(self) -> int:
        """Thousandths that nobody holds, wherever they are."""
        return self._lent[0] - self._all[0]

    def truth(self) -> Mapping[Holder, list[int]]:
        return self._held
