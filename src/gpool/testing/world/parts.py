"""What a World is built from. A flaw is another part in the place of the real one; production code knows of none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpool.agent.state_machine.session import Session
from gpool.core.model import Offer
from gpool.server.nodes.connection import NodeChannel
from gpool.server.nodes.registry import NodeRegistry
from gpool.server.scheduling.picture import StatePicture
from gpool.server.server import Server
from gpool.testing.world.disk import Disk
from gpool.testing.world.machine import Machine


@dataclass(frozen=True, slots=True)
class Parts:
    """The real ones."""

    session: Callable[[str, Offer], Session] = Session
    disk: Callable[..., Disk] = Disk
    channel: Callable[..., NodeChannel] = NodeChannel
    registry: Callable[..., NodeRegistry] = NodeRegistry
    picture: Callable[..., StatePicture] = StatePicture
    server: Callable[..., Server] = Server
    machine: Callable[..., Machine] = Machine
