"""Functions in a runner: what comes back, whose output is whose, and what one call leaves for the next: nothing."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import os
import pickle
import secrets
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import gpool
from gpool.agent.runner import forking, serve
from gpool.agent.runtime import runner_calls
from gpool.agent.runtime.protocol import CallAnswer, CallProgress, FunctionCall, SandboxFailed
from tests.tools.runtimes import Caller, caller, processes_with, using

cloudpickle.register_pickle_by_value(sys.modules[__name__])
RETIRE_FRAME = runner_calls.HEAD.pack(0, runner_calls.RETIRE)
every = pytest.mark.parametrize("kind", ["bubblewrap", "process", "fake"])
real = pytest.mark.parametrize("kind", ["bubblewrap", "process"])


def test_both_ends_speak_the_same_words() -> None:
    for name in ("DEFINE", "CALL", "CALL_FILE", "PRELOAD", "ASSIGN"):
        assert getattr(serve, name) == getattr(runner_calls, name) == getattr(forking, name)
    for name in ("READY", "ANSWER", "ANSWER_FILE", "RETIRE", "PROGRESS"):
        assert getattr(serve, name) == getattr(runner_calls, name)
    for name in ("WARM", "ENDED"):
        assert getattr(forking, name) == getattr(runner_calls, name)
    assert serve.HEAD.format == forking.HEAD.format
    assert serve.CALL_HEAD.format == forking.CALL_HEAD.format
    assert forking.ENDED_BODY.format == runner_calls.ENDED_BODY.format
    assert serve.HEAD.format == runner_calls.HEAD.format
    assert serve.ANSWER_HEAD.format == runner_calls.ANSWER_HEAD.format
    assert serve.PROGRESS_HEAD.format == runner_calls.PROGRESS_HEAD.format
    assert serve.INLINE_LIMIT_BYTES == runner_calls.INLINE_LIMIT_BYTES


def with_runner(kind: str, data: Path, work: Any) -> Any:
    async def whole(runtime: Any) -> Any:
        calling = await caller(runtime)
        try:
            return await work(calling)
        finally:
            await calling.runner.remove()
            await calling.runner.remove()

    return using(kind, data, whole)


def shout(text: str) -> str:
    sys.stdout.write(f"out {text}\n")
    sys.stderr.write(f"err {text}\n")
    return text.upper()


class Odd(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__("odd")


def fail(how: str) -> object:
    if how == "value":
        raise ValueError("no good")
    if how == "odd":
        raise Odd(1, 2)
    if how == "exit":
        sys.exit(3)
    return threading.Lock()


@every
def test_answers_come_in_order_each_with_its_own_output(kind: str, tmp_path: Path) -> None:
    async def work(calling: Caller) -> None:
        numbers = await calling.send(shout, *((f"n{at}",) for at in range(300)))
        answers = await calling.answers(300)
        assert [answer.number for answer in answers] == numbers
        for at, answer in enumerate(answers):
            assert not answer.raised, answer.error_text
            assert pickle.loads(answer.value) == f"N{at}"
            assert calling.said(answer) == ((1, b"out n%d\n" % at), (2, b"err n%d\n" % at))

    with_runner(kind, tmp_path, work)


@every
def test_an_exception_comes_back_with_its_traceback(kind: str, tmp_path: Path) -> None:
    async def work(calling: Caller) -> None:
        answer = await calling.call(fail, "value")
        assert answer.raised
        error = pickle.loads(answer.value)
        assert (type(error), str(error)) == (ValueError, "no good")
        assert "in fail" in answer.error_text
        assert "no good" in answer.error_text

    with_runner(kind, tmp_path, work)


@real
@pytest.mark.parametrize(
    ("how", "said"), [("odd", "odd"), ("exit", "SystemExit: 3"), ("lock", "cannot be sent back")]
)
def test_what_cannot_travel_has_a_stand_in_that_says_so(
    kind: str, how: str, said: str, tmp_path: Path
) -> None:
    async def work(calling: Caller) -> None:
        answer = await calling.call(fail, how)
        assert answer.raised
        assert said in str(pickle.loads(answer.value))
        assert pickle.loads((await calling.call(shout, "a")).value) == "A"

    with_runner(kind, tmp_path, work)


@every
def test_large_arguments_and_values_go_through_files(kind: str, tmp_path: Path) -> None:
    async def work(calling: Caller) -> None:
        pickled = cloudpickle.dumps(lambda data: data[::-1])
        name = hashlib.sha256(pickled).hexdigest()
        await calling.runner.define(name, pickled)
        blob = secrets.token_bytes(3 << 20)
        path = tmp_path / "arguments"
        path.write_bytes(pickle.dumps(((blob,), {})))
        path.chmod(0o600)
        await calling.runner.send([FunctionCall(1, name, arguments_file=path)])
        answer = (await calling.answers(1))[0]
        assert not answer.raised, answer.error_text
        assert answer.value_file is not None
        assert pickle.loads(answer.value_file.read_bytes()) == blob[::-1]
        answer.value_file.unlink()

    with_runner(kind, tmp_path, work)


def leave(seconds: str) -> None:
    os.environ["LEFT"] = "behind"
    Path("left").mkdir()
    Path("left/deeper").mkdir()
    Path("left/deeper/file").write_text("x")
    os.chdir("left")
    sys.argv.append("left")
    sys.path.append("left")
    subprocess.Popen(["sleep", seconds], start_new_session=True)


def look() -> tuple[object, ...]:
    home = os.environ["HOME"]
    return (os.environ.get("LEFT"), os.listdir(home), os.getcwd() == home, sys.argv, sys.path[-1])


@real
def test_a_call_finds_nothing_of_the_one_before(kind: str, tmp_path: Path) -> None:
    seconds = f"98765.{secrets.randbelow(10**9)}"

    async def work(calling: Caller) -> None:
        before = pickle.loads((await calling.call(look)).value)
        assert before[:4] == (None, [], True, [""])
        left = await calling.call(leave, seconds)
        assert not left.raised, left.error_text
        assert processes_with(seconds) == []
        assert pickle.loads((await calling.call(look)).value) == before

    with_runner(kind, tmp_path, work)


def spin() -> None:
    threading.Thread(target=threading.Event().wait, daemon=True).start()


@real
def test_a_runner_whose_call_left_a_thread_answers_and_retires(kind: str, tmp_path: Path) -> None:
    async def work(calling: Caller) -> None:
        await calling.send(spin, (), ())
        answers = await calling.answers(9)
        assert [answer.number for answer in answers] == [1]
        assert (await calling.runner.ended()).retired

    with_runner(kind, tmp_path, work)


def claim_to_retire() -> None:
    for descriptor in range(3, 64):  # one of them is the runner's answers
        with contextlib.suppress(OSError):
            os.write(descriptor, RETIRE_FRAME)
    os._exit(0)


@real
def test_a_call_that_claims_to_retire_its_runner_is_still_charged(
    kind: str, tmp_path: Path
) -> None:
    async def work(calling: Caller) -> None:
        await calling.send(claim_to_retire, (), ())
        assert await calling.answers(1) == []
        assert not (await calling.runner.ended()).retired

    with_runner(kind, tmp_path, work)


@real
def test_a_killed_runner_has_not_retired(kind: str, tmp_path: Path) -> None:
    async def work(calling: Caller) -> None:
        assert not (await calling.call(len, "xy")).raised
        await calling.send(signal.raise_signal, (signal.SIGKILL,))
        assert await calling.answers(1) == []
        ended = await calling.runner.ended()
        assert (ended.exit_code, ended.retired) == (137, False)

    with_runner(kind, tmp_path, work)


@real
def test_a_call_that_ends_the_process_ends_the_events(kind: str, tmp_path: Path) -> None:
    async def work(calling: Caller) -> None:
        await calling.send(os._exit, (5,))
        assert await calling.answers(1) == []
        assert (await calling.runner.ended()).exit_code == 5

    with_runner(kind, tmp_path, work)


def chat(pause_s: float) -> str:
    sys.stdout.write("first\n")
    sys.stdout.flush()
    sys.stdin.read()
    threading.Event().wait(pause_s)
    sys.stdout.write("last\n")
    return "done"


@real
def test_output_of_a_long_call_is_seen_while_it_runs(kind: str, tmp_path: Path) -> None:
    async def work(calling: Caller) -> None:
        for pause_s in (0.6, 6.0, 60.0):  # we may stand still for a while
            calling.printed.clear()
            answer = await calling.call(chat, pause_s)
            if calling.printed and calling.printed[0].data == b"first\n":
                break
        first = calling.printed[0]
        assert (first.number, first.stream, first.data) == (answer.number, 1, b"first\n")
        rest = [o.data for o in calling.printed[1:]] + [data for _, data in answer.output]
        assert b"".join(rest) == b"last\n"

    with_runner(kind, tmp_path, work)


def flood(size: int) -> None:
    for _ in range(size >> 16):
        os.write(1, b"x" * (1 << 16))


@real
def test_a_flood_comes_through_whole_and_in_pieces(kind: str, tmp_path: Path) -> None:
    async def work(calling: Caller) -> None:
        answer = await calling.call(flood, 32 << 20)
        assert not answer.raised
        got = sum(len(o.data) for o in calling.printed) + sum(len(d) for _, d in answer.output)
        assert got == 32 << 20

    with_runner(kind, tmp_path, work)


def fork_and_return() -> int:
    os.fork()
    return os.getpid()


@real
def test_a_forked_child_does_not_answer_too(kind: str, tmp_path: Path) -> None:
    async def work(calling: Caller) -> None:
        await calling.send(fork_and_return, (), ())
        assert len(await calling.answers(2)) == 2
        assert pickle.loads((await calling.call(shout, "still")).value) == "STILL"

    with_runner(kind, tmp_path, work)


def lie(descriptor: int) -> None:
    os.write(descriptor, b"\xff" * 1000)


def test_a_runner_that_breaks_its_word_is_ended(tmp_path: Path) -> None:
    async def work(calling: Caller) -> None:
        await calling.send(lie, (5,))
        assert await calling.answers(1) == []
        await calling.runner.ended()

    with_runner("bubblewrap", tmp_path, work)


@real
def test_another_python_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    async def work(runtime: Any) -> None:
        from gpool.agent.runtime.protocol import RunnerJob, SandboxLimits  # noqa: PLC0415

        with pytest.raises(SandboxFailed, match=r"the function needs 2\.7"):
            await runtime.start_runner(RunnerJob("2.7", (), (), SandboxLimits(1000, 1 << 28)))
        await asyncio.sleep(0)

    using(kind, tmp_path, work)


def tamper(how: str) -> str:
    """Leaves the process's output as no later call may find it."""
    if how == "redirect":
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
    elif how == "close the descriptors":
        os.close(1)
        os.close(2)
    elif how == "close the streams":
        sys.stdout.close()
        sys.stderr.close()
    elif how == "swap the streams":
        sys.stdout = sys.stderr = io.StringIO()
    elif how == "no streams":
        sys.stdout = sys.stderr = None  # type: ignore[assignment]
    return how


