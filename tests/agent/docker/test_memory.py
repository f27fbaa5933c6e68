"""A container that was killed for memory is told so though its engine does not say it; one killed otherwise never is."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from urllib3.exceptions import ProtocolError

from gpool.agent.runtime.docker.engine import EngineClient, exceeded_its_limit, records, translated
from gpool.agent.runtime.protocol import SandboxFailed
from tests.tools.engines import IMAGE, docker_client, shared_engine
from tests.tools.processes import eventually
from tests.tools.runtimes import PATIENCE_S

NO_LOG = "/nowhere/kmsg"
GREEDY = "x = bytearray(300 << 20)"
WAITS = "import signal; signal.pause()"
KILLS_ITSELF = "import os; os.kill(os.getpid(), 9)"
ID = "c0ffee" * 10 + "beef"
Meanwhile = Callable[[Any, str], None]


def line(container: str, *, constraint: str = "CONSTRAINT_MEMCG", number: int = 6) -> str:
    group = f"/libpod_parent/libpod-{container}"
    return (
        f"{number},14253,34332831625,-;oom-kill:constraint={constraint},nodemask=(null),cpuset=x,"
        f"mems_allowed=0,oom_memcg={group},task_memcg={group},task=python,pid=28813,uid=0\n"
    )


def test_the_kernels_own_words_about_a_limit_are_believed() -> None:
    assert exceeded_its_limit(ID, [line("0" * 64), line(ID)])


@pytest.mark.parametrize(
    "said",
    [
        line("0" * 64),
        line(ID, constraint="CONSTRAINT_NONE"),  # the whole machine had none left
        line(ID, number=14),  # a program wrote it
        line("0" * 64).replace("task=python", f"task_memcg=/a/{ID},task=python"),
        f"6,1,2,-;oom-kill:constraint=CONSTRAINT_MEMCG,oom_memcg=/above,task_memcg=/above/{ID},task=x",
    ],
)
def test_other_words_never_tell_of_a_limit(said: str) -> None:
    assert not exceeded_its_limit(ID, [said])


@given(st.lists(st.text()))
def test_no_record_is_too_strange_to_be_read(said: list[str]) -> None:
    assert not exceeded_its_limit(ID, said)


def test_a_log_that_may_not_be_read_says_nothing() -> None:
    assert list(records(NO_LOG)) == []


@pytest.fixture(params=["docker", "podman"])
def engine(
    request: pytest.FixtureRequest, require: Callable[[str], None]
) -> Iterator[EngineClient]:
    require(request.param)
    with contextlib.closing(EngineClient(shared_engine(request.param).address)) as made:
        yield made


@contextlib.contextmanager
def ended(engine: EngineClient, program: str, meanwhile: Meanwhile | None = None) -> Iterator[str]:
    with docker_client(shared_engine(engine.facts.kind)) as api:
        settings = {
            "mem_limit": "64m",
            "memswap_limit": "64m",
            "network_mode": "none",
            "init": True,
        }
        made = api.create_container(
            IMAGE, ["python", "-c", program], host_config=api.create_host_config(**settings)
        )["Id"]
        try:
            api.start(made)
            if meanwhile is not None:
                meanwhile(api, made)
            assert engine.wait(made).code == 137
            yield made
        finally:
            api.remove_container(made, force=True)


def test_the_kernels_log_tells_of_it(engine: EngineClient) -> None:
    if not any(True for _ in records()):
        pytest.skip("the kernel's log may not be read here")
    with ended(engine, GREEDY) as container:
        assert engine.exceeded_memory(container)


@pytest.mark.parametrize("engine", ["docker"], indirect=True)  # Podman has no such event
def test_without_the_kernels_log_the_engines_events_tell_of_it(engine: EngineClient) -> None:
    """Killed beside a process that stays: containerd asks for its notice once the task runs, and drops it with the group."""

    def exceed(api: Any, container: str) -> None:
        api.exec_start(api.exec_create(container, ["python", "-c", GREEDY])["Id"])
        noticed = functools.partial(engine.exceeded_memory, container, kernel_log=NO_LOG)
        eventually("its engine has noticed", noticed, PATIENCE_S)
        api.kill(container)

    with ended(engine, WAITS, exceed) as container:
        assert engine.exceeded_memory(container, kernel_log=NO_LOG)


def test_one_killed_otherwise_never_counts_as_too_large(engine: EngineClient) -> None:
    with ended(engine, GREEDY), ended(engine, KILLS_ITSELF) as container:
        assert not engine.exceeded_memory(container)


def test_a_conversation_that_breaks_off_is_a_failed_sandbox() -> None:
    """Whoever waits for a container's end must hear something, or its task never ends."""
    with (
        pytest.raises(SandboxFailed, match="the engine went away"),
        translated("the engine went away"),
    ):
        raise ProtocolError("Connection broken", ConnectionResetError())
