"""Functions in the pool: values, exceptions, what travels and what is refused."""

from __future__ import annotations

import asyncio
import functools
import gc
import itertools
import threading
import traceback
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime

import pytest

import gpool
from gpool import Client
from gpool.client import times
from gpool.client.runs import wait_for
from tests.client.standin import Pool


class Account:
    """A class of the caller's own module: it must travel by value and come back as the same class."""

    def __init__(self, balance: int) -> None:
        self.balance = balance


class TooPoor(ValueError):
    pass


def test_a_task_called_directly_runs_here(client: Client, pool: Pool) -> None:
    double = client.task(lambda x: 2 * x)
    assert double(21) == 42
    assert pool.requests == []


def test_remote_gives_the_value(client: Client) -> None:
    @client.task
    def add(a: int, b: int = 1) -> int:
        return a + b

    assert add.remote(1) == 2
    assert add.remote(1, b=41) == 42


def test_remote_is_one_request_once_the_function_is_there(client: Client, pool: Pool) -> None:
    same = client.task(lambda x: x)
    same.remote(1)
    before = len(pool.requests)
    same.remote(2)
    assert [(method, url) for method, url, _ in pool.requests[before:]] == [
        ("POST", "http://pool.test/v1/tasks?wait=1")
    ]


def test_a_task_that_takes_longer_than_the_wait_is_asked_for_again(
    client: Client, pool: Pool
) -> None:
    pool.runs = False
    run = client.task(lambda: 42).submit()
    assert run.status == "queued"
    with pytest.raises(TimeoutError, match="it continues"):
        run.result(timeout=0)
    pool._run(pool.batches[pool.tasks[run.id]["batch"]], pool.tasks[run.id])
    assert run.result() == 42
    assert run.status == "succeeded"
    assert run.cost is None


def test_the_remote_exception_is_raised_with_the_remote_traceback(client: Client) -> None:
    @client.task
    def divide(a: int, b: int) -> float:
        return a / b

    with pytest.raises(ZeroDivisionError) as caught:
        divide.remote(1, 0)
    assert isinstance(caught.value.__cause__, gpool.RemoteTraceback)
    told = "".join(traceback.format_exception(caught.value))
    assert "in divide" in told
    assert "return a / b" in told


def test_an_exception_class_of_the_callers_module_comes_back_as_itself(client: Client) -> None:
    @client.task
    def pay(account: Account, amount: int) -> Account:
        if account.balance < amount:
            raise TooPoor(f"{account.balance} < {amount}")
        return Account(account.balance - amount)

    assert type(pay.remote(Account(5), 3)) is Account
    with pytest.raises(TooPoor, match="5 < 9"):
        pay.remote(Account(5), 9)


@pytest.mark.parametrize(
    ("reason", "status", "error"),
    [
        ("timed_out", "failed", gpool.TimedOut),
        ("cancelled", "cancelled", gpool.Cancelled),
        ("loses_nodes", "failed", gpool.LosesNodes),
        ("lost", "failed", gpool.TaskFailed),
        ("out_of_memory", "failed", gpool.TaskFailed),
    ],
)
def test_an_end_that_is_not_its_own_raises_its_class(
    client: Client, pool: Pool, reason: str, status: str, error: type[gpool.TaskFailed]
) -> None:
    pool.runs = False
    run = client.task(lambda: 1).submit()
    pool.batches[pool.tasks[run.id]["batch"]].results.append(
        {"id": run.id, "position": 0, "sequence": 1, "status": status, "reason": reason}
    )
    with pytest.raises(error) as caught:
        run.result()
    assert type(caught.value) is error


@pytest.mark.parametrize("reason", ["sandbox_failed", "node_failed"])
def test_a_task_that_no_node_could_start_says_whose_doing_it_was_and_what_to_do(
    client: Client, pool: Pool, reason: str
) -> None:
    told = "no bwrap here (it was tried 3 times and could not be started)"
    pool.command = lambda _: {"status": "failed", "reason": reason, "error_text": told}
    with pytest.raises(gpool.TaskFailed) as caught:
        client.run(["true"])
    [task], said = pool.tasks, str(caught.value)
    assert "gpool's fault" not in said
    for part in (
        "node",
        "Your program is not the cause",
        told,
        f"gpool explain {task}",
        "--tier",
        "operator",
    ):
        assert part in said


