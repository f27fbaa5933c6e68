"""Cost of one call task in the agent's state machine: grant, dispatch, answer, report, record.

python -m bench.session [--tasks 50000] [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from gpool.agent.state_machine.agent_state import AgentState
from gpool.agent.state_machine.instructions import (
    CallAnswered,
    CallsAnswered,
    Connected,
    FrameArrived,
    Instruction,
    RunnerReady,
    Send,
    SendCalls,
    StartRunner,
)
from gpool.core.model import Allocation, Offer, Requirements, TaskKind, TaskSpec
from gpool.wire.frames import Grants, Lease, Line, Recorded, Reports, Welcome

SPEC = TaskSpec(TaskKind.FUNCTION, "noop", Requirements(python="3.11"), function_sha256="f" * 64)
PAYLOAD = b"x" * 40


class Bench:
    """Feeds a state machine and obeys it; only processor time inside it counts."""

    def __init__(self, lines: int, answered: int) -> None:
        self.state = AgentState("bench", Offer(2000, 1 << 30, 1 << 30))
        self.lines, self.answered = lines, answered
        self.spent = 0.0
        self.finished = 0
        self.queues: dict[int, list[CallAnswered]] = {}
        self.now = 0
        self.feed(Connected())
        self.feed(FrameArrived(Welcome(1, 1, 1 << 50, 5_000_000, 8_000_000, ())))

    def feed(self, event: object) -> None:
        begun = time.thread_time()
        instructions = self.state.handle(self.now, event)  # type: ignore[arg-type]
        _ = self.state.wakes_at
        self.spent += time.thread_time() - begun
        for instruction in instructions:
            self.obey(instruction)

    def obey(self, instruction: Instruction) -> None:
        match instruction:
            case StartRunner():
                self.queues[instruction.runner] = []
                self.feed(RunnerReady(instruction.runner))
            case SendCalls():
                self.queues[instruction.runner] += [
                    CallAnswered(c.task, c.epoch, False, PAYLOAD, "", "", 20, ())
                    for c in instruction.calls
                ]
            case Send(frame=Reports() as reports):
                self.finished += len(reports.items)
                self.feed(FrameArrived(Recorded(reports.sequence)))

    def run(self, tasks: int, granted: int = 500) -> float:
        """Microseconds per task inside the state machine."""
        next_task = 1
        while self.finished < tasks:
            for number in range(self.lines):
                leases = tuple(Lease(next_task + n, 1, PAYLOAD) for n in range(granted))
                next_task += granted
                line = Line(Allocation(number, 1000, 1 << 29), 7, True, 1, leases)
                self.feed(FrameArrived(Grants(1, ((1, SPEC),), (line,))))
            while any(self.queues.values()):
                for runner, queue in self.queues.items():
                    self.now += 20
                    batch = tuple(queue[: self.answered])
                    del queue[: self.answered]
                    if batch:
                        self.feed(CallsAnswered(runner, batch))
        return 1e6 * self.spent / self.finished


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tasks", type=int, default=50_000)
    parser.add_argument("--quick", action="store_true", help="10,000 tasks")
    chosen = parser.parse_args()
    tasks = 10_000 if chosen.quick else chosen.tasks
    figures = {
        f"lines={lines} answers={answered}": round(Bench(lines, answered).run(tasks), 2)
        for lines, answered in ((1, 1), (2, 8), (2, 64), (64, 32))
    }
    print("| in the state machine | µs a call (limit 20) |\n|---|---|")
    for name, cost in figures.items():
        print(f"| {name} | {cost} |")
    if chosen.json:
        found = {"session_us_per_call": figures}
        chosen.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
