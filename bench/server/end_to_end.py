"""From a POST to a durable lease in an agent's hands: how many a second, and how long one takes, with 1,213 nodes connected.

python -m bench.end_to_end [--nodes 1213] [--seconds 15] [--rate 1500] [--keyed] [--postgres] [--pods FILE] [--quick] [--json FILE]

Three processes: a real server (SQLite, `synchronous=FULL`, or PostgreSQL), one with all nodes (a WebSocket and a proof each;
leases are held for a few seconds, then reported as finished), and this one, which submits by HTTP as several users. Nodes and tasks
have the sizes of the openb trace where it is at hand, else of a mix made up here. A lease counts when its node has received it:
it was committed before. *flood* submits as fast as the server takes it, never more than `WINDOW` ahead of the leases;
*paced* submits at the given rate whatever happens, and its times are those of every task, from its POST on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from ctypes import c_double
from dataclasses import asdict, dataclass
from hashlib import sha256
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from statistics import quantiles
from time import process_time
from typing import Any

import msgspec
import uvloop
from bench.doors import Door
from bench.growth import postgres
from bench.openb import Machine, Pod, as_nodes, read_machines, read_pods

from gpool.agent.channel import AgentCredentials, NodeIdentity
from gpool.agent.daemon import boot_clock
from gpool.core.ids import NodeId, UserId, decode, encode
from gpool.core.model import GIB, GpuRequest, Offer, Permission, Requirements, Shape, TaskKind
from gpool.core.specs.gpu import format as spelt
from gpool.server.app import open_server
from gpool.server.identity import authorization
from gpool.server.settings import Settings
from gpool.server.store.operations import nodes
from gpool.server.store.operations.identity import users
from gpool.server.store.values import User
from gpool.transfer.node_proofs import NodeKey, public_text
from tests.tools.processes import Pool, cpu_s
from tests.tools.scripted_crowd import Crowd, Script

OPENB = Path(__file__).resolve().parents[3] / "shared" / "data" / "openb"
LEASES_PER_S = 1500
USERS = 8
CONNECTIONS = 16  # of each user
WINDOW = 2000  # tasks submitted and not leased, in a flood
WARM_UP_S = 3.0
DRAINED_WITHIN_S = 600.0
BATCHES = {"singles": (0.0, 1), "mixed": (0.1, 20), "batches": (1.0, 50)}
"""How submissions come: what part of them is a batch, and of how many tasks."""


# ---- the pool


def machines_of(count: int) -> list[Machine]:
    """Those of openb; else of the same kinds."""
    path = OPENB / "openb_node_list_gpu_node.csv.gz"
    if path.exists():
        found = read_machines(path)
    else:
        kinds = [(96_000, 8, "G2")] * 5 + [(96_000, 2, "T4")] * 3 + [(64_000, 2, "P100")]
        found = [Machine(cpu, 384 * GIB, gpus, model) for cpu, gpus, model in kinds] * 200
    return (found * (count // len(found) + 1))[:count]


def pods_of(path: Path) -> list[Pod]:
    if path.exists():
        machines = {*machines_of(len(read_machines(OPENB / "openb_node_list_gpu_node.csv.gz")))}
        return [pod for pod in read_pods(path) if _fits_any(pod.shape.requirements, machines)]
    dice = Random(7)
    pods = []
    for number in range(300):
        share = dice.choice((1000, 1000, 500, dice.randrange(50, 1000, 10)))
        request = GpuRequest(1 if share < 1000 else dice.choice((1, 1, 2, 8)), share_milli=share)
        needs = Requirements((request,), dice.randrange(1, 17) * 1000, dice.randrange(1, 65) * GIB)
        shape = Shape(UserId(1), needs, 0, TaskKind.COMMAND, "default", "pod")
        pods.append(Pod(number, shape, frozenset(), request.count, share))
    return pods


def _fits_any(needs: Requirements, machines: Iterable[Machine]) -> bool:
    """False for the pods of the trace that ask for a model and more than any of its machines has."""
    return bool(needs.gpu) and any(
        machine.cpu_milli >= (needs.cpu_milli or 0)
        and machine.memory_bytes >= (needs.memory_bytes or 0)
        and any(request.model in (None, machine.model) for request in needs.gpu)
        for machine in machines
    )


@dataclass(frozen=True, slots=True)
class Member:
    """One node as the other process needs it."""

    seed: bytes
    node: str
    server: str
    offer: Offer


@dataclass(frozen=True, slots=True)
class Prepared:
    keys: list[str]  # of the users
    members: list[Member]


async def prepare(data: Path, url: str | None, machines: list[Machine]) -> Prepared:
    """Accounts and nodes, as if they had joined: that has its own rate limits, and is not measured."""
    server = await open_server(Settings(data=data, database_url=url))
    keys = []
    for number in range(USERS):
        id_ = UserId(server.ids.next())
        user = User(id_, f"user{number}", frozenset({Permission.CONSUMER}), server.now)
        await server.store.write(users.create_user(user))
        key = authorization.fresh(authorization.USER_PREFIX)
        add = users.add_key(server.ids.next(), id_, "bench", authorization.hashed(key), server.now)
        await server.store.write(add)
        keys.append(key)
    members = []
    owner = await server.store.read(users.user_by_name("operator"))
    assert owner is not None
    for node in as_nodes(machines, Random(1)):
        seed = sha256(node.name.encode()).digest()
        id_, gpu_ids = NodeId(server.ids.next()), server.ids.take(len(node.offer.gpus))
        public = public_text(NodeKey(seed).public)
        offer = Offer(
            node.offer.cpu_milli,
            node.offer.memory_bytes,
            64 * GIB,
            node.offer.gpus,
            hostname=node.name,
        )
        await server.store.write(
            nodes.create_node(
                id_, node.name, owner.id, None, "", offer, gpu_ids, server.now, public
            )
        )
        members.append(Member(seed, encode("node", id_), server.gate.name, offer))
    await server.identity.close()
    await server.store.close()
    return Prepared(keys, members)


# ---- the nodes, in a process of their own


@dataclass(frozen=True, slots=True)
class Stand:
    address: str
    members: list[Member]
    hold_s: float  # on average


def stand_in(stand: Stand, count: Any, pipe: Connection) -> None:
    """All nodes; answers each message with the leases received so far: {task: when}."""
    uvloop.run(_stand_in(stand, count, pipe))


async def _stand_in(stand: Stand, count: Any, pipe: Connection) -> None:
    address, members = stand.address, stand.members
    script = Script((stand.hold_s / 3, stand.hold_s * 5 / 3), Random(3))
    crowd = Crowd(address, script)
    running = asyncio.create_task(crowd.run())
    await crowd.connect(
        [
            (AgentCredentials(NodeKey(m.seed), NodeIdentity(m.node, m.server), boot_clock), m.offer)
            for m in members
        ]
    )
    pipe.send("ready")
    asked = asyncio.Event()
    asyncio.get_running_loop().add_reader(pipe.fileno(), asked.set)
    os.set_blocking(pipe.fileno(), True)  # the loop made it otherwise; what we tell may be long
    while True:
        try:
            async with asyncio.timeout(0.02):
                await asked.wait()
        except TimeoutError:
            count.value = len(script.received)
            continue
        asked.clear()
        if pipe.recv() == "stop":
            break
        pipe.send((script.received, script.ended, script.refused[:3]))
        script.received = {}
    running.cancel()
    crowd.close()


class Nodes:
    def __init__(self, stand: Stand) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._count = context.Value(c_double, 0.0, lock=False)
        self._process = context.Process(
            target=stand_in, args=(stand, self._count, theirs), daemon=True
        )
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def ready(self) -> None:
        assert self._pipe.recv() == "ready"

    @property
    def received(self) -> int:
        """Since last asked, a moment ago."""
        return int(self._count.value)

    def taken(self) -> dict[int, float]:
        """What was received since last asked."""
        self._pipe.send("tell")
        received, _, refused = self._pipe.recv()
        assert not refused, refused
        found: dict[int, float] = received
        return found

    def stop(self) -> None:
        with suppress(BrokenPipeError):  # it may have ended by itself
            self._pipe.send("stop")
            self._process.join(10)
        self._process.kill()
        self._process.join()
        self._process.close()
        self._pipe.close()


# ---- submitting


def documents(pods: list[Pod], how: str, dice: Random) -> Iterator[tuple[int, bytes]]:
    """Submissions without end: how many tasks, and the body."""
    part, size = BATCHES[how]
    made: dict[tuple[int, int], bytes] = {}
    while True:
        pod = dice.choice(pods)
        count = size if dice.random() < part else 1
        known = made.get((pod.number, count))
        if known is None:
            needs = pod.shape.requirements
            known = made[pod.number, count] = msgspec.json.encode(
                {
                    "command": ["true"],
                    "gpu": spelt(needs.gpu),
                    "cpus": needs.cpu_milli / 1000,
                    "memory": f"{max(needs.memory_bytes or 0, 1 << 20) >> 20}MiB",
                    "copies": count,
                }
            )
        yield count, known


@dataclass(slots=True)
class Load:
    """What was submitted: every task's time of POST, by the clock all processes share."""

    sent: dict[str, float]
    tasks: int = 0
    asked: int = 0


