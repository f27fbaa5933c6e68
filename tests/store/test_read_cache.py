"""The cache of reads: a write drops what it concerns, whatever happens meanwhile; checked against reads without it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.core.errors import Conflict
from gpool.server.metrics import Metrics
from gpool.server.metrics.registry import MeasuredStore
from gpool.server.store.protocol import Operation, Relation, Statement, operation
from gpool.server.store.read_cache import (
    EVERYTHING,
    ReadCache,
    Touch,
    observed,
    read_tables,
    written_tables,
)
from gpool.server.store.rows import select

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class _Row(NamedTuple):
    value: int


@operation
def task_value(id_: int) -> Operation[int]:
    rows = yield from select(_Row, "SELECT v FROM tasks WHERE id = :id", {"id": id_})
    return rows[0].value


@operation
def gpu_values() -> Operation[tuple[int, ...]]:
    rows = yield from select(_Row, "SELECT v FROM gpus", {})
    return tuple(row.value for row in rows)


@operation
def set_tasks(rows: list[tuple[int, int]]) -> Operation[None]:
    yield Statement(
        "UPDATE tasks SET v = r.v FROM {rows} AS r WHERE tasks.id = r.task",
        {},
        {"rows": Relation((("task", "int"), ("v", "int")), rows)},
    )


@operation
def set_all_tasks(value: int) -> Operation[None]:
    yield Statement("UPDATE tasks SET v = :v", {"v": value})


@operation
def set_gpus(value: int) -> Operation[None]:
    yield Statement("UPDATE gpus SET v = :v", {"v": value})


@operation
def refuse() -> Operation[None]:
    yield Statement("SELECT v FROM tasks WHERE id = :id", {"id": 100})
    raise Conflict("not in this state")


class Tables:
    """A store of two tables. A read or write waits for its `gate`, where one is set."""

    def __init__(self) -> None:
        self.tasks = dict.fromkeys(range(100, 104), 0)
        self.gpus = 0
        self.reads = 0
        self.gate: asyncio.Event | None = None
        self.has_read = asyncio.Event()

    def _execute(self, statement: Statement) -> list[tuple[Any, ...]]:
        if statement.sql.startswith("SELECT v FROM tasks"):
            return [(self.tasks[statement.parameters["id"]],)]
        if statement.sql.startswith("SELECT v FROM gpus"):
            return [(self.gpus,)]
        if statement.relations:
            self.tasks.update(dict(statement.relations["rows"].rows))  # type: ignore[arg-type]
        elif statement.sql.startswith("UPDATE tasks"):
            self.tasks = dict.fromkeys(self.tasks, statement.parameters["v"])
        else:
            self.gpus = statement.parameters["v"]
        return []

    def _run(self, operation: Operation[Any]) -> Any:
        try:
            statement = next(operation)
            while True:
                statement = operation.send(self._execute(statement))
        except StopIteration as stop:
            return stop.value

    async def read(self, operation: Operation[Any]) -> Any:
        self.reads += 1
        value = self._run(operation)
        self.has_read.set()
        if self.gate is not None:
            await self.gate.wait()
        return value

    async def write(self, operation: Operation[Any]) -> Any:
        if self.gate is not None:
            await self.gate.wait()
        return self._run(operation)

    async def close(self) -> None: ...


class Subject:
    def __init__(self, most_rows: int = 100) -> None:
        self.tables, self.cache = Tables(), ReadCache(most_rows)
        self.store = MeasuredStore(self.tables, Metrics().signals.store, self.cache)

    async def task(self, id_: int) -> int:
        key, ids = ("task", id_), lambda _: [id_]
        return await self.cache.read(self.store, key, task_value(id_), ids=ids)

    async def gpus(self) -> tuple[int, ...]:
        return await self.cache.read(self.store, "gpus", gpu_values())


STEPS = st.one_of(
    st.tuples(st.just("task"), st.integers(100, 103)),
    st.tuples(st.just("gpus"), st.just(0)),
    st.tuples(st.just("set"), st.integers(100, 103)),
    st.tuples(st.just("all"), st.just(0)),
    st.tuples(st.just("set gpus"), st.just(0)),
)


@given(st.lists(STEPS, max_size=40), st.sampled_from([1, 3, 100]))
def test_a_read_through_the_cache_equals_one_without_it(
    steps: list[tuple[str, int]], most_rows: int
) -> None:
    async def play() -> None:
        subject = Subject(most_rows)
        for number, (word, id_) in enumerate(steps, start=1):
            match word:
                case "task":
                    assert await subject.task(id_) == subject.tables.tasks[id_]
                case "gpus":
                    assert await subject.gpus() == (subject.tables.gpus,)
                case "set":
                    await subject.store.write(set_tasks([(id_, number)]))
                case "all":
                    await subject.store.write(set_all_tasks(number))
                case _:
                    await subject.store.write(set_gpus(number))
            assert len(subject.cache) <= most_rows

    asyncio.run(play())


async def test_a_write_to_one_task_leaves_the_others_and_other_tables_in_the_cache() -> None:
    subject = Subject()
    for id_ in (100, 101):
        await subject.task(id_)
    await subject.gpus()
    await subject.store.write(set_tasks([(101, 7)]))
    reads = subject.tables.reads
    assert (await subject.task(100), await subject.gpus()) == (0, (0,))
    assert subject.tables.reads == reads
    assert await subject.task(101) == 7
    assert subject.tables.reads == reads + 1


async def test_a_read_during_which_its_task_is_written_is_not_kept() -> None:
    subject = Subject()
    subject.tables.gate = asyncio.Event()
    reading = asyncio.create_task(subject.task(100))
    await subject.tables.has_read.wait()
    gate, subject.tables.gate = subject.tables.gate, None
    await subject.store.write(set_tasks([(100, 5)]))
    gate.set()
    assert await reading == 0
    assert await subject.task(100) == 5


async def test_a_cancelled_write_that_is_committed_later_leaves_nothing_old() -> None:
    subject = Subject()
    await subject.task(100)
    subject.tables.gate = asyncio.Event()
    writing = asyncio.create_task(subject.store.write(set_tasks([(100, 9)])))
    await asyncio.sleep(0)
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    subject.tables.gate = None
    assert await subject.task(100) == 0
    subject.tables.tasks[100] = 9  # the commit
    assert await subject.task(100) == 9
    assert len(subject.cache) == 0


async def test_a_refusal_drops_nothing() -> None:
    subject = Subject()
    await subject.task(100)
    with pytest.raises(Conflict):
        await subject.store.write(refuse())
    await subject.task(100)
    assert subject.tables.reads == 1


async def test_entries_are_used_only_while_the_change_feed_is_followed() -> None:
    subject = Subject()
    subject.cache.confirmed_s = 0.0
    await subject.task(100)
    await subject.task(100)
    assert subject.tables.reads == 2
    subject.cache.confirmed_s = float("inf")
    await subject.task(100)
    await subject.task(100)
    assert subject.tables.reads == 2
    subject.cache.touch(Touch({"tasks"}, {100}))  # as the feed names it
    await subject.task(100)
    assert subject.tables.reads == 3


def test_tables_of_statements_are_found_and_an_unknown_one_stands_for_all() -> None:
    assert written_tables("INSERT INTO tasks (id) SELECT id FROM {x} AS n") == {"tasks"}
    assert written_tables("DELETE FROM members WHERE task_id = :task") == {"members"}
    assert written_tables("WITH d AS (DELETE FROM a RETURNING 1) UPDATE b SET c = 1") == {"a", "b"}
    assert written_tables("SELECT 1 FROM tasks") == frozenset()
    assert written_tables("UPDATE nodes SET last_beat_at = b.at FROM {h} AS b") == frozenset()
    assert "nodes" in written_tables("UPDATE nodes SET offer = :offer, last_beat_at = :at")
    assert written_tables("TRUNCATE everything") == {EVERYTHING}
    assert read_tables("SELECT 1 FROM a JOIN b ON true LEFT JOIN c ON true") == {"a", "b", "c"}


def test_an_observed_operation_notes_every_statement_and_returns_the_same() -> None:
    noted: list[str] = []

    def sent(rows: Iterable[Any]) -> int:
        steps = observed(task_value(100), lambda each: noted.append(each.sql))
        next(steps)
        with pytest.raises(StopIteration) as stopped:
            steps.send(list(rows))
        return int(stopped.value.value)

    assert sent([(3,)]) == 3
    assert noted == ["SELECT v FROM tasks WHERE id = :id"]
