"""REST documents about the tasks on a node, for its owner."""

from __future__ import annotations

from pydantic import AwareDatetime

from gpool.wire.documents import Answer


class NodeTaskDocument(Answer):
    """A task as the node's owner sees it: whose, when, with which resources; no name, command or file.

    `cpus`, `memory_bytes`: as granted here; of a gang's member, as requested.
    """

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


class FailedCheckDocument(Answer):
    """An answer of the node that differed from the accepted one: the task, what was wanted and what was found."""

    task: str
    at: AwareDatetime
    wanted: str
    found: str


class NodeTasksDocument(Answer):
    """`running`: leases of the node, oldest first. `ended`: newest first, among the pool's newest 1,000,000 tasks.

    `failed_checks`: newest first. `banned_until`: it gets no verified tasks before then.
    """

    running: list[NodeTaskDocument]
    ended: list[NodeTaskDocument]
    failed_checks: list[FailedCheckDocument]
    banned_until: AwareDatetime | None = None
