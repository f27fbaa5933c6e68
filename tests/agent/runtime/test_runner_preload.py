"""A runner with preload: the modules are there, each function has a process of its own, one that ends takes nobody along."""

from __future__ import annotations

import asyncio
import contextlib
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
from gpool.agent.runner import forking
from gpool.agent.runtime.protocol import (
    CallAnswer,
    CallProgress,
    FunctionCall,
    SandboxFailed,
    SandboxLimits,
)
from gpool.core.model import EndReason
from tests.tools.runtimes import LIMITS, PATIENCE_S, Caller, caller, processes_with, using

cloudpickle.register_pickle_by_value(sys.modules[__name__])
real = pytest.mark.parametrize("kind", ["bubblewrap", "process"])
contained = pytest.mark.parametrize("kind", ["bubblewrap", "process", "docker"])
EARLY = "wave"  # a module of the standard library that nothing here imports


def with_runner(
    kind: str,
    data: Path,
    work: Any,
    *,
    env: Any = (),
    preload: Any = (EARLY,),
    limits: SandboxLimits = LIMITS,
) -> Any:
    async def whole(runtime: Any) -> Any:
        calling = await caller(runtime, limits, preload=preload, env=env)
        try:
            return await work(calling)
        finally:
            await calling.runner.remove()

    return using(kind, data, whole)


def loaded(name: str) -> tuple[bool, int, int]:
    return name in sys.modules, os.getpid(), os.getppid()


def also_loaded(name: str) -> tuple[bool, int, int]:
    return name in sys.modules, os.getpid(), os.getppid()


def value(answer: Any) -> Any:
    assert not answer.raised, answer.error_text
    return pickle.loads(answer.value)


@contained
def test_the_modules_are_there_and_each_function_keeps_its_process(
    kind: str, tmp_path: Path
) -> None:
    async def work(calling: Caller) -> None:
        first = value(await calling.call(loaded, EARLY))
        other = value(await calling.call(also_loaded, EARLY))
        again = value(await calling.call(loaded, EARLY))
        assert first[0]
        assert other[0]
        assert again == first  # a live process, as without preload
        assert first[1] != other[1]
        assert first[2] == other[2] != first[1]

    with_runner(kind, tmp_path, work)


@real
def test_without_preload_the_module_is_not_there(kind: str, tmp_path: Path) -> None:
    async def work(calling: Caller) -> None:
        assert not value(await calling.call(loaded, EARLY))[0]

    with_runner(kind, tmp_path, work, preload=())


def say(text: str) -> str:
    sys.stdout.write(f"out {text}\n")
    sys.stderr.write(f"err {text}\n")
    return text


def reverse(text: str) -> str:
    sys.stdout.write(f"rev {text}\n")
    return text[::-1]


@real
def test_answers_of_many_functions_come_in_order_each_with_its_output(
    kind: str, tmp_path: Path
) -> None:
    async def work(calling: Caller) -> None:
        for at in range(60):
            await calling.send(say if at % 4 else reverse, (f"n{at}",))
        answers = await calling.answers(60)
        assert [answer.number for answer in answers] == list(range(1, 61))
        for at, answer in enumerate(answers):
            text = f"n{at}"
            assert value(answer) == (text if at % 4 else text[::-1])
            told = [(1, b"out %b\n"), (2, b"err %b\n")] if at % 4 else [(1, b"rev %b\n")]
            assert calling.said(answer) == tuple((n, form % text.encode()) for n, form in told)

    with_runner(kind, tmp_path, work)


@real
def test_hundreds_in_line_are_answered_in_order(kind: str, tmp_path: Path) -> None:
    async def work(calling: Caller) -> None:
        big = "x" * 2000
        numbers = await calling.send(say, *((f"{at} {big}",) for at in range(400)))
        answers = await calling.answers(400)
        assert [answer.number for answer in answers] == numbers
        assert [value(answer).split()[0] for answer in answers] == [str(at) for at in range(400)]

    with_runner(kind, tmp_path, work)


def end_how(how: str) -> str:
    sys.stdout.write("last words\n")
    sys.stdout.flush()
    if how == "exit":
        os._exit(5)
    if how == "kill":
        signal.raise_signal(signal.SIGKILL)
    return how


