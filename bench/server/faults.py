"""kill -9 and SIGSTOP against a real pool: what was lost, what was accepted twice, how long until it went on.

    python -m bench.faults [--tasks 5000] [--kills 20] [--agent-kills 5] [--freezes 10] [--quick] [--json FILE]

Late reports are tried twice over: by agents that are really stopped and thawed, and, one kind at a time, by a scripted
agent under an old epoch; the same frames under the current epoch are the control and must be taken.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from gpool.core.ids import decode, encode
from gpool.core.model import EndReason
from gpool.wire.frames import Finished, Hold, LogChunk
from tests.tools.processes import (
    LEASE_TIME_S,
    LONG_LEASE,
    PATIENCE_S,
    SHORT_LEASE,
    Pool,
    alive,
    eventually,
    processes_saying,
)
from tests.tools.scripted_agent import ScriptedAgent

READY_S = 2.0
SURVIVES_S = 2.0
LEASE_TIMES = 3
COMMANDS_A_KILL = 15
KINDS = ("beat", "log", "artifact", "result")

SQUARES = """
import time
import gpool

pool = gpool.Client(patience_s={patience_s})

@pool.task
def square(n):
    time.sleep(0.004)
    return n * n

for n, value in enumerate(square.map(range({tasks}))):
    print(n, value)
"""


AT_A_SIGN = """
import signal, time
signs = []
signal.signal(signal.SIGUSR1, lambda *_: signs.append(1))
while not signs:
    time.sleep(0.05)
{then}
# {mark}
"""
"""What a task does that goes on when it is told to, on whatever node it is: no sooner, however slow the machine."""


def give_sign(mark: str) -> None:
    """To all that wait for it."""
    for pid in processes_saying(mark):
        with suppress(FileNotFoundError, ProcessLookupError):
            status = Path(f"/proc/{pid}/status").read_text()
            caught = int(status.partition("SigCgt:")[2].split()[0], 16)
            if caught >> signal.SIGUSR1 - 1 & 1:  # else it is not ready, or the sandbox around it
                os.kill(pid, signal.SIGUSR1)


@dataclass(frozen=True, slots=True)
class ServerKills:
    """`lost`: acknowledged and never answered. `twice`: accepted more than once, or answered wrongly."""

    functions: int
    commands: int
    lost: int
    twice: int
    ready_s: tuple[float, ...]

    @property
    def slowest_ready_s(self) -> float:
        return max(self.ready_s)


@dataclass(frozen=True, slots=True)
class AgentKill:
    """How long anything of the task survived its agent, and when the other task was done elsewhere."""

    survived_s: float
    finished_elsewhere_s: float
    moved_to: str


@dataclass(frozen=True, slots=True)
class Freeze:
    """What the pool shows after the frozen agent has thawed and said everything it had to say."""

    frozen_epoch: int
    node: str
    epoch: int
    log_epochs: tuple[int, ...]
    outputs: int

    @property
    def late_reports_refused(self) -> bool:
        """Nothing of the frozen agent's epoch is there; the other node may have needed more than one."""
        told = {*self.log_epochs}
        is_newer = min(told, default=0) > self.frozen_epoch and max(told, default=0) == self.epoch
        return (self.node, self.outputs) == ("second", 1) and is_newer


@dataclass(frozen=True, slots=True)
class Stale:
    """Of `each` tries of every kind: refused under the old epoch, taken under the current one."""

    each: int
    refused: dict[str, int]
    taken: dict[str, int]
    unharmed: int
    """Tasks that in the end show what came under the current epoch and nothing else."""

    @property
    def holds(self) -> bool:
        every = dict.fromkeys(KINDS, self.each)
        return self.refused == every and self.taken == every and self.unharmed == self.each


