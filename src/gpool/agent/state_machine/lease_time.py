"""Lease time on the agent: heartbeats sent and confirmed, and the deadline by which the agent ends its sandboxes.

Invariant 3 of DESIGN: the agent ends a lease before the server may grant it to another node; else one task could run
twice at once. docs/leases.md describes both sides. They count the same `ttl` without comparing clocks:

- The server extends a node's leases to `ttl` after it *received* the node's last heartbeat, and never reassigns sooner.
- The agent records the boot-clock time at which it *sends* each heartbeat. When the server confirms heartbeat n
  (`Welcome.beat`, `BeatSeen.number`, `Grants.beat`), the agent's deadline becomes sending time of n + ttl - margin. A
  confirmation of an older heartbeat changes nothing.

A heartbeat is sent before it is received, so agent deadline = sent + ttl - margin < received + ttl = server deadline:
the agent is earlier by at least `margin`, whatever the network delays or loses. The margin covers the rest: ending
sandboxes (a SIGKILL and the wait for it) and clocks that run at different rates.

Example with ttl 30 s, margin 5 s, a heartbeat every 8 s. The network fails at 20 s, after heartbeat 3 was confirmed:

    agent     send 1    send 2    send 3    send 4    (send 5)                deadline: end sandboxes
              0         8         16        24        32                      41 = 16 + 30 - 5
    ----------|---------|---------|----x----|---------|-----------------------|------------|---------> s
                                       20 network fails                                     47
    server     0.5       8.5       17                                                       17 + 30: reassign

Heartbeat 4 is lost, so the deadline stays at 41 s. The server counts from 17 s, when heartbeat 3 arrived, and reassigns
at 47 s. Had the agent counted from the receipt of the confirmation, a slow answer (sent 16 s, confirmed 29 s) would put
its deadline to 54 s, seven seconds too late: the flaw `LEASE_COUNTED_FROM_RECEIPT` of the simulated pool.

`AgentState.handle` compares the deadline first, so the first event after a suspended machine wakes up ends everything
held; the boot clock counts during suspension. Results already in the outbox are still reported. Expired leases are
reported lost once nothing of them runs, because if only confirmations get lost, the server itself sees no reason to end
them. If the server has reassigned a lease meanwhile, the store refuses the late report by its epoch.
"""

from __future__ import annotations

from gpool.agent.state_machine.instructions import NEVER


class LeaseTimer:
    __slots__ = (
        "_number",
        "_unconfirmed",
        "confirmed_at",
        "deadline",
        "heartbeat_at",
        "heartbeat_every",
        "term",
    )

    def __init__(self) -> None:
        self._number = 0
        self._unconfirmed: dict[int, int] = {}  # number -> when it was sent
        self.heartbeat_every = NEVER
        self.heartbeat_at = NEVER  # when the next one is due
        self.term = NEVER  # ttl - margin
        self.confirmed_at: int | None = None  # when the last confirmed heartbeat was *sent*
        self.deadline = NEVER

    def next_heartbeat(self, now: int) -> int:
        self._number += 1
        self._unconfirmed[self._number] = now
        self.heartbeat_at = now + self.heartbeat_every
        return self._number

    def configure(self, ttl_us: int, margin_us: int, heartbeat_every_us: int) -> None:
        self.term = max(1, ttl_us - margin_us)
        self.heartbeat_every = heartbeat_every_us
        if self.confirmed_at is not None:
            self.deadline = self.confirmed_at + self.term

    def confirm(self, number: int) -> None:
        sent_at = self._unconfirmed.get(number)
        if sent_at is None:  # confirmed before, or never sent
            return
        self._unconfirmed = {n: at for n, at in self._unconfirmed.items() if n > number}
        self.confirmed_at = sent_at
        self.deadline = sent_at + self.term

    def expire(self, now: int) -> None:
        """Forget the passed deadline; the next heartbeat is due at once, to state the remaining leases."""
        self.deadline, self.confirmed_at = NEVER, None
        self.heartbeat_at = now

    def is_valid(self, now: int) -> bool:
        return self.confirmed_at is not None and now < self.deadline
