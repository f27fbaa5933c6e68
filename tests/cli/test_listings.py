"""Batches in listings, logs by attempt, and cancelling everything."""

from __future__ import annotations

import json
from pathlib import Path

from click.shell_completion import ShellComplete

from gpool import Client
from gpool.cli.main import cli
from gpool.cli.tasks import between_attempts
from tests.cli.conftest import Gpool
from tests.client.standin import Pool


def test_the_calls_of_a_map_are_one_line_and_every_task_on_request(
    gpool: Gpool, client: Client, pool: Pool
) -> None:
    list(client.task(name="square")(lambda x: x * x).map(range(7)))
    gpool("run", "--name", "alone", "--", "true")
    lines = gpool("ps").stdout.splitlines()
    [batch] = [id_ for id_, found in pool.batches.items() if len(found.tasks) == 7]
    assert [line.split()[0][:2] for line in lines] == ["ID", "t-", "b-"]
    assert lines[2].split()[:4] == [batch, "square", "7", "ended"]
    assert len(gpool("ps", "--tasks").stdout.splitlines()) == 9
    assert len(gpool("ps", "--status", "succeeded").stdout.splitlines()) == 9
    assert len(json.loads(gpool("ps", "--json").stdout)) == 8
    assert "DURATION" in lines[0]


def test_status_of_a_batch_counts_its_tasks(gpool: Gpool, client: Client, pool: Pool) -> None:
    list(client.task(lambda x: 1 / x).map([1, 0, 2], return_exceptions=True))
    [batch] = pool.batches
    done = gpool("status", batch)
    assert done.exit_code == 0
    shown = dict(line.split(None, 1) for line in done.stdout.splitlines())
    assert (shown["total"], shown["succeeded"], shown["failed"]) == ("3", "2", "1")
    assert json.loads(gpool("status", "--json", batch).stdout)["failed"] == 1


def test_everything_that_has_not_ended_is_cancelled_at_once(
    gpool: Gpool, client: Client, pool: Pool
) -> None:
    assert gpool("run", "--", "true").exit_code == 0
    pool.runs = False
    waiting = gpool("run", "-d", "--", "true").stdout.strip()
    call = client.task(lambda: 1).submit()
    done = gpool("cancel", "--all")
    assert done.exit_code == 0
    assert sorted(pool.cancelled) == sorted([waiting, pool.tasks[call.id]["batch"]])
    for wrong in ((), ("--all", waiting)):
        assert gpool("cancel", *wrong).exit_code == 2


def test_the_last_lines_of_a_log_are_printed(gpool: Gpool, pool: Pool) -> None:
    id_ = gpool("run", "-d", "--", "true").stdout.strip()
    pool.logs[id_] = [("stdout", "1\n2\n3"), ("stderr", "4\n5")]
    assert gpool("logs", "--tail", "2", id_).stdout == "34\n5"
    assert gpool("logs", "--tail", "0", id_).stdout == ""
    assert gpool("logs", "--tail", "2", "-f", id_).exit_code == 2


def test_a_line_separates_the_attempts_of_a_task() -> None:
    said: list[str] = []
    documents = [{"epoch": 1}, {"epoch": 1}, {"epoch": 3}]
    assert list(between_attempts(documents, said.append)) == documents
    assert said == ["gpool: --- attempt 3: the task was started again ---"]


def test_waiting_for_several_tasks_names_the_one_that_failed(gpool: Gpool, pool: Pool) -> None:
    first = gpool("run", "-d", "--", "true").stdout.strip()
    pool.command = lambda _: {"status": "failed", "exit_code": 3}
    second = gpool("run", "-d", "--", "false").stdout.strip()
    done = gpool("wait", first, second)
    assert done.exit_code == 3
    assert second in done.stderr
    assert first not in done.stderr
    assert gpool("wait", second).stderr == ""  # one task: the exit code says it


def test_ids_of_tasks_are_completed(
    client: Client, pool: Pool, gpool: Gpool, tmp_path: Path
) -> None:
    id_ = gpool("run", "-d", "--", "true").stdout.strip()
    complete = ShellComplete(cli, {"obj": client}, "gpool", "_GPOOL_COMPLETE")
    assert [one.value for one in complete.get_completions(["logs"], "t-")] == [id_]
    assert complete.get_completions(["status"], "x") == []