def test_an_argument_that_cannot_travel_is_named(client: Client) -> None:
    @client.task
    def work(data: object, lock: object = None) -> None: ...

    with pytest.raises(
        gpool.Invalid, match=r"argument 'lock' of work cannot be sent: a _thread\.lock"
    ):
        work.remote(1, threading.Lock())
    with pytest.raises(gpool.Invalid, match="argument 'lock' of work"):
        work.remote(1, lock=threading.Lock())


def test_a_function_that_cannot_travel_says_so(client: Client) -> None:
    lock = threading.Lock()
    with pytest.raises(gpool.Invalid, match=r"cannot be sent.*create that inside the function"):
        client.task(lambda: lock).remote()


def test_large_arguments_and_values_go_as_artifacts(client: Client, pool: Pool) -> None:
    reverse = client.task(lambda data: data[::-1])
    data = bytes(range(256)) * 4096
    assert reverse.remote(data) == data[::-1]
    assert "payload_sha256" in pool.bodies[-1]["calls"][0]


def test_a_task_may_call_another_and_itself(client: Client) -> None:
    @client.task
    def one() -> int:
        return 1

    @client.task
    def down(n: int) -> int:
        return one() if n == 0 else down(n - 1) + 1

    assert down.remote(3) == 4


def test_requirements_are_sent_as_the_server_knows_them(client: Client, pool: Pool) -> None:
    options = {"gpu": "24GB", "cpus": 2, "memory": "4GB", "timeout": "1h30m", "retries": 2}
    client.task(**options, priority=5, env={"A": "b"}, name="train", tier="vm")(lambda: 1).remote()
    sent = pool.bodies[-1]
    assert (sent["gpu"], sent["timeout_s"], sent["retries"]) == ("24GB", 5400.0, 2)
    assert (sent["priority"], sent["env"], sent["name"]) == (5, {"A": "b"}, "train")
    assert sent["function"]["python"].startswith("3.")


def test_an_unknown_option_is_refused_where_it_is_written(client: Client) -> None:
    with pytest.raises(TypeError, match="unknown option 'gppu'; known: gpu"):
        client.task(gppu=1)
    with pytest.raises(gpool.Invalid, match="'soon' is not a duration"):
        client.task(timeout="soon")


def test_a_lost_answer_is_asked_for_again_and_the_task_runs_once(
    client: Client, pool: Pool
) -> None:
    same = client.task(lambda x: x)
    same.remote(0)
    pool.lose_answers = 1
    assert same.remote(1) == 1
    assert len(pool.tasks) == 2
    keys = [headers["idempotency-key"] for method, _, headers in pool.requests[-2:]]
    assert keys[0] == keys[1]


def test_a_server_that_never_answered_is_unreachable_soon() -> None:
    pool = Pool()
    pool.refuse = 10**9
    with (
        Client("http://pool.test", "gpk_test", transport=pool, patience_s=0.1) as client,
        pytest.raises(gpool.Unreachable, match="is the server running"),
    ):
        client.task(lambda: 1).remote()


def test_a_wrong_key_is_not_signed_in_and_not_retried(pool: Pool) -> None:
    with (
        Client("http://pool.test", "wrong", transport=pool) as client,
        pytest.raises(gpool.NotSignedIn),
    ):
        client.task(lambda: 1).remote()
    assert len(pool.requests) == 1


def test_a_run_can_be_explained_cancelled_and_read(client: Client, pool: Pool) -> None:
    pool.runs = False
    run = client.task(lambda: 1).submit()
    assert run.explain() == "No node has a GPU."
    run.cancel()
    assert run.status == "cancelled"
    pool.logs[run.id] = [("stdout", "one\n"), ("stderr", "two\n"), ("stdout", "three\n")]
    assert run.logs() == "one\ntwo\nthree\n"


def test_followed_logs_go_on_after_a_break_and_repeat_nothing(client: Client, pool: Pool) -> None:
    run = client.task(lambda: 1).submit()
    pool.logs[run.id] = [("stdout", f"{n}\n") for n in range(10)]
    pool.break_after = 3
    assert list(run.logs(follow=True)) == [f"{n}\n" for n in range(10)]


