"""Output of functions in the caller's terminal, and the line that counts a map's calls."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import httpx2
import pytest

import gpool
from gpool import Client
from gpool.client import options
from gpool.client.mapping import MAP_ECHOES, BatchLine
from gpool.client.options import MEANINGS, FunctionOptions, Options
from gpool.client.runs import echoed_result
from gpool.client.values import Result, failure
from tests.client.inprocess import Node, RealPool
from tests.client.standin import Pool


class Collected(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage() + "\n"


@pytest.fixture
def warned() -> Iterator[Collected]:
    """Warnings of the SDK."""
    handler = Collected()
    loggers = [logging.getLogger(f"gpool.client.{name}") for name in ("runs", "mapping")]
    for logger in loggers:
        logger.addHandler(handler)
    yield handler
    for logger in loggers:
        logger.removeHandler(handler)


class Talking(Pool):
    """Every call prints two lines, the second unfinished and with a control sequence."""

    unfinished = 0  # requests for a result that come before the end

    def _run(self, batch: Any, task: dict[str, Any]) -> None:
        super()._run(batch, task)
        self.logs[task["id"]] = [("stdout", "hello\nhal"), ("stderr", "f\x1b[2J")]
        batch.results[-1]["printed"] = True

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        if self.unfinished and request.url.path.endswith("/result"):
            self.unfinished -= 1
            return httpx2.Response(202, json={"status": "running"})
        return super().handle_request(request)


@pytest.fixture
def talking() -> Talking:
    return Talking()


@pytest.fixture
def sdk(talking: Talking) -> Iterator[Client]:
    with Client("http://pool.test", "gpk_test", transport=talking) as client:
        yield client


def test_the_output_of_a_call_is_shown_behind_its_id_without_control_sequences(
    sdk: Client, talking: Talking, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sdk.task(lambda: 7).remote() == 7
    [id_] = talking.tasks
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == f"[{id_}] hello\n[{id_}] half\u241b[2J\n"


def test_no_output_is_shown_and_no_log_is_asked_for_if_the_caller_does_not_want_it(
    sdk: Client, talking: Talking, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sdk.task(show_output=False)(lambda: 7).remote() == 7
    assert sdk.task(show_output=False)(lambda: 7).submit().result() == 7
    assert capsys.readouterr().err == ""
    assert not any("/logs" in url for _, url, _ in talking.requests)


def test_a_submitted_call_shows_its_output_with_its_result(
    sdk: Client, talking: Talking, capsys: pytest.CaptureFixture[str]
) -> None:
    run = sdk.task(lambda: 7).submit()
    assert capsys.readouterr().err == ""
    assert run.result() == 7
    assert run.result() == 7
    assert capsys.readouterr().err.count("hello") == 1


def test_a_long_call_is_followed_with_its_build_and_its_reason_to_wait(
    sdk: Client,
    talking: Talking,
    capsys: pytest.CaptureFixture[str],
    warned: Collected,
) -> None:
    waiting = {"epoch": 0, "status": "queued", "phase": None}
    building = {"epoch": 1, "status": "leased", "phase": "build"}
    talking.progress, talking.silences = [building, waiting], 2
    run = sdk.task(lambda: 7).submit()
    talking.unfinished = 1
    assert echoed_result(sdk, run.id, waited_s=1.0).status == "succeeded"
    shown = capsys.readouterr().err
    assert f"[{run.id}] building the environment…\n" in shown
    assert f"[{run.id}] hello\n" in shown
    assert f"task {run.id} waits: No node has a GPU." in warned.text


def test_of_a_map_the_output_of_the_first_calls_is_shown(
    sdk: Client,
    talking: Talking,
    capsys: pytest.CaptureFixture[str],
    warned: Collected,
) -> None:
    assert sum(sdk.task(lambda x: x).map(range(2 * MAP_ECHOES))) == sum(range(2 * MAP_ECHOES))
    assert capsys.readouterr().err.count("hello") == MAP_ECHOES
    assert warned.text.count("more calls have output") == 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_maps_line_counts_on_a_terminal_and_leaves_nothing_behind() -> None:
    terminal, file = Terminal(), io.StringIO()
    for out in (terminal, file):
        line = BatchLine("square", out)
        line.failed = 2
        line.show("b-1", 5, 10, more=True)
        line.clear()
        line.clear()
    text = "\r\x1b[Ksquare b-1 [##########----------] 5 of 10+ done, 2 failed\r\x1b[K"
    assert (terminal.getvalue(), file.getvalue()) == (text, "")


def test_a_map_says_once_that_the_environment_is_being_built() -> None:
    phases = iter(["fetch", "build", "build", "run", "build"])
    out = io.StringIO()
    line = BatchLine("square", out, lambda: next(phases))
    for _ in range(4):
        line.idle()
    assert out.getvalue() == "square: building the environment…\n"


def test_every_option_is_typed_and_explained_and_the_page_is_current() -> None:
    names = list(Options.__dataclass_fields__)
    assert sorted(get_type_hints(FunctionOptions)) == sorted(names)
    assert sorted(MEANINGS) == sorted(names)
    page = Path(__file__).parents[2] / "docs" / "options.md"
    assert page.read_text(encoding="utf-8") == options.as_markdown(), "run make docs"


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPool]:
    pool = RealPool(tmp_path_factory.mktemp("data"))
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def node(real: RealPool) -> Iterator[Node]:
    joined = real.join()
    yield joined
    joined.close()


def test_a_batch_and_the_tasks_of_a_node_are_counted_by_the_real_server(
    real: RealPool, node: Node
) -> None:
    with Client("http://pool.test", real.key, transport=real.transport) as client:
        half = client.task(lambda x: 1 / x)
        list(half.map([1, 0, 2], return_exceptions=True))
        [newest] = client.listing("tasks", limit=1)
        counted = client.batch(newest["batch"], counts=True)
        assert [counted[name] for name in ("succeeded", "failed", "cancelled", "running")] == [2, 1, 0, 0]  # fmt: skip
        assert client.batch(newest["batch"])["failed"] is None
        pages: list[dict[str, Any]] = []
        heads = client.listing("tasks", limit=50, on_page=pages.append, first="true")
        assert len({one["batch"] for one in heads}) == len(heads)
        assert {one["id"]: one["total"] for one in pages[0]["batches"]}[newest["batch"]] == 3
        with pytest.raises(gpool.Invalid, match="'first'"):
            client.listing("tasks", first="true", status="failed")
        [mine] = client.listing("nodes")
        tasks = client.api.get_json(f"/v1/nodes/{mine['id']}/tasks?limit=2")
        assert tasks["running"] == []
        assert len(tasks["ended"]) == 2
        assert tasks["ended"][0]["user_name"]
        assert "name" not in tasks["ended"][0]  # what a task is called is its user's affair


def test_a_task_over_its_disk_limit_ran_out_of_disk() -> None:
    over = "it wrote more than its disk limit of 20000000 bytes"
    told = str(failure(Result("t-1", 0, 1, "failed", "bad_output", error_text=over)))
    assert "ran out of disk; ask for more with --disk" in told
    assert over in told
    missing = Result("t-1", 0, 1, "failed", "bad_output", error_text="no file 'model'")
    assert "did not write its outputs" in str(failure(missing))