@real
@pytest.mark.parametrize(
    "how",
    [
        "redirect",
        "close the descriptors",
        "close the streams",
        "swap the streams",
        "no streams",
    ],
)
def test_a_call_that_spoils_its_output_spoils_no_other(kind: str, how: str, tmp_path: Path) -> None:
    async def work(calling: Caller) -> None:
        answer = await calling.call(tamper, how)
        assert pickle.loads(answer.value) == how
        for text in ("after", "and again"):
            answer = await calling.call(shout, text)
            assert not answer.raised, answer.error_text
            assert calling.said(answer) == (
                (1, f"out {text}\n".encode()),
                (2, f"err {text}\n".encode()),
            )

    with_runner(kind, tmp_path, work)


def set_alarm() -> None:
    signal.setitimer(signal.ITIMER_REAL, 3600.0)
    os.umask(0o777)


def left_of_it() -> tuple[float, int]:
    return signal.getitimer(signal.ITIMER_REAL)[0], os.umask(0o022)


@real
def test_an_alarm_of_one_call_does_not_end_the_next(kind: str, tmp_path: Path) -> None:
    async def work(calling: Caller) -> None:
        await calling.call(set_alarm)
        answer = await calling.call(left_of_it)
        assert pickle.loads(answer.value) == (0.0, 0o022)

    with_runner(kind, tmp_path, work)


