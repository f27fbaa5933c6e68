"""Interface of one replica to its database beside the store: the leader's lock, the replica's row, the change feed.

Implemented over PostgreSQL (`postgres_replica`) and in the World. Each method raises `Unreachable` without an answer.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from sys import byteorder
from typing import NamedTuple, Protocol

from gpool.server.store.protocol import Store
from gpool.server.store.sealing import KeyHolder


@dataclass(frozen=True, slots=True)
class ReplicaIdentity:
    id: int
    address: str
    version: str


class SeenReplica(NamedTuple):
    """`silent_us`: age of its last heartbeat, `running_us`: of its registration, by the database's clock."""

    id: int
    address: str
    is_draining: bool
    silent_us: int
    running_us: int


class Change(NamedTuple):
    """Ids that one transaction changed; `replica_id` 0: written by another program."""

    xid: int
    replica_id: int
    ids: array[int]


class FeedPage(NamedTuple):
    """Visible changes from the cursor on. Below `horizon` no transaction is open: it is the next cursor."""

    horizon: int
    changes: list[Change]


def unpacked(data: bytes) -> array[int]:
    found = array("q", data)
    if byteorder == "little":
        found.byteswap()
    return found


class LockSession(Protocol):
    """Database session; a lock that it has ends with it."""

    @property
    def pid(self) -> int: ...

    def is_closed(self) -> bool: ...

    async def try_lock(self) -> bool: ...

    async def check(self) -> None:
        """Return if the session still answers."""
        ...

    async def end_silent(self, dead_after_us: int) -> bool:
        """End the session that has the lock if its replica's heartbeat is older; whether one was ended."""
        ...

    async def unlock(self) -> None: ...

    def terminate(self) -> None: ...

    async def close(self) -> None: ...


class ReplicaLink(Protocol):
    """The replica's row, the change feed and its notifications."""

    async def register(self, me: ReplicaIdentity) -> int:
        """Write the replica's row; return its slot. `Unreachable` if all slots are taken."""
        ...

    async def heartbeat(
        self, term: int, lock_pid: int | None, *, is_draining: bool
    ) -> list[SeenReplica] | None:
        """Record that this replica lives; return all replicas, or None if the leader has removed this one."""
        ...

    async def others_running(self) -> bool: ...

    async def horizon(self) -> int: ...

    async def read(self, cursor: int, without: int | None = None) -> FeedPage:
        """Read the feed from the cursor on, without the changes of one replica."""
        ...

    async def notify(self) -> None: ...

    async def prune(self, keep_us: int) -> None: ...

    async def remove(self) -> None:
        """Remove the replica's row and its nodes' connections."""
        ...

    async def close(self) -> None: ...


class ReplicaDatabase(Protocol):
    """The database of several replicas, as one of them opens its sessions."""

    async def open_store(
        self,
        replica: int,
        committed: Callable[[], None],
        readers: int | None = None,
        keys: KeyHolder | None = None,
    ) -> Store: ...

    def link(self, notified: Callable[[], None]) -> ReplicaLink: ...

    async def lock_session(self, earlier: int | None, ended: Callable[[], None]) -> LockSession:
        """Open a session for the lock. `earlier`: pid of a lost one of this process, which is ended; `ended` is called
        when this one ends without `close`.
        """
        ...
