"""Records of a pool of replicas, made by triggers in its database: terms taken, and status changes of tasks.

Triggers see what was committed, by which replica and under which term, whatever the replicas themselves say.
"""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from typing import Any

from gpool.server.store.drivers.postgres import SERVER_LOCK
from tests.tools.processes import PATIENCE_S, eventually
from tests.tools.replica_set import ReplicaSet

OPEN = "('queued', 'leased', 'running')"

TRIGGERS = f"""
CREATE SCHEMA bench;
CREATE TABLE bench.terms (term bigint, replica bigint, holder text, at double precision);
CREATE TABLE bench.moves (task bigint, old text, new text, epoch bigint, replica bigint, term bigint, at double precision);
CREATE FUNCTION bench.replica() RETURNS bigint LANGUAGE sql AS $$
    SELECT CAST(COALESCE(NULLIF(current_setting('gpool.replica', true), ''), '0') AS bigint)
$$;
CREATE FUNCTION bench.now() RETURNS double precision LANGUAGE sql AS $$
    SELECT CAST(extract(epoch FROM clock_timestamp()) AS double precision)
$$;
CREATE FUNCTION bench.term_taken() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO bench.terms SELECT NEW.term, bench.replica(), (
        SELECT max(a.application_name) FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
        WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
        AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
        AND (CAST(l.classid AS bigint) << 32) | CAST(l.objid AS bigint) = {SERVER_LOCK}
    ), bench.now();
    RETURN NULL;
END $$;
CREATE TRIGGER bench_terms AFTER INSERT OR UPDATE ON scheduler_term FOR EACH ROW EXECUTE FUNCTION bench.term_taken();
CREATE FUNCTION bench.task_moved() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO bench.moves SELECT NEW.id, OLD.status, NEW.status, NEW.epoch, bench.replica(),
        (SELECT max(term) FROM scheduler_term), bench.now();
    RETURN NULL;
END $$;
CREATE TRIGGER bench_moves AFTER UPDATE ON tasks FOR EACH ROW
    WHEN (OLD.status IS DISTINCT FROM NEW.status) EXECUTE FUNCTION bench.task_moved();
"""  # noqa: S608 - the lock's number is a constant

SUMMARY = """
SELECT json_build_object(
    'tasks', (SELECT count(*) FROM tasks),
    'succeeded', (SELECT count(*) FROM tasks WHERE status = 'succeeded'),
    'ended_twice', (SELECT count(*) FROM (
        SELECT task FROM bench.moves WHERE new IN ('succeeded', 'failed', 'cancelled') GROUP BY task HAVING count(*) > 1
    ) AS twice),
    'wrong_sequences', (SELECT count(*) FROM (
        SELECT batch_id FROM tasks GROUP BY batch_id
        HAVING count(*) <> count(DISTINCT sequence) OR max(sequence) <> count(*)
    ) AS wrong),
    'grants', (SELECT count(*) FROM bench.moves WHERE new = 'leased'),
    'unfenced', (SELECT count(*) FROM bench.moves m WHERE m.new = 'leased' AND m.replica IS DISTINCT FROM (
        SELECT t.replica FROM bench.terms t WHERE t.term = m.term)),
    'terms', (SELECT json_agg(json_build_array(term, replica, holder)) FROM bench.terms)
)
"""


@dataclass(frozen=True, slots=True)
class StoreSeen:
    """`unfenced`: grants written by a replica that did not have the current term. `unlocked`: terms taken without the lock."""

    tasks: int
    succeeded: int
    ended_twice: int
    wrong_sequences: int
    grants: int
    unfenced: int
    terms: int
    unlocked: int


class StoreLedger:
    """Asked through the harness's own address of the database, which is never cut off."""

    def __init__(self, pool: ReplicaSet) -> None:
        self._pool = pool
        self._processes: dict[int, int] = {}  # by replica id: pid

    def install(self) -> None:
        self._ask(TRIGGERS)
        # the first leader took its term before
        self._ask(
            "INSERT INTO bench.terms SELECT s.term, r.id, NULL, 0 FROM scheduler_term s JOIN replicas r ON r.term = s.term"
        )

    def know(self, number: int) -> None:
        """Remember which process a started replica is."""
        found = re.findall(r"replica started\W.*?\breplica=(\d+)", self._pool.said(number))
        self._processes[int(found[-1])] = self._pool.replicas[number].server.pid

    def replica_of(self, number: int) -> int:
        pid = self._pool.replicas[number].server.pid
        [found] = [replica for replica, process in self._processes.items() if process == pid]
        return found

    def until_term(self, after: float, not_of: int, within_s: float = PATIENCE_S) -> float:
        """Wait until another replica than `not_of` takes a term after that time of day; return the seconds between."""
        sql = f"SELECT min(at) FROM bench.terms WHERE at > {after!r} AND replica <> {not_of}"  # noqa: S608
        found: list[float] = []

        def is_taken() -> bool:
            try:
                taken = self._ask(sql)
            except subprocess.CalledProcessError:  # the database restarts
                return False
            found.extend([float(taken) - after] if taken else [])
            return bool(found)

        eventually("another replica takes the term", is_taken, within_s, every_s=0.1)
        return found[0]

    def unfinished(self) -> int:
        return int(self._ask(f"SELECT count(*) FROM tasks WHERE status IN {OPEN}"))  # noqa: S608

    def not_succeeded(self) -> set[int]:
        """Tasks in the store that have not succeeded."""
        text = self._ask("SELECT id FROM tasks WHERE status <> 'succeeded'")
        return {int(line) for line in text.split()}

    def lost_attempts(self) -> set[tuple[int, int]]:
        """Leases that ended as lost, as (task, epoch)."""
        text = self._ask("SELECT task_id || ' ' || epoch FROM attempts WHERE reason = 'lost'")
        return {(int(task), int(epoch)) for task, epoch in map(str.split, text.splitlines())}

    def grants_by(self, replica: int, after: float) -> int:
        return int(
            self._ask(
                "SELECT count(*) FROM bench.moves WHERE new = 'leased' "  # noqa: S608
                f"AND replica = {replica} AND at > {after!r}"
            )
        )

    def seen(self) -> StoreSeen:
        found: dict[str, Any] = json.loads(self._ask(SUMMARY))
        terms = found.pop("terms") or []
        known = [each for each in terms if each[2] is not None or each[1] in self._processes]
        unlocked = [
            (term, replica)
            for term, replica, holder in known[1:]
            if f"process {self._processes.get(replica)} on" not in (holder or "")
        ]
        return StoreSeen(**found, terms=len(terms), unlocked=len(unlocked))

    def _ask(self, sql: str) -> str:
        return self._pool.database.psql(sql)
