"""What must be so after every step of an interleaving of gangs, read from the store's rows with SQL of its own.

It shares no code with what it judges: it knows what was asked for, what each node has, and what really runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from gpool.core.model import Allocation, Offer, TaskStatus
from gpool.core.scheduler.state.queue import epoch_of
from gpool.core.scheduler.state.state import State
from gpool.server.store.protocol import Operation, Row, Statement

FINAL = {status.value for status in TaskStatus if status.is_final}


class Broken(Exception):
    """A promise was broken; `kind` names it."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(f"{kind}: {what}")
        self.kind = kind


KINDS = (
    "partial_gang",
    "double_booked",
    "two_epochs",
    "given_away",  # what still runs
    "state_differs",
    "deadlock",
    "server_fault",
)


@dataclass(slots=True)
class Use:
    """What is taken of one node."""

    cpu_milli: int = 0
    disk_bytes: int = 0
    gpus: dict[int, list[int]] = field(default_factory=dict)  # index: share, memory
    numbers: dict[int, str] = field(default_factory=dict)

    def take(self, cpu_milli: int, disk: int, slices: Iterable[tuple[int, int, int]]) -> None:
        self.cpu_milli += cpu_milli
        self.disk_bytes += disk
        for index, memory, share in slices:
            used = self.gpus.setdefault(index, [0, 0])
            used[0] += share
            used[1] += memory

    def too_much(self, offer: Offer) -> str:
        sizes = {gpu.index: gpu.memory_bytes for gpu in offer.gpus}
        for index, (share, memory) in self.gpus.items():
            if share > 1000 or memory > sizes[index]:
                return f"GPU {index}: {share} thousandths and {memory} bytes"
        if self.disk_bytes > offer.disk_bytes:
            return f"{self.disk_bytes} bytes of disk"
        return f"{self.cpu_milli} CPU" if self.cpu_milli > offer.cpu_milli else ""


def look() -> Operation[tuple[list[Row], list[Row]]]:
    """Every task that waits or holds, and every member there is."""
    tasks = yield Statement(
        "SELECT id, epoch, status, holding, node_id, allocation_number, allocation FROM tasks "
        "WHERE status = 'queued' OR holding = 1"
    )
    members = yield Statement(
        "SELECT task_id, epoch, rank, node_id, allocation_number, allocation, holding FROM members"
    )
    return tasks, members


def unended() -> Operation[list[Row]]:
    rows = yield Statement("SELECT id, status, holding FROM tasks")
    return [row for row in rows if row[1] not in FINAL or row[2]]


class Judge:
    """`wanted`: by task how many nodes it asked for."""

    def __init__(self, offers: Mapping[int, Offer]) -> None:
        self.offers = offers
        self.wanted: dict[int, int] = {}
        self.running: dict[tuple[int, int, int], Allocation] = {}  # node, task, epoch: really

    # ---- the rows

    def check(self, rows: tuple[list[Row], list[Row]], state: State | None) -> None:
        tasks, members = rows
        by_task: dict[int, list[Row]] = {}
        for row in members:
            by_task.setdefault(row[0], []).append(row)
        uses: dict[int, Use] = {}
        held: dict[int, list[tuple[int, int]]] = {}
        epochs: dict[int, int] = {}
        waiting: dict[int, int] = {}
        for id_, epoch, status, holding, node, number, allocation in tasks:
            if not holding:
                waiting[id_] = epoch
                continue
            if status == TaskStatus.QUEUED.value:
                raise Broken("partial_gang", f"task {id_} waits and holds")
            if self.wanted[id_] == 1:
                parts = [(node, number, allocation)]
            else:
                parts = self._members(id_, epoch, by_task.get(id_, []))
            held[id_] = [(part[0], part[1]) for part in parts]
            epochs[id_] = epoch
            for part in parts:
                self._book(uses, id_, *part)
        for id_, parts_of in by_task.items():
            if id_ not in held and any(row[6] for row in parts_of):
                raise Broken("partial_gang", f"members of task {id_} hold, and it does not")
        for node, use in uses.items():
            wrong = use.too_much(self.offers[node])
            if wrong:
                raise Broken("double_booked", f"node {node}, {wrong} by its leases")
        let_go = {(row[3], row[0]) for row in members if not row[6]}
        for node, id_, epoch in self.running:
            if epochs.get(id_) != epoch or (self.wanted[id_] > 1 and (node, id_) in let_go):
                raise Broken("given_away", f"task {id_} epoch {epoch} still runs on node {node}")
        if state is not None:
            self._compare(state, held, waiting)

    def _members(self, task: int, epoch: int, rows: list[Row]) -> list[tuple[int, int, str]]:
        """Those of a gang that holds: all of them, each on a node of its own, all of one site."""
        current = [row for row in rows if row[1] == epoch]
        nodes = {row[3] for row in current}
        wanted = self.wanted[task]
        if len(nodes) != wanted or {row[2] for row in current} != set(range(wanted)):
            raise Broken("partial_gang", f"task {task} epoch {epoch} is on {sorted(nodes)} only")
        sites = {self.offers[node].site for node in nodes}
        if len(sites) > 1 or "" in sites:
            raise Broken("partial_gang", f"task {task} epoch {epoch} is on the sites {sites}")
        if any(row[6] and row[1] != epoch for row in rows):
            raise Broken("two_epochs", f"a member of task {task} holds under an old epoch")
        return [(row[3], row[4], row[5]) for row in current]

    @staticmethod
    def _book(uses: dict[int, Use], task: int, node: int, number: int, allocation: str) -> None:
        use = uses.setdefault(node, Use())
        if number in use.numbers:
            if use.numbers[number] != allocation:
                raise Broken("double_booked", f"node {node} has two allocations {number}: {task}")
            return  # stands in line
        use.numbers[number] = allocation
        use.take(*_parsed(allocation))

    @staticmethod
    def _compare(
        state: State, held: dict[int, list[tuple[int, int]]], waiting: dict[int, int]
    ) -> None:
        seen = {
            int(id_): sorted(
                (int(part.node), part.allocation.number) for part in (line, *line.members)
            )
            for id_, line in state.held.items()
        }
        if seen != {id_: sorted(parts) for id_, parts in held.items()}:
            raise Broken("state_differs", f"held: {seen}, and the store says {held}")
        queued: dict[int, int] = {}
        for entry in state.queues.shapes():
            queued.update({e[1]: epoch_of(e) for e in entry.queue.entries()})
        if queued != waiting:
            raise Broken("state_differs", f"waiting: {queued}, and the store says {waiting}")

    # ---- what really runs

    def starts(self, node: int, task: int, epoch: int, allocation: Allocation) -> None:
        for there, other, under in self.running:
            if other == task and under != epoch:
                raise Broken(
                    "two_epochs", f"task {task} runs under {under} at {there}, and {epoch}"
                )
        self.running[node, task, epoch] = allocation
        use = Use()
        for (there, _, _), held in self.running.items():
            if there == node:
                use.take(
                    held.cpu_milli,
                    held.disk_bytes,
                    [(part.gpu_index, part.memory_bytes, part.share_milli) for part in held.slices],
                )
        wrong = use.too_much(self.offers[node])
        if wrong:
            raise Broken("double_booked", f"node {node}, {wrong} by what runs there")

    def ends(self, node: int, task: int, epoch: int) -> None:
        self.running.pop((node, task, epoch), None)


@lru_cache(maxsize=4096)
def _parsed(text: str) -> tuple[int, int, list[tuple[int, int, int]]]:
    cpu, _, slices, *disk = json.loads(text)
    return cpu, sum(disk), [(index, memory, share) for index, memory, share, *_ in slices]