async def flood(doors: list[Door], work: Iterator[tuple[int, bytes]], load: Load, run: Run) -> None:
    loop = asyncio.get_running_loop()
    ends = loop.time() + run.seconds

    async def one(door: Door) -> None:
        while loop.time() < ends:
            if load.tasks - run.nodes.received > WINDOW:
                await asyncio.sleep(0.01)
                continue
            count, body = next(work)
            load.tasks += count
            await _submit(door, count, body, load, loop.time())

    tasks = [asyncio.create_task(one(door)) for door in doors]
    try:
        await asyncio.gather(*tasks)
    finally:
        await ended(tasks)


async def pace(doors: list[Door], work: Iterator[tuple[int, bytes]], load: Load, run: Run) -> None:
    """Evenly, whatever the server does: a task's time counts from when it was due."""
    loop = asyncio.get_running_loop()
    idle: asyncio.Queue[Door] = asyncio.Queue()
    for door in doors:
        idle.put_nowait(door)
    pending: set[asyncio.Task[None]] = set()

    async def one(door: Door, count: int, body: bytes, due: float) -> None:
        try:
            await _submit(door, count, body, load, due)
        finally:
            idle.put_nowait(door)

    due = began = loop.time()
    try:
        while due < began + run.seconds:
            count, body = next(work)
            wait = due - loop.time()
            if wait > 0:
                await asyncio.sleep(wait)
            door = await idle.get()
            load.tasks += count
            task = asyncio.create_task(one(door, count, body, due))
            pending.add(task)
            task.add_done_callback(pending.discard)
            due += count / run.rate
        await asyncio.gather(*pending)
    finally:
        await ended([*pending])