def test_a_function_the_server_forgot_is_uploaded_again(client: Client, pool: Pool) -> None:
    same = client.task(lambda x: x)
    assert same.remote(1) == 1
    pool.artifacts.clear()
    assert same.remote(2) == 2
    pool.artifacts.clear()
    assert list(same.map([3, 4])) == [3, 4]


def test_a_deadline_and_a_team_are_said_as_on_the_command_line(client: Client, pool: Pool) -> None:
    pool.teams = [{"id": "tm-0000000000001", "name": "lab"}]
    client.task(by="2h", team="lab", grace=0)(lambda: 1).remote()
    sent = pool.bodies[-1]
    assert datetime.fromisoformat(sent["by"]).tzinfo is not None
    assert (sent["team"], sent["grace_s"]) == ("tm-0000000000001", 0)
    client.run(["true"], team="tm-0000000000009", by=datetime(2999, 1, 1, tzinfo=UTC), grace="0s")
    sent = pool.bodies[-1]
    assert (sent["team"], sent["grace_s"]) == ("tm-0000000000009", 0)
    assert datetime.fromisoformat(sent["by"]) == datetime(2999, 1, 1, tzinfo=UTC)
    for wrong, said in (
        ({"by": "noon"}, "is not a time; write 18:00"),
        ({"by": "2001-01-01T00:00"}, "is in the past"),
        ({"grace": "-1s"}, "is not a duration"),
        ({"timeout": 0}, "is not above zero"),
        ({"checkpoint_every": "5m"}, "the folder to save"),
    ):
        with pytest.raises(gpool.Invalid, match=said):
            client.task(**wrong)(lambda: 1)
    with pytest.raises(gpool.NotFound, match="you are not in a team 'attic'"):
        client.task(team="attic")(lambda: 1).remote()
    with pytest.raises(TypeError, match="Did you mean 'gpu'"):
        client.task(gpus=2)


def test_so_long_from_now_counts_from_each_call(client: Client, pool: Pool) -> None:
    soon = client.task(by="2h")(lambda x: x)
    soon.remote(1)
    first, answered = pool.bodies[-1]["by"], times.now()
    while times.now() == answered:  # until the clock shows the next second
        soon.remote(1)
    soon.remote(1)
    assert pool.bodies[-1]["by"] > first
    first = pool.bodies[-1]["by"]
    assert list(soon.map([1, 2])) == [1, 2]
    assert pool.bodies[-1]["by"] >= first