def kill_server(pool: Pool, tasks: int, kills: int) -> ServerKills:
    """A consumer maps a function over `tasks` numbers; `kills` times, evenly spread, commands are added and the server dies."""
    commands = min(COMMANDS_A_KILL * kills, tasks // 4)
    functions, a_kill = tasks - commands, commands // kills
    due = {functions * (kill + 1) // (kills + 1) for kill in range(kills)}
    answers: list[str] = []
    ready: list[float] = []
    batches: list[str] = []
    mapped = ""
    program = SQUARES.format(tasks=functions, patience_s=2 * PATIENCE_S)
    with closing(pool.program(program)) as lines:
        for line in lines:
            answers.append(line)
            mapped = mapped or pool.ask("GET", "/v1/tasks?limit=1").json()["items"][0]["batch"]
            if len(answers) in due:
                wanted = {"command": ["sh", "-c", "echo done"], "copies": a_kill}
                batches.append(pool.ask("POST", "/v1/tasks", wanted).json()["batch"])
                pool.server.kill()
                ready.append(round(pool.start_server(), 2))
    wrong = sum(answer != f"{n} {n * n}" for n, answer in enumerate(answers))
    lost = twice = 0
    for batch, count in ((mapped, functions), *((batch, a_kill) for batch in batches)):
        results = pool.results(batch)
        accepted = {result["id"] for result in results if result["status"] == "succeeded"}
        in_order = [result["sequence"] for result in results] == list(range(1, len(results) + 1))
        lost += count - len(accepted)
        twice += len(results) - len(accepted) + (not in_order)
    return ServerKills(functions, a_kill * kills, lost, twice + wrong, tuple(ready))


def kill_agent(pool: Pool, mark: str, short_s: int = 1) -> AgentKill:
    """Two tasks run on `first`, which is killed; `second` has to finish what can be finished."""
    both_on_first(pool)
    endless = pool.submit("python", "-c", f"import time; time.sleep(600)  # {mark}")
    told = f"{mark}-short"
    then = f"time.sleep({short_s})"
    short = pool.submit("python", "-c", AT_A_SIGN.format(then=then, mark=told))
    for task in (endless, short):
        pool.until_status(task, "running")
    pool.set_availability("second", "available")
    eventually("the task is seen", lambda: bool(processes_saying(mark)), PATIENCE_S)
    of_the_task = processes_saying(mark)  # of both

    pool.agents["first"].kill()
    survived = eventually(
        "nothing of the task is left", lambda: not any(map(alive, of_the_task)), PATIENCE_S
    )
    elsewhere = survived + until_done_at_a_sign(pool, short, told)
    moved_to = pool.status(short)["node_name"]
    pool.gpool("cancel", endless)
    pool.agents["first"].start()
    eventually("first is back", lambda: "first" in pool.online(), PATIENCE_S)
    return AgentKill(round(survived, 2), round(elsewhere, 2), moved_to)


def until_done_at_a_sign(pool: Pool, task: str, mark: str) -> float:
    def done() -> bool:
        give_sign(mark)
        return bool(pool.status(task)["status"] == "succeeded")

    return eventually(f"{task} is done", done, PATIENCE_S)


def freeze_agent(pool: Pool) -> Freeze:
    """`first` is stopped until its lease went to `second`, then thawed with a finished attempt in its hands."""
    both_on_first(pool)
    agent = pool.agents["first"]
    mark = f"gpool-freeze-{os.getpid()}"
    then = "print('late'); print('kept', file=open('out', 'w'))"
    task = pool.submit("python", "-c", AT_A_SIGN.format(then=then, mark=mark), outputs=["out"])
    pool.until_status(task, "running")
    agent.signal(signal.SIGSTOP)
    frozen_epoch = pool.status(task)["epoch"]
    pool.set_availability("second", "available")
    until_done_at_a_sign(pool, task, mark)
    agent.signal(signal.SIGCONT)

    # What `first` held back is sent, in order, before it does anything new: a task done there proves it was said.
    both_on_first(pool)
    after = pool.submit("true")
    pool.until_status(after, "succeeded")
    now = pool.status(task)
    logs = pool.ask("GET", f"/v1/tasks/{task}/logs").json()["items"]
    epochs = tuple(item["epoch"] for item in logs)
    return Freeze(frozen_epoch, now["node_name"], now["epoch"], epochs, len(now["outputs"]))


def stale_reports(pool: Pool, each: int, *, same_node: bool) -> Stale:
    """A scripted agent falls silent until its leases are given anew, to another node or to itself, then speaks under the old ones."""
    with ExitStack() as stack:
        old = pool.scripted(f"old-{same_node}", each)
        new = old if same_node else pool.scripted("new", each)
        for agent in (old, new):
            stack.callback(agent.close)
        return _stale_reports(pool, each, old, new)


def _stale_reports(pool: Pool, each: int, old: ScriptedAgent, new: ScriptedAgent) -> Stale:
    same_node = old is new
    old.connect()
    ids = pool.ask("POST", "/v1/tasks", {"command": ["true"], "copies": each}).json()["ids"]
    before = {lease.task: Hold(lease.task, lease.epoch) for lease in old.granted(each)}
    old.close()
    eventually(
        "the silent node's leases are given up",
        lambda: all(pool.status(task)["status"] == "queued" for task in ids),
        PATIENCE_S,
    )
    pool.restart_server(**LONG_LEASE)  # from here on nobody is to be lost
    new.heard.clear()
    new.connect()
    now = {lease.task: Hold(lease.task, lease.epoch) for lease in new.granted(each)}
    if not same_node:
        old.connect()
    held, tasks = tuple(now.values()), [decode("task", text) for text in ids]

    refused: Counter[str] = Counter()
    for task in tasks:
        stated = (*held, before[task]) if same_node else (before[task],)
        for kind in KINDS:
            refused[kind] += not _taken(old, kind, before[task], stated)
        new.beat(*held)
    taken: Counter[str] = Counter()
    for task in tasks:
        for kind in KINDS:
            taken[kind] += _taken(new, kind, now[task], held)
        held = tuple(hold for hold in held if hold.task != task)
    unharmed = sum(_shows_only(pool, encode("task", hold.task), hold) for hold in now.values())
    return Stale(each, dict(refused), dict(taken), unharmed)


def _taken(agent: ScriptedAgent, kind: str, hold: Hold, stated: tuple[Hold, ...]) -> bool:
    """Whether the server takes this under the lease; anything but a clear yes or no is an error."""
    if kind == "beat":
        dropped = agent.beat(*stated).drop
        assert set(dropped) <= {hold}
        return not dropped
    if kind == "artifact":
        answer = agent.upload(_said(hold), hold)
        code = "" if answer.is_success else answer.json()["code"]
        assert (answer.status_code, code) in {(201, ""), (409, "stale_lease")}, answer.text
        return answer.is_success
    if kind == "log":
        refused = agent.report(LogChunk(hold.task, hold.epoch, 0, 1, _said(hold))).refused
    else:
        end = Finished(hold.task, hold.epoch, EndReason.EXITED, 0, error_text=_said(hold).decode())
        refused = agent.report(end).refused
    assert set(refused) <= {hold}
    return not refused


def _said(hold: Hold) -> bytes:
    return b"said by %d under %d" % (hold.task, hold.epoch)


def _shows_only(pool: Pool, task: str, hold: Hold) -> bool:
    """Whether the task ended under this lease, with its logs and no other's."""
    now = pool.status(task)
    logs = pool.ask("GET", f"/v1/tasks/{task}/logs").json()["items"]
    said = [(item["epoch"], item["text"]) for item in logs]
    ended = (now["status"], now["epoch"])
    return ended == ("succeeded", hold.epoch) and said == [(hold.epoch, _said(hold).decode())]


def both_on_first(pool: Pool) -> None:
    """`first` takes what comes, `second` is there and waits."""
    if "second" not in pool.agents:
        pool.join("second")
    pool.set_availability("second", "paused")
    eventually("first is online", lambda: "first" in pool.online(), PATIENCE_S)


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--tasks", type=int, default=5000)
    asked.add_argument("--kills", type=int, default=20)
    asked.add_argument("--freezes", type=int, default=10)
    asked.add_argument("--agent-kills", type=int, default=5)
    asked.add_argument("--each", type=int, default=25, help="late frames of each of four kinds")
    asked.add_argument("--quick", action="store_true", help="the sizes of make test")
    asked.add_argument("--json", type=Path)
    options = asked.parse_args()
    if options.quick:
        options.tasks, options.kills, options.freezes, options.agent_kills = 1500, 3, 1, 1

    with tempfile.TemporaryDirectory() as folder, Pool(Path(folder), SHORT_LEASE) as pool:
        server = kill_server(pool, options.tasks, options.kills)
        agents = [kill_agent(pool, f"gpool-fault-{n}") for n in range(options.agent_kills)]
        freezes = [freeze_agent(pool) for _ in range(options.freezes)]
    stale = {}
    for same_node in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            pool = Pool(Path(folder), SHORT_LEASE)
            try:
                pool.start(agents=())
                whose = "its own new lease" if same_node else "another node's lease"
                stale[whose] = stale_reports(pool, options.each, same_node=same_node)
            finally:
                pool.stop()

    refused = sum(freeze.late_reports_refused for freeze in freezes)
    survived = max((kill.survived_s for kill in agents), default=0.0)
    elsewhere = max((kill.finished_elsewhere_s for kill in agents), default=0.0)
    print(f"load {os.getloadavg()[0]:.1f}\n")
    print("| fault | times | outcome | promised |\n|---|---|---|---|")
    print(
        f"| kill -9 server during {server.functions} functions and {server.commands} commands "
        f"| {len(server.ready_s)} | {server.lost} lost, {server.twice} twice, ready again within "
        f"{server.slowest_ready_s} s | 0, 0, {READY_S} s |"
    )
    print(
        f"| kill -9 agent | {len(agents)} | processes gone within {survived} s, done elsewhere within "
        f"{elsewhere} s ({elsewhere / LEASE_TIME_S:.1f} lease times) | {SURVIVES_S} s, {LEASE_TIMES} lease times |"
    )
    print(f"| agent stopped past its lease, thawed | {len(freezes)} | refused {refused} | all |")
    for whose, told in stale.items():
        print(
            f"| late frames after {whose} | {len(KINDS) * told.each} | refused {sum(told.refused.values())} "
            f"({', '.join(f'{kind} {count}' for kind, count in told.refused.items())}); current ones taken "
            f"{sum(told.taken.values())} | all, all |"
        )
    if options.json:
        rows = {
            "server_kills": asdict(server),
            "agent_kills": [asdict(kill) for kill in agents],
            "freezes": {"times": len(freezes), "refused": refused},
            "late_frames": {whose: asdict(told) for whose, told in stale.items()},
            "load": os.getloadavg()[0],
        }
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    held = (
        (server.lost, server.twice) == (0, 0)
        and server.slowest_ready_s <= READY_S
        and survived <= SURVIVES_S
        and elsewhere <= LEASE_TIMES * LEASE_TIME_S
        and refused == len(freezes)
        and all(told.holds for told in stale.values())
    )
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
