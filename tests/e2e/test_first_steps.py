"""The first things a new user does, with the commands a new user types."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.tools.processes import (
    GPOOL,
    PATIENCE_S,
    Pool,
    alive,
    descendants,
    eventually,
    free_port,
    processes_saying,
)

MIB = 1024 * 1024
EXAMPLES = Path(__file__).parents[2] / "examples"
HUNDRED_MB = """
import hashlib, random
stream, digest = random.Random(7), hashlib.sha256()
with open("big.bin", "wb") as out:
    for _ in range(100):
        block = stream.randbytes(1_000_000)
        out.write(block)
        digest.update(block)
print(digest.hexdigest())
"""


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_up_starts_a_pool_and_nothing_of_it_outlives_it(
    tmp_path: Path, require: Callable[[str], None], how: signal.Signals
) -> None:
    require("bubblewrap")
    port, log = free_port(), tmp_path / "up.log"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GPOOL_")}
    environment |= {"HOME": str(tmp_path), "GPOOL_HOME": str(tmp_path / "home")}

    def gpool(*arguments: str) -> tuple[int, str]:
        """Its code and its words; on stderr it may say, besides, that a task has to wait."""
        done = subprocess.run(
            [*GPOOL, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        return done.returncode, done.stdout

    argv = [*GPOOL, "up", "--data", str(tmp_path / "data"), "--port", str(port)]
    with log.open("wb") as out:
        up = subprocess.Popen(argv, env=environment, stdout=out, stderr=out, start_new_session=True)
    try:
        eventually("gpool up says how to join", lambda: b"gpool://" in log.read_bytes(), PATIENCE_S)
        assert gpool("run", "--", "python", "-c", "print(6*7)") == (0, "42\n"), log.read_text()
        assert gpool("run", "--", "sh", "-c", "exit 7") == (7, "")

        mark = f"still-there-{port}"
        endless = f"import time; time.sleep(600)  # {mark}"
        code, _ = gpool("run", "--detach", "--", "python", "-c", endless)
        assert code == 0, log.read_text()
        eventually("the endless task runs", lambda: len(processes_saying(mark)) > 0, PATIENCE_S)
        everything = {*descendants(up.pid), *processes_saying(mark)}
        assert len(everything) >= 4  # server, agent, launcher, sandbox
        up.send_signal(how)
        assert up.wait(PATIENCE_S) in ((0, 130) if how == signal.SIGINT else (-signal.SIGKILL,))
        eventually(
            "nothing of it is left",
            lambda: not any(map(alive, everything)) and not processes_saying(mark),
            PATIENCE_S,
        )
        assert gpool("ps")[0] == 5  # unreachable, and said so
    finally:
        up.kill()
        up.wait()


def test_run_prints_what_the_task_prints(pool: Pool) -> None:
    done = pool.gpool("run", "--", "python", "-c", "print(6*7)")
    assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr


def test_run_exits_with_the_tasks_own_code(pool: Pool) -> None:
    assert pool.gpool("run", "--", "sh", "-c", "exit 7").returncode == 7


def test_a_function_gives_its_value_and_raises_its_exception(pool: Pool) -> None:
    lines = list(
        pool.program(
            "import gpool\n"
            "@gpool.task\n"
            "def half(n):\n"
            "    if n % 2: raise ValueError(f'{n} is odd')\n"
            "    return n // 2\n"
            "print(half.remote(84), list(half.map([2, 4, 6])))\n"
            "try: half.remote(3)\n"
            "except ValueError as error: print('raised', error)\n"
        )
    )
    assert lines[0] == "42 [1, 2, 3]"
    assert lines[1].startswith("raised 3 is odd")


EXAMPLES_SAY = {
    "hello.py": "Hello world, from Python 3.",
    "pi.py": "pi is about 3.1",
    "failure.py": "out of stock: pears",
    "count_words.py": "6 words\n2 to\n2 be\n1 or\n1 not\n",
}


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_an_example_does_what_it_says(pool: Pool, tmp_path: Path, name: str) -> None:
    done = pool.script(EXAMPLES / name, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert EXAMPLES_SAY[name] in done.stdout


# ---- a large output


def brings_100_mb(pool: Pool, name: str, into: Path) -> None:
    """Neither server nor agent may hold the file: their peaks grow by less than a third of it."""
    assert pool.gpool("run", "--", "true").returncode == 0  # everything is imported and warm
    agent = pool.agents[name]
    server_before, agent_before = pool.server.peak_memory_bytes(), agent.peak_memory_bytes()

    task = pool.submit("python", "-c", HUNDRED_MB, outputs=["big.bin"])
    assert pool.gpool("wait", task).returncode == 0
    assert pool.gpool("result", task, "-o", str(into)).returncode == 0

    assert pool.status(task)["node_name"] == name
    [file] = into.rglob("big.bin")
    assert file.stat().st_size == 100_000_000
    assert pool.gpool("logs", task).stdout.strip() == sha256_of(file)
    assert pool.server.peak_memory_bytes() - server_before < 32 * MIB
    assert agent.peak_memory_bytes() - agent_before < 32 * MIB


def test_a_100_mb_output_comes_back_intact_with_flat_memory(pool: Pool, tmp_path: Path) -> None:
    brings_100_mb(pool, "first", tmp_path)


@pytest.fixture
def on_second(pool: Pool) -> Iterator[Pool]:
    """A second machine has joined by its link, and is the only one that takes tasks."""
    if "second" not in pool.agents:
        pool.join("second")
    assert pool.gpool("node", "resume", "second").returncode == 0
    assert pool.gpool("node", "pause", "first").returncode == 0
    yield pool
    assert pool.gpool("node", "resume", "first").returncode == 0
    assert pool.gpool("node", "pause", "second").returncode == 0


def test_a_second_machine_joined_by_its_link_does_the_same(on_second: Pool, tmp_path: Path) -> None:
    done = on_second.gpool("run", "--", "python", "-c", "print(6*7)")
    assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr
    assert on_second.gpool("run", "--", "sh", "-c", "exit 7").returncode == 7
    brings_100_mb(on_second, "second", tmp_path)


# ---- Ctrl-C


def running(pool: Pool, said: str) -> str:
    """The id of the newest task, once it has started."""
    [task] = pool.json("ps", "--limit", "1")
    assert task["status"] == "running", said
    id_: str = task["id"]
    return id_


@pytest.fixture(params=["as usual", "with interrupts ignored"])
def started(request: pytest.FixtureRequest) -> Iterator[None]:
    """How these tests were started; a script that does it in the background has interrupts ignored."""
    ignored = request.param == "with interrupts ignored"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("started")
def test_ctrl_c_detaches_and_says_how_to_come_back(pool: Pool) -> None:
    with pool.command("run", "--", "sh", "-c", "echo up; sleep 600") as run:
        assert run.stdout is not None
        assert run.stderr is not None
        assert run.stdout.readline() == "up\n"
        task = running(pool, "up")
        run.send_signal(signal.SIGINT)
        told = run.stderr.read()
        assert run.wait(PATIENCE_S) == 130
    assert f"gpool logs -f {task}" in told
    assert pool.status(task)["status"] == "running"
    assert pool.gpool("cancel", task).returncode == 0
    assert pool.gpool("wait", task).returncode == 130


def interrupted_twice(pool: Pool) -> tuple[str, int, str]:
    """The task, the code after a second Ctrl-C as soon as it is offered, and what was said of it."""
    with pool.command("run", "--", "sh", "-c", "echo up; sleep 600") as run:
        assert run.stdout is not None
        assert run.stderr is not None
        assert run.stdout.readline() == "up\n"
        task = running(pool, "up")
        run.send_signal(signal.SIGINT)
        said: list[str] = []
        while "press Ctrl-C again" not in "".join(said):
            said.append(run.stderr.readline())
            assert said[-1], said
        run.send_signal(signal.SIGINT)
        told = run.stderr.read()
        return task, run.wait(PATIENCE_S), told


def test_a_second_ctrl_c_cancels(pool: Pool) -> None:
    """Within two seconds. Where these tests stand still for longer, it is too late: the task goes on."""
    for _ in range(5):
        task, code, told = interrupted_twice(pool)
        if f"Cancelled {task}." in told:
            break
        assert pool.gpool("cancel", task).returncode == 0
    assert (code, f"Cancelled {task}." in told) == (130, True)
    pool.until_status(task, "cancelled")
