"""Ctrl-C while a task is followed: no press is lost, whatever code is running."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import httpx2
import pytest
from click.testing import Result as Done

from gpool.cli.interrupts import HELD, Reading
from gpool.cli.main import INTERRUPTED, NOT_FOUND
from gpool.cli.printing import show_documents
from gpool.cli.run import follow_run
from gpool.client.client import Client
from gpool.client.runs import Printed, Run
from gpool.client.values import Result
from gpool.core.errors import Unreachable
from tests.client.standin import Pool
from tests.tools.processes import PATIENCE_S

Say = Callable[[int], None]


def drain(pieces: Iterator[int]) -> None:
    for _ in pieces:
        pass


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)  # to the process: the kernel gives it to the main thread


@pytest.fixture(autouse=True)
def _with_interrupts() -> Iterator[None]:
    """However the tests were started."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    after = signal.signal(signal.SIGINT, before)
    assert after is signal.default_int_handler  # given back


class Dropping:
    """A task whose stream goes through code that drops what is raised in it, as a destructor does."""

    id = "task_1"

    def __init__(self) -> None:
        self.cancelled = False
        self.over = threading.Event()

    def printed(self, **_: object) -> Iterator[Printed]:
        yield Printed(1, "stdout", b"up\n", "up\n")
        with contextlib.suppress(KeyboardInterrupt):
            press()
            os.sched_yield()

    def wait(self) -> Result:
        if threading.current_thread() is not threading.main_thread():
            self.over.wait(PATIENCE_S)  # it goes on, for all the main thread knows
        return Result(self.id, 0, 1, "succeeded", "exited", 0)

    def cancel(self) -> None:
        self.cancelled = True