async def ended(tasks: Sequence[asyncio.Task[None]]) -> None:
    """None outlives the first that fails: it would hold a connection."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _submit(door: Door, count: int, body: bytes, load: Load, due: float) -> None:
    ids = await door.submit(body)
    load.asked += 1
    assert len(ids) == count
    for id_ in ids:
        load.sent[id_] = due


# ---- measuring


@dataclass(frozen=True, slots=True)
class Run:
    nodes: Nodes
    pool: Pool
    doors: list[Door]
    pods: list[Pod]
    seconds: float
    rate: float


@dataclass(frozen=True, slots=True)
class Figures:
    mode: str
    submissions: str
    offered_per_s: int
    leases_per_s: int
    p50_ms: float
    p99_ms: float
    requests_per_s: int
    decisions_per_s: int  # of the planner's own time
    server_cpu_us: float  # a lease, all in all
    server_cores: float
    passes_per_s: int
    waiting: int  # tasks, in the end
    nodes_cpu_us: float  # a lease, in the process of the nodes
    load_cpu_us: float  # ... and in this one
    shapes: int
    load: float


async def measure(run: Run, mode: str, how: str, seed: int) -> Figures:
    load = Load({})
    run.nodes.taken()
    work = documents(run.pods, how, Random(seed))
    loop = asyncio.get_running_loop()
    began = loop.time()
    acting = asyncio.create_task((flood if mode == "flood" else pace)(run.doors, work, load, run))
    try:
        await asyncio.sleep(WARM_UP_S)
        first, before, asked = loop.time(), used(run), load.asked
        await asyncio.sleep(began + run.seconds - loop.time())
        last, after = loop.time(), used(run)
        requests, submitted = load.asked - asked, load.tasks
        await acting
    finally:
        await ended([acting])
    await asyncio.sleep(1.0)
    received = run.nodes.taken()
    times = [(received.get(decode("task", id_)), at) for id_, at in load.sent.items()]
    counted = sum(1 for at in received.values() if first <= at < last)
    took = [
        ((at or loop.time()) - due) * 1e3 for at, due in times if first <= due < last
    ]  # what never came counts as long as we waited
    cuts = quantiles(took, n=100) if len(took) > 1 else [0.0] * 99
    span, leases = last - first, max(1, counted)
    planned = after.planning_s - before.planning_s
    cpu = after.server_s - before.server_s
    return Figures(
        mode,
        how,
        round(submitted / (last - began)),
        round(counted / span),
        round(cuts[49], 1),
        round(cuts[98], 1),
        round(requests / span),
        round((after.granted - before.granted) / planned) if planned else 0,
        round(cpu / leases * 1e6, 1),
        round(cpu / span, 2),
        round((after.passes - before.passes) / span),
        round(after.queued),
        round((after.nodes_s - before.nodes_s) / leases * 1e6, 1),
        round((after.load_s - before.load_s) / leases * 1e6, 1),
        len({pod.number for pod in run.pods}),
        round(os.getloadavg()[0], 1),
    )


@dataclass(frozen=True, slots=True)
class Used:
    """What the server says of itself, and what all three have used of the processor."""

    server_s: float
    nodes_s: float
    load_s: float
    planning_s: float
    granted: float
    passes: float
    queued: float


def used(run: Run) -> Used:
    pool = run.pool
    page = pool.ask("GET", "/metrics").text
    told = dict(line.rpartition(" ")[::2] for line in page.splitlines() if line[0] != "#")
    return Used(
        pool.server.cpu_s(),
        cpu_s(run.nodes.pid),
        process_time(),
        float(told["gpool_planning_seconds_total"]),
        float(told["gpool_leases_granted_total"]),
        float(told["gpool_scheduling_pass_seconds_count"]),
        float(told["gpool_tasks_queued"]),
    )


@contextmanager
def pool_of(options: argparse.Namespace) -> Iterator[tuple[Pool, Prepared]]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        make: Callable[[str], str | None] = lambda _: None  # noqa: E731
        if options.postgres:
            make = stack.enter_context(postgres())
        url = make("endtoend")
        # Nobody is to be lost: a machine that stands still for half a minute is slow, and no more.
        settings = {"GPOOL_SERVER_ORDER": options.order, "GPOOL_SERVER_TTL_S": "300"}
        if url is not None:
            settings["GPOOL_SERVER_DATABASE_URL"] = url
        prepared = asyncio.run(prepare(folder / "data", url, machines_of(options.nodes)))
        pool = Pool(folder, settings)
        stack.callback(pool.stop)
        pool.start_server()
        yield pool, prepared


async def measure_all(
    options: argparse.Namespace, pool: Pool, prepared: Prepared, nodes: Nodes
) -> list[Figures]:
    keyed = options.keyed
    doors = [
        Door(pool.address, key, keyed=keyed) for _ in range(CONNECTIONS) for key in prepared.keys
    ]
    pods = pods_of(options.pods)
    run = Run(nodes, pool, doors, pods, options.seconds, options.rate)
    phases = [phase.split(":") for phase in options.phases]
    found = []
    try:
        for number, (mode, how) in enumerate(phases):
            found.append(await measure(run, mode, how, number))
            print(row(found[-1]), flush=True)
            await drained(pool, options.hold)
    finally:
        for door in doors:
            door.close()
        await asyncio.sleep(0.1)  # they close in the loop
    return found


async def drained(pool: Pool, hold_s: float) -> None:
    """Every lease ends, and no task is left behind; how long that takes is the machine's affair."""
    path = "/v1/tasks?all=true&status=queued,leased,running&limit=3"
    loop = asyncio.get_running_loop()
    ends = loop.time() + DRAINED_WITHIN_S
    while left := pool.ask("GET", path).json()["items"]:
        if loop.time() > ends:
            break
        await asyncio.sleep(max(0.5, hold_s / 2))
    else:
        return
    raise AssertionError(f"tasks that do not end: {left}")


