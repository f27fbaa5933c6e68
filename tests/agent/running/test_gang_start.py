"""How a member's command is started by its engine: what is handed to the sandbox, and what our starter does inside."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpool.agent.running import command_executor
from gpool.core.model import Allocation, Engine, Network, Requirements, Slice, TaskKind, TaskSpec
from gpool.wire.frames import Rendezvous
from tests.tools.processes import PATIENCE_S, free_port

PART = Allocation(3, 2000, 2 << 30, (Slice(0, 1 << 30, 1000), Slice(1, 1 << 30, 1000)))
HEAD = Rendezvous(0, (("192.0.2.1", 47101), ("192.0.2.2", 47105)), b"s" * 32)
OTHER = Rendezvous(1, HEAD.peers, HEAD.secret)


def task(engine: Engine, *command: str, network: Network = Network.NONE) -> TaskSpec:
    needs = Requirements(nodes=2, network=network)
    return TaskSpec(TaskKind.COMMAND, "t", needs, command=command, engine=engine)


def test_without_an_engine_the_command_is_as_it_was_given() -> None:
    spec = task(Engine.NONE, "mpirun", "x")
    assert command_executor.command_of(spec, OTHER, PART) == ("mpirun", "x")
    assert dict(command_executor.variables_of(spec, OTHER))["GPOOL_RANK"] == "1"


def test_a_members_lane_leads_to_the_others_and_out_only_when_asked() -> None:
    lane = command_executor.network_of(task(Engine.NONE, "x"), OTHER)
    assert (lane.rank, lane.peers, lane.secret, lane.egress) == (1, HEAD.peers, HEAD.secret, False)
    assert command_executor.network_of(task(Engine.NONE, "x", network=Network.EGRESS), OTHER).egress


def test_the_secret_of_a_gang_is_in_no_command_and_no_variable() -> None:
    for engine in Engine:
        spec = task(engine, "x")
        told = (
            *command_executor.command_of(spec, OTHER, PART),
            *map(str, command_executor.variables_of(spec, OTHER)),
        )
        assert "sss" not in "".join(told)


@pytest.fixture
def engines(tmp_path: Path) -> Path:
    """Stand-ins for torch and Ray that say how they were started; ours finds them as it would the real ones."""
    packages = tmp_path / "packages"
    (packages / "torch" / "distributed").mkdir(parents=True)
    (packages / "torch" / "__init__.py").touch()
    (packages / "torch" / "distributed" / "__init__.py").touch()
    (packages / "torch" / "distributed" / "run.py").write_text("import sys; print(sys.argv[1:])\n")
    (packages / "ray" / "scripts").mkdir(parents=True)
    (packages / "ray" / "__init__.py").touch()
    (packages / "ray" / "scripts" / "__init__.py").touch()
    (packages / "ray" / "scripts" / "scripts.py").write_text(
        "import os, sys; sys.exit(print('no room') or 3 if os.environ.get('RAY_FAILS') else 0)\n"
    )
    return packages


@contextlib.contextmanager
def started(
    command: tuple[str, ...], packages: Path | None, **more: str
) -> Iterator[subprocess.Popen[str]]:
    """By the words that a sandbox would run, with nothing but a Python around; killed if it is still there in the end."""
    environment = {"PATH": os.path.dirname(sys.executable) + ":/usr/bin:/bin", **more}
    if packages is not None:
        environment["PYTHONPATH"] = str(packages)
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_torchrun_gets_the_command_as_it_is(engines: Path) -> None:
    spec = task(Engine.TORCHRUN, "python", "train.py", "--lr", "1 2")
    with started(command_executor.command_of(spec, OTHER, PART), engines) as process:
        said, _ = process.communicate(timeout=PATIENCE_S)
    words = said.strip()
    assert words.endswith("'--no-python', 'python', 'train.py', '--lr', '1 2']")
    assert "'--node-rank=1'" in words
    assert "'--nproc-per-node=2'" in words


@pytest.mark.parametrize(("engine", "package"), [(Engine.TORCHRUN, "torch"), (Engine.RAY, "ray")])
def test_an_engine_that_is_not_there_is_named_with_what_to_do(
    engine: Engine, package: str, tmp_path: Path
) -> None:
    words = command_executor.command_of(task(engine, "x"), HEAD, PART)
    bare = tmp_path / "bin"
    bare.mkdir()
    (bare / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    (bare / "python").chmod(0o755)
    with started(words, None, PATH=f"{bare}:/usr/bin:/bin") as process:
        _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 127
    assert f"engine {engine.value} needs the package '{package}'" in said
    assert f"--pip {package}" in said


def test_an_environment_without_a_python_is_told_so(tmp_path: Path) -> None:
    words = command_executor.command_of(task(Engine.RAY, "x"), HEAD, PART)
    with started(words, None, PATH=str(tmp_path)) as process:
        _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 127
    assert "engine ray needs a Python" in said


def here(words: tuple[str, ...], gate: int, ray: int) -> tuple[str, ...]:
    """The same words with the members' meeting places on this host's loopback."""
    at = next(place for place, word in enumerate(words) if word.startswith("{"))
    plan = json.loads(words[at])
    plan |= {"head": "127.0.0.1", "gate": gate, "ray": f"127.0.0.1:{ray}"}
    return (*words[:at], json.dumps(plan), *words[at + 1 :])


def test_ray_runs_the_command_once_all_are_in_and_the_others_leave_with_it(engines: Path) -> None:
    gate = free_port()
    with socket.create_server(("127.0.0.1", 0)) as stands_for_the_head:
        ray = stands_for_the_head.getsockname()[1]
        spec = task(Engine.RAY, "sh", "-c", "echo to $RAY_ADDRESS; exit 7")
        first = here(command_executor.command_of(spec, HEAD, PART), gate, ray)
        second = here(command_executor.command_of(spec, OTHER, PART), gate, ray)
        with started(first, engines) as head, started(second, engines) as other:
            said, complaint = head.communicate(timeout=PATIENCE_S)
            assert (said, head.returncode) == (f"to 127.0.0.1:{ray}\n", 7), complaint
            assert other.communicate(timeout=PATIENCE_S) == ("", "")
            assert other.returncode == 0


def test_ray_never_runs_the_command_while_one_is_missing(engines: Path) -> None:
    gate = free_port()
    spec = task(Engine.RAY, "echo", "ran")
    words = here(command_executor.command_of(spec, HEAD, PART), gate, 1)
    with started(words, engines) as head, pytest.raises(subprocess.TimeoutExpired):
        head.communicate(timeout=1.5)


def test_ray_that_does_not_start_says_why(engines: Path) -> None:
    spec = task(Engine.RAY, "echo", "ran")
    words = here(command_executor.command_of(spec, HEAD, PART), 1, 1)
    with started(words, engines, RAY_FAILS="1") as head:
        said, complaint = head.communicate(timeout=PATIENCE_S)
    assert (said, head.returncode) == ("", 125)
    assert "no room" in complaint
    assert "Ray did not start here (code 3)" in complaint


def test_the_head_never_waits_for_a_member_whose_ray_did_not_start(engines: Path) -> None:
    gate = free_port()
    with socket.create_server(("127.0.0.1", 0)) as stands_for_the_head:
        ray = stands_for_the_head.getsockname()[1]
        spec = task(Engine.RAY, "echo", "ran")
        first = here(command_executor.command_of(spec, HEAD, PART), gate, ray)
        second = here(command_executor.command_of(spec, OTHER, PART), gate, ray)
        with started(first, engines) as head, started(second, engines, RAY_FAILS="1") as other:
            said, complaint = head.communicate(timeout=PATIENCE_S)
            assert (said, head.returncode) == ("", 125)
            assert "another member ended before Ray had started" in complaint
            assert "no room" in other.communicate(timeout=PATIENCE_S)[1]


def test_a_warning_reaches_the_command_behind_ray(engines: Path) -> None:
    gate = free_port()
    alone = Rendezvous(0, HEAD.peers[:1], b"s")
    caught = "trap 'echo saved; exit 0' TERM; echo up; while :; do sleep 0.05; done"
    spec = task(Engine.RAY, "sh", "-c", caught)
    with started(here(command_executor.command_of(spec, alone, PART), gate, 1), engines) as head:
        assert head.stdout is not None
        assert head.stdout.readline() == "up\n"
        head.terminate()
        assert head.communicate(timeout=PATIENCE_S)[0] == "saved\n"
        assert head.returncode == 0