def test_a_swallowed_keyboard_interrupt_still_detaches(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    task = Dropping()
    nobody = cast(Client, None)  # it is asked for outputs only
    assert follow_run(nobody, cast(Run, task), tmp_path, quiet=False) == INTERRUPTED
    task.over.set()
    assert "gpool logs -f task_1" in capfd.readouterr().err
    assert not task.cancelled


def test_a_second_press_is_distinguished_from_the_first() -> None:
    detached, over = threading.Event(), threading.Event()

    def work(say: Say) -> None:
        press()
        if detached.wait(PATIENCE_S):  # else nobody is there any more whose press it would be
            press()
        over.wait(PATIENCE_S)

    with Reading(work) as reading:
        assert reading.show(drain) is None
        assert not reading.is_pressed_again(0.0)
        detached.set()
        assert reading.is_pressed_again(PATIENCE_S)
        over.set()


def test_pieces_arrive_in_order_and_before_the_result() -> None:
    def count(say: Say) -> str:
        for number in range(1000):
            say(number)
        return "counted"

    heard: list[int] = []
    with Reading(count) as reading:
        assert reading.show(heard.extend) == "counted"
    assert heard == list(range(1000))


def test_the_reader_is_never_far_ahead_of_the_printer() -> None:
    said, shown = [0], [0]

    def count(say: Say) -> None:
        for number in range(1000):
            say(number)
            said[0] += 1

    def look(pieces: Iterator[int]) -> None:
        for _ in pieces:
            shown[0] += 1
            assert said[0] <= shown[0] + HELD + 1

    with Reading(count) as reading:
        reading.show(look)
    assert said == shown == [1000]


def test_an_error_of_the_reader_is_raised_in_the_main_thread() -> None:
    def fail(say: Say) -> None:
        say(1)
        raise Unreachable("the server went away")

    heard: list[int] = []
    with Reading(fail) as reading, pytest.raises(Unreachable):
        reading.show(heard.extend)
    assert heard == [1]


def test_a_press_ends_printing_that_would_not_end_by_itself() -> None:
    """As into a pipe that nobody reads."""
    printing, over = threading.Event(), threading.Event()

    def work(say: Say) -> None:
        say(1)
        if printing.wait(PATIENCE_S):
            press()
        over.wait(PATIENCE_S)

    def endless(pieces: Iterator[int]) -> None:
        for _ in pieces:
            printing.set()
            ends = time.monotonic() + PATIENCE_S
            while time.monotonic() < ends:
                os.sched_yield()
            pytest.fail("the press was not heard")

    with Reading(work) as reading:
        assert reading.show(endless) is None
        assert reading.was_interrupted
        assert not reading.is_pressed_again(0.0)
        over.set()


class Pressing(io.StringIO):
    """Ctrl-C comes in the middle of its first write."""

    pressed = False

    def write(self, text: str) -> int:
        middle = len(text) // 2
        super().write(text[:middle])
        if not self.pressed:
            self.pressed = True
            press()
            os.sched_yield()
        super().write(text[middle:])
        return len(text)


def test_a_press_in_the_middle_of_a_write_leaves_a_whole_list() -> None:
    over = threading.Event()

    def work(say: Callable[[dict[str, Any] | str], None]) -> None:
        say({"text": "a"})
        over.wait(PATIENCE_S)

    written = Pressing()
    with Reading(work) as reading, contextlib.redirect_stdout(written):
        assert reading.show(show_documents) is None
        over.set()
    assert json.loads(written.getvalue()) == [{"text": "a"}]
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_press_ends_a_write_into_a_full_pipe() -> None:
    reader_end, writer = os.pipe()
    over = threading.Event()

    def work(say: Callable[[dict[str, Any] | str], None]) -> None:
        say({"text": "a" * 1_000_000})
        while not select.select([reader_end], [], [], 1.0)[0]:
            pass  # until the pipe is being filled
        press()
        over.wait(PATIENCE_S)

    with open(writer, "w") as full:
        try:
            with Reading(work) as reading, contextlib.redirect_stdout(full):
                assert reading.show(show_documents) is None
        finally:
            over.set()
            os.close(reader_end)  # before the other: that would wait for room
            with contextlib.suppress(BrokenPipeError):
                full.close()


def test_ctrl_c_that_is_ignored_from_the_start_stays_ignored() -> None:
    """As for what a script runs in the background."""

    def work(say: Say) -> str:
        press()
        say(1)
        return "done"

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Reading(work) as reading:
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            assert reading.show(drain) == "done"
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_closed_pipe_is_reported_and_the_task_continues(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As in `gpool run … | head`."""
    reader, writer = os.pipe()
    os.close(reader)
    nobody, task = cast(Client, None), Talking()
    with (
        pytest.raises(BrokenPipeError),
        os.fdopen(writer, "w") as broken,
        contextlib.redirect_stdout(broken),
    ):
        follow_run(nobody, cast(Run, task), tmp_path, quiet=False)
    task.over.set()
    assert "gpool cancel task_1" in capfd.readouterr().err


class Talking(Dropping):
    def printed(self, **_: object) -> Iterator[Printed]:
        yield Printed(1, "stdout", b"up\n", "up\n")


# ---- logs and wait


class Pressed(Pool):
    """While this request is answered Ctrl-C is pressed, where what is raised is dropped; then it stays unanswered."""

    def __init__(self) -> None:
        super().__init__()
        self.path = "nowhere"
        self.over = threading.Event()

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.url.path.endswith(self.path):
            with contextlib.suppress(KeyboardInterrupt):
                press()
                os.sched_yield()
            if threading.current_thread() is not threading.main_thread():
                self.over.wait(PATIENCE_S)
        return super().handle_request(request)


@pytest.fixture
def pool() -> Iterator[Pressed]:
    made = Pressed()
    yield made
    made.path = (
        "nowhere"  # whoever is still there is answered, and presses nothing in the next test
    )
    made.over.set()


def submitted(gpool: Callable[..., Done], count: int = 1) -> list[str]:
    return [gpool("run", "-d", "--", "true").stdout.strip() for _ in range(count)]


@pytest.mark.parametrize("path", ["", "/logs"])
def test_ctrl_c_ends_the_following_and_prints_how_to_attach_again(
    gpool: Callable[..., Done], pool: Pressed, path: str
) -> None:
    [task] = submitted(gpool)
    pool.path = f"{task}{path}"
    done = gpool("logs", "-f", task)
    assert done.exit_code == INTERRUPTED
    assert f"gpool logs -f {task}" in done.stderr
    assert not pool.cancelled


def test_logs_as_json_are_a_whole_list_after_ctrl_c(
    gpool: Callable[..., Done], pool: Pressed
) -> None:
    [task] = submitted(gpool)
    pool.path = f"{task}/logs"
    done = gpool("logs", "-f", task, "--json")
    assert (done.exit_code, json.loads(done.stdout)) == (INTERRUPTED, [])


@pytest.mark.parametrize("follow", [(), ("-f",)])
def test_logs_of_an_unknown_task_are_an_error_not_an_empty_list(
    gpool: Callable[..., Done], follow: tuple[str, ...]
) -> None:
    """A program that reads it would take it for a task that printed nothing."""
    done = gpool("logs", *follow, "--json", "t-0000000000009")
    assert (done.exit_code, done.stdout) == (NOT_FOUND, "")


def test_ctrl_c_ends_the_waiting_and_names_the_unfinished_tasks(
    gpool: Callable[..., Done], pool: Pressed
) -> None:
    first, second, third = submitted(gpool, 3)
    pool.path = f"{second}/result"
    done = gpool("wait", first, second, third)
    assert done.exit_code == INTERRUPTED
    # the first was waited for; whether that was still told is between it and the press
    assert done.stderr.endswith(f" {second} {third}\n")


def test_ctrl_c_during_a_submission_prints_how_to_check(
    gpool: Callable[..., Done], pool: Pressed
) -> None:
    """The server may have it: nobody knows until it answers."""
    pool.path = "/v1/tasks"
    for detach in ([], ["-d"]):
        done = gpool("run", *detach, "--", "true")
        assert done.exit_code == INTERRUPTED
        assert "gpool ps" in done.stderr


def test_ctrl_c_during_a_download_prints_how_to_repeat_it(
    gpool: Callable[..., Done], pool: Pressed, tmp_path: Path
) -> None:
    sha256 = hashlib.sha256(b"w").hexdigest()
    pool.artifacts[sha256] = b"w"
    pool.command = lambda _: {"outputs": [{"path": "w", "sha256": sha256, "size_bytes": 1}]}
    pool.path = sha256
    done = gpool("run", "--output", "w", "--", "true")
    assert done.exit_code == INTERRUPTED
    [task] = pool.tasks
    assert f"gpool result {task}" in done.stderr
    pool.path = "nowhere"
    assert gpool("result", task, "--into", "again").exit_code == 0
    assert (tmp_path / "again" / "w").read_bytes() == b"w"


def test_waiting_and_following_continue_if_ctrl_c_is_ignored(
    gpool: Callable[..., Done], pool: Pressed
) -> None:
    [task] = submitted(gpool)
    pool.over.set()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for verb, path in ((["wait"], "result"), (["logs", "-f"], "logs")):
            pool.path = f"{task}/{path}"
            assert gpool(*verb, task).exit_code == 0
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
