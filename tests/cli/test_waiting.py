"""`gpool wait` for batches and single tasks."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

import httpx2
import pytest
from click.testing import Result

from gpool import Client
from gpool.cli.command import MOST_REPORTED
from tests.client.standin import Pool
from tests.tools.processes import PATIENCE_S

Gpool = Callable[..., Result]


def mapped(client: Client, pool: Pool, *codes: int) -> str:
    """A batch of calls, those with another code than 0 failed."""

    def fail(code: int) -> None:
        if code:
            raise ValueError(f"call {code}")

    list(client.task(fail).map(codes, return_exceptions=True))
    return list(pool.batches)[-1]


def test_waiting_for_a_batch_waits_for_all_its_tasks(
    gpool: Gpool, client: Client, pool: Pool
) -> None:
    well, badly = mapped(client, pool, 0, 0, 0), mapped(client, pool, 0, 7, 0)
    assert (gpool("wait", well).exit_code, gpool("wait", badly).exit_code) == (0, 1)
    assert "call 7" in gpool("wait", badly).stderr
    assert f"1 of the 3 tasks of {badly} did not succeed" in gpool("wait", badly).stderr
    shown = json.loads(gpool("wait", "--json", badly).stdout)
    assert (shown["id"], shown["total"], shown["done"]) == (badly, 3, 3)


def test_the_first_failure_decides_the_exit_code(gpool: Gpool, client: Client, pool: Pool) -> None:
    batch = mapped(client, pool, 0, 1)
    pool.command = lambda _: {"status": "failed", "exit_code": 7}
    task = gpool("run", "-d", "--", "x").stdout.strip()
    assert gpool("wait", batch, task).exit_code == 1
    assert gpool("wait", task, batch).exit_code == 7
    shown = json.loads(gpool("wait", "--json", task, batch).stdout)
    assert [one["id"] for one in shown] == [task, batch]


def test_within_a_batch_the_lowest_position_decides_the_exit_code(
    gpool: Gpool, client: Client, pool: Pool
) -> None:
    batch = mapped(client, pool, 1, 1)
    late, early = pool.batches[batch].results
    late |= {"reason": "timed_out", "sequence": 2}
    pool.batches[batch].results = [early | {"sequence": 1}, late]
    assert gpool("wait", batch).exit_code == 124


def test_only_some_of_many_failures_are_reported(gpool: Gpool, client: Client, pool: Pool) -> None:
    batch = mapped(client, pool, *[3] * 50)
    said = gpool("wait", batch).stderr
    assert said.count("gpool: task ") == MOST_REPORTED
    assert f"50 of the 50 tasks of {batch} did not succeed" in said


def test_a_batch_that_outlasts_the_timeout_is_reported_as_continuing(
    gpool: Gpool, client: Client, pool: Pool
) -> None:
    pool.runs = False
    client.task(lambda: 1).submit()
    [batch] = pool.batches
    done = gpool("wait", batch, "--timeout", "0.05s")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == f"gpool: batch {batch} has not ended within 0.05s; it continues\n"


class Late(Pool):
    """Tells no result before it is asked twice about the batch."""

    asked = 0

    def __init__(self) -> None:
        super().__init__()
        self.tells = threading.Event()

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.method == "GET" and request.url.path.startswith("/v1/batches/"):
            if request.url.path.endswith("/results"):
                self.tells.wait(PATIENCE_S)
            else:
                self.asked += 1
        if self.asked > 1:
            self.tells.set()
        return super().handle_request(request)


def test_a_target_that_has_ended_is_not_reported_as_continuing() -> None:
    pool = Late()
    pool.tells.set()
    client = Client("http://pool.test", "gpk_test", transport=pool)
    batch = mapped(client, pool, 0, 0, 0)
    pool.tells.clear()
    assert len(list(client.ended(batch, timeout=0))) == 3  # however long they take to be told


def test_a_batch_that_is_still_open_is_waited_for_until_it_is_closed(
    gpool: Gpool, client: Client, pool: Pool
) -> None:
    batch = mapped(client, pool, 0, 0)
    pool.batches[batch].closed = False
    assert gpool("wait", batch, "--timeout", "0.05s").exit_code == 1
    pool.batches[batch].closed = True
    assert gpool("wait", batch, "--timeout", "240s").exit_code == 0


@pytest.mark.parametrize("id_", ["b-0000000000099", "t-0000000000099"])
def test_an_unknown_id_is_reported_before_any_waiting(gpool: Gpool, pool: Pool, id_: str) -> None:
    pool.runs = False
    waits = gpool("run", "-d", "--", "true").stdout.strip()
    assert gpool("wait", waits, id_).exit_code == 4


def test_the_batch_of_a_call_is_shown_with_it(gpool: Gpool, client: Client, pool: Pool) -> None:
    batch = mapped(client, pool, 0)
    assert batch in gpool("status", list(pool.tasks)[-1]).stdout
    command = gpool("run", "-d", "--", "x").stdout.strip()  # whose batch is itself alone
    assert "b-" not in gpool("status", command).stdout