@contained
@pytest.mark.parametrize(("how", "code"), [("exit", 5), ("kill", 137)])
def test_a_process_that_ends_takes_one_call_with_it_and_none_behind_it(
    kind: str, how: str, code: int, tmp_path: Path
) -> None:
    async def work(calling: Caller) -> None:
        assert value(await calling.call(say, "before")) == "before"
        await calling.send(end_how, ("fine",), (how,), ("also fine",), ("still",))
        await calling.send(say, ("after",))
        good, dead, *rest = await calling.answers(5)
        assert value(good) == "fine"
        assert dead.raised
        assert dead.ended is not None
        assert (dead.ended.exit_code, dead.ended.reason) == (code, EndReason.EXITED)
        assert calling.said(dead) == ((1, b"last words\n"),)
        assert [value(one) for one in rest] == ["also fine", "still", "after"]
        assert calling.said(rest[-1]) == ((1, b"out after\n"), (2, b"err after\n"))

    with_runner(kind, tmp_path, work)


def swell() -> int:
    return len(bytearray(200 << 20).replace(b"\0", b"x"))


def test_a_call_past_its_memory_ends_alone_and_says_why(tmp_path: Path) -> None:
    async def work(calling: Caller) -> None:
        answer = await calling.call(swell)
        if answer.ended is None:  # by rlimit where there is no control group
            assert "MemoryError" in answer.error_text
        else:
            assert answer.ended.reason is EndReason.OUT_OF_MEMORY
        again = await calling.call(end_how, "exit")
        assert again.ended.reason is EndReason.EXITED
        assert value(await calling.call(say, "small")) == "small"

    limits = SandboxLimits(cpu_milli=2000, memory_bytes=128 << 20, disk_bytes=64 << 20)
    with_runner("bubblewrap", tmp_path, work, limits=limits)


def leave(seconds: str) -> None:
    os.environ["LEFT"] = "behind"
    Path("left").mkdir()
    subprocess.Popen(["sleep", seconds], start_new_session=True)
    if os.fork() == 0:  # orphaned at once
        subprocess.Popen(["sleep", seconds], start_new_session=True)
        os._exit(0)


def leave_and_end(seconds: str) -> None:
    leave(seconds)
    os._exit(1)


def look() -> tuple[object, ...]:
    home = os.environ["HOME"]
    return os.environ.get("LEFT"), os.listdir(home), os.getcwd() == home


@real
@pytest.mark.parametrize("how", [leave, leave_and_end])
def test_a_call_finds_nothing_of_the_one_before(kind: str, how: Any, tmp_path: Path) -> None:
    seconds = f"98765.{secrets.randbelow(10**9)}"

    async def work(calling: Caller) -> None:
        await calling.call(how, seconds)
        assert processes_with(seconds) == []
        assert value(await calling.call(look)) == (None, [], True)

    with_runner(kind, tmp_path, work)


def spin() -> int:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    return os.getpid()


@real
def test_a_call_that_left_a_thread_is_followed_by_a_fresh_process(
    kind: str, tmp_path: Path
) -> None:
    async def work(calling: Caller) -> None:
        await calling.send(spin, (), (), ())
        pids = [value(answer) for answer in await calling.answers(3)]
        assert len(set(pids)) == 3

    with_runner(kind, tmp_path, work)


@real
def test_large_arguments_reach_the_right_call_even_past_one_that_ends(
    kind: str, tmp_path: Path
) -> None:
    async def work(calling: Caller) -> None:
        pickled = cloudpickle.dumps(end_how)
        name = "ab" * 32
        await calling.runner.define(name, pickled)
        words = ["one" * 100_000, "exit", "two" * 100_000]
        for at, word in enumerate(words):
            path = tmp_path / f"arguments{at}"
            path.write_bytes(pickle.dumps(((word,), {})))
            await calling.runner.send([FunctionCall(at + 1, name, arguments_file=path)])
        first, dead, last = await calling.answers(3)
        for answer, word in ((first, words[0]), (last, words[2])):
            assert answer.value_file is not None
            assert pickle.loads(answer.value_file.read_bytes()) == word
            answer.value_file.unlink()
        assert dead.ended is not None

    with_runner(kind, tmp_path, work)