def report(text: str) -> str:
    """Report from the call, from a thread and from a forked process, whose report is dropped."""
    other = threading.Thread(target=gpool.progress, args=(0.2, "from a thread"))
    other.start()
    other.join()
    if not os.fork():
        gpool.progress(0.9, "from a fork")
        os._exit(0)
    os.wait()
    gpool.progress(0.4, text)
    threading.Event().wait(0.3)
    return text


def forge(number: int) -> str:
    """Write frames of progress as no runner does: of another call, cut off, without a number."""
    for body in (
        runner_calls.PROGRESS_HEAD.pack(number + 1, 0.9) + b"of another call",
        b"short",
        runner_calls.PROGRESS_HEAD.pack(number, float("nan")) + b"\x1b[2J\xff" * 1000,
    ):
        frame = runner_calls.HEAD.pack(len(body), runner_calls.PROGRESS) + body
        for descriptor in range(3, 20):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{descriptor}").startswith("pipe:"):
                    os.write(descriptor, frame)
        threading.Event().wait(0.2)
    return "forged"


async def _with_progress(calling: Caller) -> tuple[list[CallProgress], CallAnswer]:
    progress: list[CallProgress] = []
    async for batch in calling.runner.events():
        progress += [event for event in batch if isinstance(event, CallProgress)]
        for event in batch:
            if isinstance(event, CallAnswer):
                return progress, event
    raise AssertionError("the runner ended")


@real
def test_a_call_reports_its_progress(kind: str, tmp_path: Path) -> None:
    async def work(calling: Caller) -> None:
        for text in ("epoch 4", "x" * 1000):
            [number] = await calling.send(report, (text,))
            progress, answer = await _with_progress(calling)
            assert progress[-1] == CallProgress(number, 400_000, text[:200])
            assert {each.text for each in progress} <= {"from a thread", text[:200]}
            assert not answer.raised

    with_runner(kind, tmp_path, work)


@real
def test_forged_progress_ends_no_runner_and_is_of_no_other_call(kind: str, tmp_path: Path) -> None:
    async def work(calling: Caller) -> None:
        [number] = await calling.send(forge, (1,))
        progress, answer = await _with_progress(calling)
        assert not answer.raised, answer.error_text
        assert [(each.number, each.millionths) for each in progress] == [(number, 0)]
        assert len(progress[0].text) == 200
        assert progress[0].text.isprintable()
        assert (await calling.call(shout, "next")).raised is False

    with_runner(kind, tmp_path, work)