def row(found: Figures) -> str:
    return (
        f"| {found.mode} | {found.submissions} | {found.requests_per_s} | {found.offered_per_s} | {found.leases_per_s} "
        f"| {found.p50_ms} | {found.p99_ms} | {found.decisions_per_s} | {found.server_cpu_us} | {found.server_cores} "
        f"| {found.nodes_cpu_us} | {found.load_cpu_us} | {found.passes_per_s} | {found.waiting} |"
    )


PHASES = ("flood:mixed", "flood:singles", "flood:batches", "paced:mixed")


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--nodes", type=int, default=1213)
    asked.add_argument("--seconds", type=float, default=15.0, help="of each phase")
    asked.add_argument("--rate", type=float, default=1500.0, help="tasks a second when paced")
    asked.add_argument("--pods", type=Path, default=OPENB / "openb_pod_list_gpuspec33.csv.gz")
    asked.add_argument(
        "--hold", type=float, default=1.5, help="seconds a lease is held, on average"
    )
    asked.add_argument("--order", default="fair_share")
    asked.add_argument("--phases", nargs="+", default=list(PHASES), metavar="MODE:SUBMISSIONS")
    asked.add_argument("--postgres", action="store_true")
    asked.add_argument(
        "--keyed", action="store_true", help="an Idempotency-Key with each POST, as our client does"
    )
    asked.add_argument("--quick", action="store_true", help="8 seconds, 400 nodes")
    asked.add_argument("--json", type=Path)
    options = asked.parse_args()
    if options.quick:
        options.nodes, options.seconds = 400, 8.0
    with pool_of(options) as (pool, prepared):
        nodes = Nodes(Stand(pool.address, prepared.members, options.hold))
        try:
            nodes.ready()
            print(
                f"{options.nodes} nodes, {options.pods.stem}, load {os.getloadavg()[0]:.1f}, server {pool.server.pid}\n"
            )
            print(
                "| | submissions | POSTs/s | tasks/s offered | leases/s | p50 ms | p99 ms | decisions/s of planning "
                "| server CPU µs a lease | cores | nodes µs | load µs | passes/s | waiting |\n"
                "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"
            )
            found = uvloop.run(measure_all(options, pool, prepared, nodes))
        except AssertionError:
            print(pool.story(), file=sys.stderr)
            raise
        finally:
            nodes.stop()
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in found], indent=2) + "\n")
    best = max(each.leases_per_s for each in found)
    if best < LEASES_PER_S and not options.quick:
        print(f"\nfalls short: {best} leases a second, promised ≥ {LEASES_PER_S}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
