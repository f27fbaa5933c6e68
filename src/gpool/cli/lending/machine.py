"""Nodes of this machine, read from its own files: listing and pausing without an account."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpool.agent.machine.monitor import PAUSE_FILE
from gpool.cli.lending.join import agent_folder, joined_files, load_identity
from gpool.client.config import home
from gpool.core.errors import Invalid, NotFound


@dataclass(frozen=True, slots=True)
class LentNode:
    """A node that this machine is, in one pool."""

    id: str
    name: str
    url: str
    data: Path

    @property
    def paused(self) -> bool:
        return (self.data / PAUSE_FILE).exists()

    def pause(self, paused: bool) -> None:
        """The agent reads the file at its next survey, within ten seconds."""
        file = self.data / PAUSE_FILE
        if paused:
            self.data.mkdir(parents=True, exist_ok=True, mode=0o700)
            file.touch()
        else:
            file.unlink(missing_ok=True)


def lent_nodes(folder: Path | None = None) -> list[LentNode]:
    found = []
    for file in joined_files(folder or home()):
        identity = load_identity(file)
        if identity is not None:
            url = identity.address.url
            found.append(LentNode(identity.id, identity.name, url, agent_folder(file)))
    return found


def lent_node(what: str | None, folder: Path | None = None) -> LentNode:
    """By name or id; without either, the only one. `NotFound` or `Invalid` lists what there is."""
    nodes = lent_nodes(folder)
    matching = [one for one in nodes if what in (None, one.name, one.id)]
    if len(matching) == 1:
        return matching[0]
    there = ", ".join(f"{one.id} ({one.name} of {one.url})" for one in nodes) or "none"
    if not matching:
        raise NotFound(f"this machine has no node {what!r}; nodes here: {there}")
    raise Invalid(f"this machine is a node of several pools; name one of: {there}")


OWNER_NOTE = (
    "Nobody is signed in here; this is what the machine's own files say. To see more of it, sign in as its owner: "
    "gpool login. To own it yourself: gpool register, have its present owner remove it, then join with a link of "
    "yours (gpool node invite)."
)
