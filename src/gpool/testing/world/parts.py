"""What a World is built from. A flaw is another part in the place of the real one; production code knows of none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpool.agent.state_machine.agent_state import AgentState
from gpool.core.model import Offer
from gpool.server.nodes.connection import Channel
from gpool.server.scheduling.scheduler import Scheduler
from gpool.server.server import Server
from gpool.testing.world.disk import Disk
from gpool.testing.world.machine import Machine


@dataclass(frozen=True, slots=True)
class Parts:
    """The real ones."""

    agent_state: Callable[[str, Offer], AgentState] = AgentState
    disk: Callable[..., Disk] = Disk
    channel: Callable[..., Channel] = Channel
    scheduler: Callable[..., Scheduler] = Scheduler
    server: Callable[..., Server] = Server
    machine: Callable[..., Machine] = Machine