def variable(name: str) -> tuple[str | None, list[str]]:
    seen = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    return os.environ.get(name), [entry.decode() for entry in seen if name.encode() in entry]


def test_variables_are_there_at_the_first_call_and_were_not_at_the_start(tmp_path: Path) -> None:
    async def work(calling: Caller) -> None:
        assert value(await calling.call(variable, "TOKEN")) == ("a=b", [])

    with_runner("bubblewrap", tmp_path, work, env=(("TOKEN", "a=b"), ("OTHER", "")))


def test_a_warm_sandbox_is_assigned_once(tmp_path: Path) -> None:
    async def work(calling: Caller) -> None:
        with pytest.raises(SandboxFailed, match="one user"):
            await calling.runner.assign((("TOKEN", "mine"),))  # type: ignore[attr-defined]
        assert value(await calling.call(variable, "TOKEN"))[0] is None

    with_runner("bubblewrap", tmp_path, work)


@real
def test_a_module_that_is_missing_is_skipped(kind: str, tmp_path: Path) -> None:
    async def work(calling: Caller) -> None:
        assert value(await calling.call(loaded, EARLY))[0]

    with_runner(kind, tmp_path, work, preload=("no_such_module_anywhere", EARLY))


def test_what_an_import_prints_belongs_to_no_call(tmp_path: Path) -> None:
    async def work(calling: Caller) -> None:
        answer = await calling.call(say, "mine")
        assert calling.said(answer) == ((1, b"out mine\n"), (2, b"err mine\n"))

    with_runner("bubblewrap", tmp_path, work, preload=("this",))  # prints the Zen


def draw() -> float:
    import numpy  # noqa: PLC0415

    return float(numpy.random.random())


def test_two_processes_of_one_parent_draw_different_numbers(tmp_path: Path) -> None:
    async def work(calling: Caller) -> None:
        await calling.send(draw, ())
        await calling.send(end_how, ("exit",))
        await calling.send(draw, ())
        first, _, second = await calling.answers(3)
        assert value(first) != value(second)

    with_runner("bubblewrap", tmp_path, work, preload=("numpy",))


def claim(frame: bytes) -> None:
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(descriptor, frame)
    os._exit(0)


def test_a_child_that_lies_about_another_call_ends_the_sandbox(tmp_path: Path) -> None:
    lie = forking.HEAD.pack(forking.ENDED_BODY.size, forking.ENDED)
    lie += forking.ENDED_BODY.pack(99, 0, 0)

    async def work(calling: Caller) -> None:
        await calling.send(claim, (lie,), (lie,))
        async with asyncio.timeout(PATIENCE_S):
            assert await calling.answers(2) == []

    with_runner("bubblewrap", tmp_path, work)


def test_a_runner_without_preload_cannot_say_that_a_process_ended(tmp_path: Path) -> None:
    lie = forking.HEAD.pack(forking.ENDED_BODY.size, forking.ENDED)
    lie += forking.ENDED_BODY.pack(1, 0, 0)

    async def work(calling: Caller) -> None:
        await calling.send(claim, (lie,))
        assert await calling.answers(1) == []

    with_runner("bubblewrap", tmp_path, work, preload=())


@pytest.mark.parametrize("opened", ["/dev/nvidia0", "/dev/dri/renderD128", "/dev/kfd"])
def test_the_files_of_gpus_are_known(opened: str) -> None:
    assert opened.startswith(forking.GPU_FILES)
    assert not "/dev/null".startswith(forking.GPU_FILES)


def report(fraction: float) -> float:
    gpool.progress(fraction, "from a child")
    threading.Event().wait(0.3)
    return fraction


@contained
def test_a_child_reports_the_progress_of_its_own_call(kind: str, tmp_path: Path) -> None:
    async def work(calling: Caller) -> None:
        first, second = await calling.send(report, (0.25,), (0.5,))
        progress, answers = list[CallProgress](), 0
        async for batch in calling.runner.events():
            progress += [event for event in batch if isinstance(event, CallProgress)]
            answers += sum(isinstance(event, CallAnswer) for event in batch)
            if answers == 2:
                break
        assert progress == [
            CallProgress(first, 250_000, "from a child"),
            CallProgress(second, 500_000, "from a child"),
        ]

    with_runner(kind, tmp_path, work)
