"""Network between agents, consumers and the server: late, lossy, repeating, in order only within a connection.

A link is one WebSocket: it delivers in order or breaks. Each side learns of a break at its own time; until then
frames may arrive, even after a newer link is open.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gpool.testing.simulation import Dice, VirtualLoop

MS = 1_000


@dataclass(slots=True)
class NetworkConditions:
    delay_us: tuple[int, int] = (1 * MS, 30 * MS)
    spike: float = 0.0  # chance that a frame (and all behind it) is late ...
    spike_us: tuple[int, int] = (200 * MS, 3_000 * MS)  # ... by this much
    repeat: float = 0.0  # chance that a frame arrives twice
    request_lost: float = 0.0
    answer_lost: float = 0.0
    request_repeated: float = 0.0


@dataclass(slots=True)
class LinkDirection:
    deliver: Callable[[bytes], None]
    free_at_us: int = 0  # later frames do not overtake
    cut: bool = False  # frames sent from now on are lost
    closed: bool = False  # the receiver knows of the break: arriving frames are dropped
    sent: int = 0


@dataclass(slots=True)
class BlockedDirections:
    """Ends of blocks by direction: frames wait, new connections fail."""

    up_until_us: int = 0
    down_until_us: int = 0

    def block_up(self, until_us: int) -> None:
        self.up_until_us = max(self.up_until_us, until_us)

    def block_down(self, until_us: int) -> None:
        self.down_until_us = max(self.down_until_us, until_us)


class SimulatedLink:
    """`up` carries to the server, `down` to the agent."""

    def __init__(self, network: SimulatedNetwork, node: str, number: int, dice: Dice) -> None:
        self.node = node
        self.number = number
        self.name = f"{node}#{number}"
        self._network = network
        self._dice = dice
        self.up = LinkDirection(self._lost)
        self.down = LinkDirection(self._lost)
        self._on_agent_closed: Callable[[], None] = lambda: None
        self._on_server_closed: Callable[[], None] = lambda: None
        self.broken = False

    @staticmethod
    def _lost(data: bytes) -> None: ...

    def attach_agent(self, deliver: Callable[[bytes], None], closed: Callable[[], None]) -> None:
        self.down.deliver, self._on_agent_closed = deliver, closed

    def attach_server(self, deliver: Callable[[bytes], None], closed: Callable[[], None]) -> None:
        self.up.deliver, self._on_server_closed = deliver, closed

    def send_up(self, data: bytes) -> None:
        self._send(self.up, data, self._network.blockage(self.node).up_until_us)

    def send_down(self, data: bytes) -> None:
        self._send(self.down, data, self._network.blockage(self.node).down_until_us)

    def _send(self, way: LinkDirection, data: bytes, blocked_until_us: int) -> None:
        if way.cut:
            return
        loop, dice, conditions = self._network.loop, self._dice, self._network.conditions
        delay = dice.between(*conditions.delay_us)
        if conditions.spike and dice.chance(conditions.spike):
            delay += dice.between(*conditions.spike_us)
        at_us = max(loop.us + delay, blocked_until_us, way.free_at_us + 1)
        way.free_at_us = at_us
        loop.outside_us(at_us - loop.us, self._arrive, way, data)
        way.sent += 1
        if way.sent > 1 and dice.chance(conditions.repeat):  # the first is the handshake
            way.free_at_us = at_us + dice.between(1, 50 * MS)
            loop.outside_us(way.free_at_us - loop.us, self._arrive, way, data)

    @staticmethod
    def _arrive(way: LinkDirection, data: bytes) -> None:
        if not way.closed:
            way.deliver(data)

    def break_off(self, agent_learns_us: int, server_learns_us: int, *, lose: bool) -> None:
        """With `lose` frames under way are lost, else they arrive until the receiver knows."""
        if self.broken:
            return
        self.broken = True
        self.up.cut = self.down.cut = True
        if lose:
            self.up.closed = self.down.closed = True
        self._network.loop.outside_us(agent_learns_us, self._agent_learns)
        self._network.loop.outside_us(server_learns_us, self._server_learns)

    def _agent_learns(self) -> None:
        self.down.closed = True
        self._on_agent_closed()

    def _server_learns(self) -> None:
        self.up.closed = True
        self._on_server_closed()

    def close_by_server(self) -> None:
        """Frames sent before still arrive."""
        if self.broken:
            return
        self.broken = True
        self.up.cut = self.up.closed = self.down.cut = True
        rest = max(self.down.free_at_us - self._network.loop.us, 0) + self._dice.between(1, 20 * MS)
        self._network.loop.outside_us(rest, self._agent_learns)

    def close_by_agent(self) -> None:
        if self.broken:
            return
        self.broken = True
        self.down.cut = self.down.closed = self.up.cut = True
        rest = max(self.up.free_at_us - self._network.loop.us, 0) + self._dice.between(1, 20 * MS)
        self._network.loop.outside_us(rest, self._server_learns)


@dataclass(slots=True)
class SimulatedNetwork:
    loop: VirtualLoop
    dice: Dice
    conditions: NetworkConditions
    blockages: dict[str, BlockedDirections] = field(default_factory=dict)
    links: dict[str, list[SimulatedLink]] = field(default_factory=dict)
    dialled: int = 0
    stalls_us: dict[str, int] = field(default_factory=dict)  # by node: stall of its next link

    def calm(self) -> None:
        self.conditions = NetworkConditions()

    def blockage(self, node: str) -> BlockedDirections:
        found = self.blockages.get(node)
        if found is None:
            found = self.blockages[node] = BlockedDirections()
        return found

    def reachable(self, node: str) -> bool:
        blocked = self.blockage(node)
        return self.loop.us >= max(blocked.up_until_us, blocked.down_until_us)

    def open(self, node: str) -> SimulatedLink:
        self.dialled += 1
        link = SimulatedLink(self, node, self.dialled, self.dice.branch(f"link-{self.dialled}"))
        self.links[node] = [old for old in self.links.get(node, ()) if not old.broken] + [link]
        if node in self.stalls_us:
            self._stall(link, self.stalls_us.pop(node))
        return link

    def stall(self, node: str, lasts_us: int) -> None:
        """The node connects again, and its old frames arrive after the new ones."""
        if self.dice.chance(0.5):
            self.stalls_us[node] = lasts_us
            self.break_links(node)
        else:
            for link in self.links.get(node, ()):
                self._stall(link, lasts_us)

    def _stall(self, link: SimulatedLink, lasts_us: int) -> None:
        link.up.free_at_us = max(link.up.free_at_us, self.loop.us + lasts_us)
        self.loop.after_us(self.dice.between(1, lasts_us), self._give_up, link)

    def _give_up(self, link: SimulatedLink) -> None:
        late = max(0, link.up.free_at_us - self.loop.us) + self.dice.between(1, 500 * MS)
        link.break_off(1, late, lose=False)

    def break_links(self, node: str) -> None:
        for link in self.links.get(node, ()):
            link.break_off(
                self.dice.between(1, 300 * MS),
                self.dice.between(1, 2_000 * MS),
                lose=self.dice.chance(0.5),
            )

    def latency_us(self) -> int:
        delay = self.dice.between(*self.conditions.delay_us)
        if self.conditions.spike and self.dice.chance(self.conditions.spike):
            delay += self.dice.between(*self.conditions.spike_us)
        return delay