def test_whoever_waits_in_vain_for_a_task_that_does_not_start_is_told_why_once(
    client: Client, pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    pool.runs = False
    run = client.task(lambda: 1).submit()
    with pytest.raises(TimeoutError):
        run.wait(timeout=0)
    assert caplog.messages == []
    seconds = itertools.count(0.0, 7.0)
    with pytest.raises(TimeoutError):
        wait_for(client, run.id, 100, lambda: next(seconds))
    assert caplog.messages == [f"task {run.id} waits: No node has a GPU."]
    caplog.clear()
    pool.sentence = "It waits for \x1b]0;me\x07\u202eevil."  # a stranger's name
    with pytest.raises(TimeoutError):
        wait_for(client, run.id, 100, lambda: next(seconds))
    assert caplog.messages == [f"task {run.id} waits: It waits for \u241b]0;me\u2407\ufffdevil."]
    pool.tasks[run.id]["status"] = "running"
    with pytest.raises(TimeoutError):
        wait_for(client, run.id, 100, lambda: next(seconds))
    assert len(caplog.messages) == 1


def test_a_function_whose_value_lives_only_here_is_refused_before_it_is_sent(
    client: Client, pool: Pool
) -> None:
    def many() -> Iterator[int]:
        yield 1

    async def steadily() -> AsyncIterator[int]:
        yield 1

    for function, said in (
        (steadily, "return a list"),
        (many, "return a list"),
        (functools.partial(many), "return a list"),
    ):
        with pytest.raises(TypeError, match=said):
            client.task(function).remote()
        with pytest.raises(TypeError, match=said):
            list(client.task(function).map([()]))
    assert pool.requests == []
    assert list(client.task(many)()) == [1]  # here it may


def test_an_async_function_runs_to_its_end_in_the_pool(client: Client) -> None:
    async def later(x: int) -> int:
        await asyncio.sleep(0)
        return x + 1

    task = client.task(later)
    assert task.remote(1) == 2
    assert task.submit(2).result() == 3
    assert list(task.map([3, 4])) == [4, 5]
    assert asyncio.run(task(5)) == 6  # here it is a coroutine function as ever
    assert b"gpool." not in task.pickled()  # a sandbox need not have gpool


def test_what_is_no_function_of_its_own_is_refused_where_it_is_decorated(client: Client) -> None:
    with pytest.raises(TypeError, match=r"Model\.train is a method; .*arguments"):

        class Model:
            @client.task
            def train(self, steps: int) -> int:
                return steps

    with pytest.raises(TypeError, match=r"Model\.make is a method; .*arguments"):

        class Model:  # type: ignore[no-redef]
            @client.task(gpu=1)
            @classmethod
            def make(cls) -> int:
                return 1

    with pytest.raises(TypeError, match=r"Job is a class; .*function"):

        @client.task
        class Job:
            pass

    with pytest.raises(TypeError, match="not 3"):
        client.task(3)  # type: ignore[call-overload]


class Scaled:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    def times(self, value: int) -> int:
        return self.factor * value


def test_what_brings_all_it_needs_is_a_function_too(client: Client) -> None:
    class Sums:
        @client.task
        def one(value: int) -> int:  # type: ignore[misc]  # a namespace, no object
            return value

        @staticmethod
        @client.task
        def two(value: int) -> int:
            return 2 * value

        @client.task
        @staticmethod
        def three(value: int) -> int:
            return 3 * value

    assert (Sums.one.remote(1), Sums.two.remote(1), Sums.three.remote(1)) == (1, 2, 3)
    assert Sums().three(1) == 3
    assert client.task(Scaled(4).times).remote(1) == 4
    assert client.task(functools.partial(pow, 5)).remote(1) == 5
    assert client.task(int).remote("6") == 6


def test_options_of_the_wrong_kind_say_what_is_right(client: Client) -> None:
    with pytest.raises(gpool.Invalid, match=r"env=.'NAME': 'value'"):
        client.task(env=["A=1"])
    with pytest.raises(gpool.Invalid, match=r"secrets=.'NAME'") as told:
        client.task(secrets=["TOKEN=hush"])
    assert "hush" not in str(told.value)
    for wrong in ("TOKEN", 5, [("TOKEN", "hush")]):
        with pytest.raises(gpool.Invalid, match=r"secrets=.'NAME'"):
            client.task(secrets=wrong)
    for endless in (float("inf"), float("nan"), "9" * 400 + "d"):
        with pytest.raises(gpool.Invalid, match="duration"):
            client.task(timeout=endless)


def test_secrets_are_values_or_names_of_stored_ones(client: Client, pool: Pool) -> None:
    for given, sent in (
        ({"TOKEN": "hush"}, {"TOKEN": "hush"}),
        (["TOKEN", "OTHER"], {"TOKEN": None, "OTHER": None}),
        ({"TOKEN": "hush", "OTHER": None}, {"TOKEN": "hush", "OTHER": None}),
    ):
        assert client.task(lambda: 1, secrets=given).remote() == 1
        assert pool.bodies[-1]["secrets"] == sent
        assert client.run(["true"], secrets=given).id
        assert pool.bodies[-1]["secrets"] == sent


def test_what_is_no_text_is_named_and_a_secret_not_shown(client: Client, pool: Pool) -> None:
    """As bytes on a command line become that are no UTF-8."""
    with pytest.raises(gpool.Invalid, match="'command'"):
        client.run(["echo", "\udcff"])
    for options in ({"env": {"A": "\udcff"}}, {"secrets": {"A": "hush\udcff"}}):
        with pytest.raises(gpool.Invalid, match=f"'{next(iter(options))}'") as told:
            client.task(**options)(lambda: 1).remote()
        assert "hush" not in str(told.value)
    assert not pool.tasks


def test_options_changed_for_each_call_are_not_kept_for_ever(client: Client) -> None:
    same = client.task(lambda x: x)
    for number in range(3):
        assert same.with_options(name=f"n{number}").remote(1) == 1
    gc.collect()
    assert len(client._heads) == 0
    assert same.remote(1) == 1
    assert len(client._heads) == 1
