"""Files and standard input of `gpool run`: sent, or refused with what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from gpool import Client
from gpool.cli.main import cli
from tests.cli.conftest import Gpool
from tests.client.standin import Pool


def test_a_local_program_that_is_not_sent_is_refused_and_one_that_is_sent_runs(
    gpool: Gpool, pool: Pool, tmp_path: Path
) -> None:
    (tmp_path / "stranger").write_text("#!/bin/sh\n")
    done = gpool("run", "--", "./stranger")
    assert done.exit_code == 2
    assert "./stranger: present here, but not sent" in done.stderr
    assert "--input ./stranger" in done.stderr
    assert "--workdir ." in done.stderr
    assert not pool.bodies
    for option in (("--input", "stranger"), ("--workdir", ".")):
        assert gpool("run", *option, "--", "./stranger").exit_code == 0
    assert gpool("run", "--", "./elsewhere").exit_code == 0  # not here: nothing is known about it


def test_another_local_file_that_is_not_sent_is_named_in_a_warning(
    gpool: Gpool, tmp_path: Path
) -> None:
    (tmp_path / "fetch.py").touch()
    (tmp_path / "true").touch()
    done = gpool("run", "--", "python", "fetch.py", "--config=fetch.py")
    assert done.exit_code == 0
    assert done.stderr.count("fetch.py: present here, but not sent") == 1
    sent = gpool("run", "--input", "fetch.py", "--", "python", "fetch.py")
    assert "not sent" not in sent.stderr
    assert "can read its inputs" in sent.stderr
    assert gpool("run", "--output", "fetch.py", "--", "python", "fetch.py").stderr == ""
    assert gpool("run", "--", "true").stderr == ""  # a program of the node's


UNREAD = "from gpool.cli.submission import unread_input; print(unread_input())"


def test_unread_standard_input_is_noticed_in_a_pipe_and_a_file_but_not_elsewhere(
    tmp_path: Path,
) -> None:
    def answer(**stdin: object) -> str:
        done = subprocess.run(
            [sys.executable, "-c", UNREAD],
            capture_output=True,
            text=True,
            check=True,
            **stdin,  # type: ignore[call-overload]
        )
        return str(done.stdout).strip()

    (tmp_path / "full").write_text("hi")
    (tmp_path / "empty").touch()
    assert answer(input="hi") == "True"
    assert answer(input="") == "False"
    assert answer(stdin=subprocess.DEVNULL) == "False"
    with (tmp_path / "full").open() as full, (tmp_path / "empty").open() as empty:
        assert answer(stdin=full) == "True"
        assert answer(stdin=empty) == "False"


REFUSED = """
import sys
from gpool.cli.submission import standard_input
from gpool.core.errors import Invalid
try:
    with standard_input(False):
        print("not noticed")
except Invalid as error:
    print(error.detail)
"""


def test_standard_input_with_data_is_refused_unless_it_is_sent(client: Client, pool: Pool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", REFUSED], input="hi", capture_output=True, text=True, check=True
    )
    assert "add --stdin to send it" in done.stdout
    runner = CliRunner()
    sent = runner.invoke(cli, ["run", "--stdin", "--", "cat", "-n"], obj=client, input="hi\n")
    assert sent.exit_code == 0
    [body] = pool.bodies
    assert body["command"] == ["sh", "-c", 'exec "$@" < .gpool-stdin', "sh", "cat", "-n"]
    [file] = body["inputs"]
    assert (file["path"], pool.artifacts[file["sha256"]]) == (".gpool-stdin", b"hi\n")


def test_a_command_whose_standard_input_was_sent_reads_it(tmp_path: Path) -> None:
    (tmp_path / ".gpool-stdin").write_bytes(b"one\ntwo\n")
    command = ["sh", "-c", 'exec "$@" < .gpool-stdin', "sh", "wc", "-l"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "2"


def test_a_task_that_no_node_could_run_is_cancelled_on_request(gpool: Gpool, pool: Pool) -> None:
    pool.runs = False
    done = gpool("run", "--must-fit", "-d", "--gpu", "H100", "--", "true")
    assert done.exit_code == 1
    assert "no node of the pool can run it: No node has a GPU. Cancelled t-" in done.stderr
    assert len(pool.cancelled) == 1
    assert gpool("run", "-d", "--gpu", "H100", "--", "true").exit_code == 0  # it waits
    assert len(pool.cancelled) == 1


def test_an_error_that_the_log_ends_with_is_printed_once(gpool: Gpool, pool: Pool) -> None:
    why = "no solution found\nnumpy 99 does not exist"

    def command(task: dict[str, Any]) -> dict[str, Any]:
        pool.logs[task["id"]] = [("stderr", f"{why}\n")] if pool.sentence else []
        return {"status": "failed", "reason": "bad_input", "exit_code": None, "error_text": why}

    pool.command = command
    done = gpool("run", "--", "x")
    assert done.stderr.count("numpy 99 does not exist") == 1
    assert "could not be prepared: its output says why" in done.stderr
    pool.sentence = ""  # nothing in the log
    assert f"could not be prepared: {why.splitlines()[0]}" in gpool("run", "--", "x").stderr
