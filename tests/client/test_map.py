"""`.map`: order, laziness, bounds, and a server that goes away in the middle."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from gpool import Client, Invalid
from gpool.core.errors import TooMany
from tests.client.standin import Pool, problem


def test_values_come_in_order(client: Client) -> None:
    assert list(client.task(lambda x: x * x).map(range(5000))) == [x * x for x in range(5000)]


def test_several_iterables_go_together_and_end_with_the_shortest(client: Client) -> None:
    assert list(client.task(pow).map([2, 3, 4], [5, 2])) == [32, 9]


def test_no_inputs_make_no_request(client: Client, pool: Pool) -> None:
    assert list(client.task(lambda x: x).map([])) == []
    assert not any(url.endswith("/v1/tasks") for _, url, _ in pool.requests)


@pytest.mark.parametrize("count", [1, 63, 64, 65, 192, 193])
def test_any_number_of_inputs_closes_the_batch(client: Client, pool: Pool, count: int) -> None:
    assert list(client.task(lambda x: x).map(range(count))) == list(range(count))
    assert [batch.closed for batch in pool.batches.values()] == [True]


def test_submissions_grow_and_share_one_batch(client: Client, pool: Pool) -> None:
    """What takes a tenth of a second to come is sent off as it is, so on a machine that stalls there are more of them."""
    assert len(list(client.task(lambda x: x).map(range(2000)))) == 2000
    sizes = [len(body["calls"]) for body in pool.bodies]
    assert sum(sizes) == 2000
    assert all(size <= 64 << number for number, size in enumerate(sizes))
    assert max(sizes) > 64
    assert [body["more"] for body in pool.bodies] == [True] * (len(sizes) - 1) + [False]
    assert len({body.get("batch") for body in pool.bodies[1:]}) == 1


def test_endless_inputs_are_taken_only_as_far_as_the_window(client: Client) -> None:
    inputs = itertools.count()
    values = client.map(client.task(lambda x: x), [inputs], window=200)
    assert list(itertools.islice(values, 1000)) == list(range(1000))
    assert next(inputs) <= 1000 + 200
    values.close()


def test_a_stream_that_breaks_goes_on_where_it_was(pool: Pool) -> None:
    pool.break_after = 7
    with Client("http://pool.test", "gpk_test", transport=pool) as client:
        assert list(client.task(lambda x: x).map(range(150))) == list(range(150))
    streams = [url for _, url, _ in pool.requests if "/results" in url]
    assert len(streams) > 10
    assert streams[0].endswith("after=0")
    assert streams[1].endswith("after=7")


def test_lost_answers_to_submissions_submit_nothing_twice(client: Client, pool: Pool) -> None:
    same = client.task(lambda x: x)
    same.remote(0)
    pool.lose_answers = 3
    assert list(same.map(range(500))) == list(range(500))
    assert len(pool.tasks) == 501


def test_the_first_exception_in_order_is_raised_and_cancels_the_rest(
    client: Client, pool: Pool
) -> None:
    values = client.task(lambda x: 1 // x).map([1, 1, 0, 1])
    assert [next(values), next(values)] == [1, 1]
    with pytest.raises(ZeroDivisionError):
        next(values)
    assert pool.cancelled == list(pool.batches)


def test_exceptions_can_stand_in_the_place_of_values(client: Client, pool: Pool) -> None:
    found = list(client.task(lambda x: 1 // x).map([1, 0, 1], return_exceptions=True))
    assert [type(one) for one in found] == [int, ZeroDivisionError, int]
    assert pool.cancelled == []


def test_leaving_the_loop_cancels_what_is_left(client: Client, pool: Pool) -> None:
    values = client.task(lambda x: x).map(itertools.count())
    assert next(values) == 0
    values.close()
    assert pool.cancelled == list(pool.batches)


def test_an_error_of_the_inputs_is_the_callers_to_see(client: Client, pool: Pool) -> None:
    def inputs() -> Iterator[int]:
        yield 1
        raise KeyError("no more")

    with pytest.raises(KeyError, match="no more"):
        list(client.task(lambda x: x).map(inputs()))


def test_an_input_that_cannot_travel_is_named(client: Client) -> None:
    with pytest.raises(Invalid, match="argument 'x'"):
        list(client.task(lambda x: x).map([(n for n in range(3))]))


class Crowded(Pool):
    """So many may wait; they start once it has refused even one more."""

    def __init__(self, most: int) -> None:
        super().__init__(runs=False)
        self.most = most
        self.longest = 0

    def _submit(self, document: dict[str, Any], wait: bool) -> httpx2.Response:
        waiting = self._waiting()
        if waiting + len(document["calls"]) > self.most:
            if len(document["calls"]) == 1:
                self._start()
            return problem(429, "too_many", f"you may have {self.most} tasks waiting")
        answer = super()._submit(document, wait)
        self.longest = max(self.longest, self._waiting())
        if not document["more"]:
            self._start()
        return answer

    def _waiting(self) -> int:
        return sum(task["status"] == "queued" for task in self.tasks.values())

    def _start(self) -> None:
        with self._change:
            for task in self.tasks.values():
                if task["status"] == "queued":
                    self._run(self.batches[task["batch"]], task)
            self._change.notify_all()


@pytest.mark.parametrize("most", [1, 10, 64, 1000])
def test_a_map_goes_on_as_fast_as_a_quota_lets_it(most: int) -> None:
    pool = Crowded(most)
    with Client("http://pool.test", "gpk_test", transport=pool) as client:
        assert list(client.task(lambda x: x).map(range(300))) == list(range(300))
    assert pool.longest <= most
    assert [batch.closed for batch in pool.batches.values()] == [True]


def test_a_quota_that_others_use_up_is_said() -> None:
    with (
        Client("http://pool.test", "gpk_test", transport=Crowded(0)) as client,
        pytest.raises(TooMany, match="0 tasks waiting"),
    ):
        list(client.task(lambda x: x).map(range(300)))


class Taken(Pool):
    """Others use up the quota: one call fits in, and more once there is room or it was asked so often."""

    def __init__(self, refusals: int) -> None:
        super().__init__()
        self.refusals_left = refusals

    def _submit(self, document: dict[str, Any], wait: bool) -> httpx2.Response:
        is_first = not self.batches and len(document["calls"]) == 1
        if self.refusals_left and not is_first:
            self.refusals_left -= 1
            return problem(429, "too_many", "you may have 1 task waiting")
        return super()._submit(document, wait)


def test_values_that_are_there_are_given_while_others_use_up_the_quota() -> None:
    """Whoever takes them may be the one who makes room."""
    pool = Taken(refusals=30)
    with Client("http://pool.test", "gpk_test", transport=pool) as client:
        values = client.task(lambda x: x).map(range(3))
        assert next(values) == 0
        assert pool.refusals_left > 0
        pool.refusals_left = 0
        assert list(values) == [1, 2]


def test_a_batch_whose_end_is_refused_is_ended_otherwise() -> None:
    """As by a quota that was lowered meanwhile: nothing more is submitted, and it is too much all the same."""
    pool = Taken(refusals=30)
    with Client("http://pool.test", "gpk_test", transport=pool) as client:
        assert list(client.map(client.task(lambda x: x), [[0]], window=1)) == [0]
    assert [batch.closed for batch in pool.batches.values()] == [False]
    assert pool.cancelled == list(pool.batches)  # which closes it
