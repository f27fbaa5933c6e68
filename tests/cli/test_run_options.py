"""`gpool run` with environments, directories, scripts and checkpoints: the request and the terminal output."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from gpool import Client
from gpool.cli.printing import ProgressLine
from gpool.client.runs import TaskProgress
from tests.client.standin import Pool

Gpool = Callable[..., Result]

SCRIPT = """\
# /// script
# requires-python = ">=3.11"
# dependencies = ["Rich>=13", "numpy"]
# ///
print("hello")
"""


def sent(pool: Pool) -> dict[str, Any]:
    return pool.bodies[-1]


def test_every_option_reaches_the_server(gpool: Gpool, pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "more.txt").write_text("scipy\n")
    words = (
        "run --python 3.12 --pip numpy --pip x>=2 --requirements more.txt --network egress "
        "--checkpoint state --checkpoint-every 10m --grace 30s --preemptible -d -- true"
    )
    done = gpool(*words.split())
    assert done.exit_code == 0, done.output
    assert sent(pool) == {
        "command": ["true"],
        "recipe": {"python": "3.12", "packages": ["numpy", "scipy", "x>=2"]},
        "network": "egress",
        "checkpoint": "state",
        "checkpoint_every_s": 600.0,
        "grace_s": 30.0,
        "preemptible": True,
    }
    gpool("run", "--image", "debian@sha256:" + "0" * 64, "-d", "--", "true")
    assert sent(pool)["recipe"] == {"image": "debian@sha256:" + "0" * 64}
    gpool("run", "-d", "--", "true")
    assert sent(pool) == {"command": ["true"]}


def test_the_project_is_the_option_before_that_of_the_client(
    gpool: Gpool, pool: Pool, client: Client
) -> None:
    client.project = "thesis"
    gpool("run", "-d", "--", "true")
    assert sent(pool)["project"] == "thesis"
    gpool("run", "--project", "lab/course", "-d", "--", "true")
    assert sent(pool)["project"] == "lab/course"
    refused = gpool("run", "--project", "two words", "-d", "--", "true")
    assert "is not a project" in refused.output + str(refused.exception)


def test_the_options_of_a_gang_reach_the_server(gpool: Gpool, pool: Pool) -> None:
    words = (
        "run --nodes 4 --engine torchrun --on-loss end --label ssd --label zone=a --max-price 0.40/h "
        "--max-cost 2.00 -d -- "
        "python train.py"
    )
    done = gpool(*words.split())
    assert done.exit_code == 0, done.output
    assert sent(pool) == {
        "command": ["python", "train.py"],
        "name": "train.py",
        "nodes": 4,
        "engine": "torchrun",
        "on_loss": "end",
        "labels": ["ssd", "zone=a"],
        "max_price": "0.40/h",
        "max_cost": "2.00",
    }


def test_a_deadline_in_the_past_is_refused(gpool: Gpool, pool: Pool) -> None:
    done = gpool("run", "--by", "2020-01-01T00:00", "-d", "--", "true")
    assert (done.exit_code, pool.bodies) == (2, [])
    assert "give a future time" in done.output


def test_the_team_of_a_task_reaches_the_server(gpool: Gpool, pool: Pool) -> None:
    done = gpool("run", "--team", "tm-0000000000001", "-d", "--", "true")
    assert done.exit_code == 0, done.output
    assert sent(pool) == {"command": ["true"], "team": "tm-0000000000001"}


def test_the_owners_of_the_nodes_reach_the_server(gpool: Gpool, pool: Pool) -> None:
    done = gpool("run", "--on", "team:lab", "-d", "--", "true")
    assert done.exit_code == 0, done.output
    assert sent(pool) == {"command": ["true"], "on": "team:lab"}


def test_the_readers_of_inputs_are_named_where_anyone_may_be_one(
    gpool: Gpool, tmp_path: Path
) -> None:
    (tmp_path / "data").write_text("private")
    [line] = gpool("run", "-d", "--input", "data", "--", "true").stderr.splitlines()
    assert "can read its inputs" in line
    assert "--on me" in line
    for words in (
        ("--on", "me", "--input", "data"),
        ("--json", "--input", "data"),
        (),
    ):
        assert gpool("run", "-d", *words, "--", "true").stderr == ""


def test_a_script_is_uploaded_with_its_inline_metadata(
    gpool: Gpool, pool: Pool, tmp_path: Path
) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "train.py").write_text(SCRIPT)
    done = gpool("run", "--pip", "tqdm", "jobs/train.py", "--lr", "1", "-d")
    assert done.exit_code == 0, done.output
    assert sent(pool)["command"] == ["python", "jobs/train.py", "--lr", "1", "-d"]
    assert [one["path"] for one in sent(pool)["inputs"]] == ["jobs/train.py"]
    assert sent(pool)["recipe"]["packages"] == ["numpy", "rich>=13", "tqdm"]


def test_a_script_below_the_workdir_keeps_its_relative_path(
    gpool: Gpool, pool: Pool, tmp_path: Path
) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "train.py").write_text("print(1)")
    (tmp_path / "project" / "net.py").write_text("x = 1")
    (tmp_path / "project" / "big.bin").write_text("no")
    gpool("run", "--workdir", "project", "--ignore", "*.bin", "project/train.py")
    assert sent(pool)["command"] == ["python", "train.py"]
    assert [one["path"] for one in sent(pool)["inputs"]] == ["net.py", "train.py"]
    assert "recipe" not in sent(pool)


def test_a_script_may_be_named_relative_to_the_workdir(
    gpool: Gpool, pool: Pool, tmp_path: Path
) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "train.py").write_text(SCRIPT)
    (tmp_path / "train.py").write_text("not this one")
    for word in ("train.py", "./train.py", "../project/train.py"):
        gpool("run", "--workdir", "project", word)
        assert sent(pool)["command"] == ["python", "train.py"]
        assert [one["path"] for one in sent(pool)["inputs"]] == ["train.py"]
        assert sent(pool)["recipe"]["packages"] == ["numpy", "rich>=13"]


def test_the_workdir_may_be_a_parent_directory(
    gpool: Gpool, pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path / "sub")
    for word in ("train.py", "../train.py"):
        done = gpool("run", "--workdir", "..", word)
        assert done.exit_code == 0, done.output
        assert [one["path"] for one in pool.bodies[-1]["inputs"]] == ["train.py"]


def test_a_script_outside_the_workdir_is_named_by_its_file_name(
    gpool: Gpool, pool: Pool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "train.py"
    elsewhere.write_text("print(1)")
    gpool("run", str(elsewhere), "x")
    assert sent(pool)["command"] == ["python", "train.py", "x"]
    assert [one["path"] for one in sent(pool)["inputs"]] == ["train.py"]


def test_a_word_that_is_no_local_file_is_a_command(gpool: Gpool, pool: Pool) -> None:
    gpool("run", "train.py")
    assert sent(pool)["command"] == ["train.py"]


def test_invalid_options_are_reported_before_anything_is_sent(
    gpool: Gpool, pool: Pool, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("x")
    for words, said in (
        (("--pip", "./x"), "is not a package requirement"),
        (("--checkpoint-every", "soon"), "is not a duration"),
        (("--ignore", "x"), "the folder to ship"),
        (("--workdir", "nowhere"), "nowhere"),
        (("--network", "lan"), "lan"),
        (("--nodes", "0"), "1<=x<=1024"),
        (("--engine", "mpi"), "torchrun"),
    ):
        done = gpool("run", *words, "--input", "a.txt", "--", "true")
        assert done.exit_code == 2, (words, done.output)
        assert said in done.stderr
    assert (pool.bodies, pool.artifacts) == ([], {})


def test_the_phases_before_the_start_are_printed_on_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tell = ProgressLine()
    for progress in (
        TaskProgress(0, "queued", None),
        TaskProgress(1, "leased", None),
        TaskProgress(1, "leased", "build"),
        TaskProgress(1, "leased", "build"),
        TaskProgress(1, "running", "run"),
        TaskProgress(1, "running", "collect"),
        TaskProgress(1, "queued", None),
    ):
        tell(progress)
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.removeprefix("gpool: ") for line in err.splitlines()] == [
        "waiting for a node…",
        "building the environment…",
        "collecting the outputs…",
        "waiting for a node again…",
    ]


def test_the_phases_are_not_printed_without_a_terminal(gpool: Gpool, pool: Pool) -> None:
    pool.progress = [{"epoch": 1, "status": "leased", "phase": "build"}]
    done = gpool("run", "--", "true")
    assert (done.exit_code, done.stderr) == (0, "")


def test_the_reason_for_a_long_wait_is_printed_once(gpool: Gpool, pool: Pool) -> None:
    pool.progress = [{"epoch": 0, "status": "queued", "phase": None}]
    assert gpool("run", "--", "true").stderr == ""
    pool.silences = 3
    done = gpool("run", "--", "true")
    assert done.exit_code == 0
    assert done.stderr.startswith("gpool: waiting. No node has a GPU.\n  For the expected start ")
    assert done.stderr.count("No node has a GPU.") == 1
    task = gpool("run", "-d", "--", "true").stdout.strip()
    assert "gpool: waiting. No node has a GPU." in gpool("logs", "-f", task).stderr
    assert gpool("logs", task).stderr == ""
    pool.progress = [{"epoch": 1, "status": "running", "phase": "run"}]
    assert gpool("run", "--", "true").stderr == ""


def test_a_script_gives_its_task_a_name(gpool: Gpool, pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)")
    for words, name in (
        (("train.py", "--lr", "1"), "train.py"),
        (("--", "python3", "src/fit.py"), "fit.py"),
        (("--", "bash", "job.sh"), "job.sh"),
        (("--name", "mine", "train.py"), "mine"),
        (("--", "python", "-c", "print(1).py"), None),
        (("--", "./train.py"), "train.py"),
        (("--", "cat", "train.py"), None),
    ):
        gpool("run", *words)
        assert sent(pool).get("name") == name, words


def test_status_shows_phase_and_checkpoint(gpool: Gpool, pool: Pool) -> None:
    task = gpool("run", "-d", "--", "true").stdout.strip()
    saved = {"saved_at": "2026-01-01T00:00:00Z", "size_bytes": 20, "files": 2, "epoch": 1}
    pool.tasks[task] |= {"phase": "build", "checkpoint": saved, "network": "egress"}
    shown = dict(line.split(maxsplit=1) for line in gpool("status", task).stdout.splitlines())
    assert (shown["phase"], shown["network"]) == ("build", "egress")
    assert " (build) " in gpool("ps").stdout
    assert shown["checkpoint"] == "2 file(s), 20 bytes, saved at 2026-01-01T00:00:00Z"


def test_an_operator_preempts_tasks(gpool: Gpool, pool: Pool) -> None:
    task = gpool("run", "-d", "--", "true").stdout.strip()
    done = gpool("admin", "preempt", task)
    assert (done.exit_code, done.stdout) == (0, f"{task} is being preempted\n")
    assert pool.preempted == [task]
    assert gpool("admin", "preempt", "t-0000000000000").exit_code == 4


def test_an_empty_input_directory_is_reported(gpool: Gpool, pool: Pool, tmp_path: Path) -> None:
    """The command would miss it there, and nobody would know why."""
    (tmp_path / "empty" / "inner").mkdir(parents=True)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").write_text("a")
    done = gpool("run", "-d", "--input", "empty", "--input", "full", "--", "ls")
    assert done.exit_code == 0
    assert done.stdout.strip() in pool.tasks
    assert [one["path"] for one in pool.bodies[-1]["inputs"]] == ["full/a"]
    line = done.stderr.splitlines()[0]
    assert line.startswith("gpool: input 'empty' holds no file")
    assert gpool("run", "-d", "--on", "me", "--input", "full", "--", "ls").stderr == ""


def test_a_workdir_whose_files_are_all_ignored_is_reported(gpool: Gpool, tmp_path: Path) -> None:
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "a").write_text("a")
    done = gpool("run", "-d", "--workdir", "build", "--ignore", "a", "--", "ls")
    assert done.exit_code == 0
    [line] = done.stderr.splitlines()
    assert line.startswith("gpool: no file of 'build' is sent")
    assert not logging.getLogger("gpool.client").handlers  # the SDK's own are left alone


def test_a_missing_local_script_is_reported_at_once(gpool: Gpool) -> None:
    """Not only by a node, after it has waited for one."""
    assert "no local file trian.py" in gpool("run", "-d", "trian.py", "--lr", "1").stderr
    for brings_its_own in (["--image", "x"], ["--pip", "x"]):
        assert gpool("run", "-d", *brings_its_own, "tool.py").stderr == ""
    assert gpool("run", "-d", "/opt/tool.py").stderr == ""
