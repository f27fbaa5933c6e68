"""REST documents about the tasks on a node, for its owner."""

from __future__ import annotations

from pydantic import AwareDatetime

from gpool.wire.documents import Answer


class NodeTaskDocument(Answer):
    """A task as the node's owner sees it: whose, when, with which resources; no name, command or file."""

    id: str
    user: str
    user_name: str
    team: str | None = None
    kind: str
    status: str
    leased_at: AwareDatetime | None = None
    started_at: AwareDatetime | None = None
    finished_at: AwareDatetime | None = None
    reason: str | None = None
    gpu: str | None = None
    cpus: float = 1.0
    memory_bytes: int | None = None
    tier: str = "container"
    network: bool = False  # it reaches the public internet
    image: str | None = None


class NodeTasksDocument(Answer):
    """`running`: leases of the node, oldest first. `ended`: newest first, among the pool's newest 1,000,000 tasks."""

    running: list[NodeTaskDocument]
    ended: list[NodeTaskDocument]
