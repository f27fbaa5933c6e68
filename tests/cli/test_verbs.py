"""Each verb as a user types it: its output streams and exit code."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from gpool import Client
from gpool.cli.main import ELSEWHERE, VERBS, cli
from gpool.cli.printing import local_time
from gpool.core.ids import encode
from tests.client.standin import Pool

Gpool = Callable[..., Result]


def left(pool: Pool, path: str, content: bytes) -> dict[str, Any]:
    sha256 = hashlib.sha256(content).hexdigest()
    pool.artifacts[sha256] = content
    return {"path": path, "sha256": sha256, "size_bytes": len(content), "executable": False}


def ends(pool: Pool, **result: Any) -> None:
    pool.command = lambda _: {"status": "failed", "exit_code": None} | result


def test_the_help_lines_of_the_table_equal_those_of_the_verbs() -> None:
    context = click.Context(cli)
    for verb, (_, line) in VERBS.items():
        command = cli.get_command(context, verb)
        assert command is not None
        assert (command.help or "").splitlines()[0] == line
        assert command.name == verb


def groups(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    context = click.Context(group)
    yield path
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from groups(command, (*path, name))


RENAMED = [
    (("keys",), "make", "create"),
    (("keys",), "end", "revoke"),
    (("team",), "make", "create"),
    (("admin", "reservations"), "make", "create"),
    (("admin", "reservations"), "end", "delete"),
]


@pytest.mark.parametrize(("group", "old", "new"), RENAMED)
def test_a_renamed_verb_works_as_a_hidden_alias_with_a_note(
    gpool: Gpool, group: tuple[str, ...], old: str, new: str
) -> None:
    listed = gpool(*group, "--help").stdout
    assert f"\n  {new} " in listed
    assert f"\n  {old} " not in listed
    now, before = gpool(*group, new, "--help"), gpool(*group, old, "--help")
    assert (before.exit_code, before.stdout, now.stderr) == (0, now.stdout, "")
    path = f"cli {' '.join(group)}"
    assert before.stderr == f"gpool: `{path} {old}` is deprecated; use `{path} {new}`\n"


def test_every_renamed_verb_is_listed_above() -> None:
    found = []
    for path in groups(cli):
        command: click.Command | None = cli
        for name in path:
            assert isinstance(command, click.Group)
            command = command.get_command(click.Context(command), name)
        assert isinstance(command, click.Group)
        found += [(path, *pair) for pair in getattr(command, "renamed", {}).items()]
    assert found == RENAMED


def test_every_command_and_option_has_a_help_line() -> None:
    def missing(command: click.Command, path: str) -> Iterator[str]:
        if not (command.help or "").strip():
            yield path
        for param in command.params:
            if isinstance(param, click.Option) and not (param.help or "").strip():
                yield f"{path} {param.opts[-1]}"
        if isinstance(command, click.Group):
            for name in command.list_commands(click.Context(command)):
                member = command.get_command(click.Context(command), name)
                assert member is not None
                yield from missing(member, f"{path} {name}")

    assert list(missing(cli, "gpool")) == []


def test_help_lists_options_by_section_and_examples_one_per_line(gpool: Gpool) -> None:
    lines = gpool("run", "--help").stdout.splitlines()
    titles = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert titles[0] == "Resources:"
    assert titles[-1] == "Options:"
    examples = lines[lines.index("  Examples:") + 1 :]
    assert all(line.startswith("    gpool run ") for line in examples)


def test_run_prints_what_the_task_prints_and_exits_as_it_does(gpool: Gpool, pool: Pool) -> None:
    def command(task: dict[str, Any]) -> dict[str, Any]:
        pool.logs[task["id"]] = [("stdout", "42\n"), ("stderr", "oops\n")]
        return {"status": "failed", "exit_code": 7}

    pool.command = command
    done = gpool("run", "--", "python", "-c", "print(6*7)")
    assert (done.exit_code, done.stdout, done.stderr) == (7, "42\n", "oops\n")
    assert pool.bodies[-1]["command"] == ["python", "-c", "print(6*7)"]


@pytest.mark.parametrize(
    ("result", "code"),
    [
        ({"reason": "timed_out"}, 124),
        ({"reason": "cancelled", "status": "cancelled"}, 130),
        ({"reason": "exited", "exit_code": 137}, 137),
        ({"reason": "sandbox_failed"}, 125),
        ({"reason": "node_failed"}, 125),
        ({"reason": "loses_nodes"}, 125),
        ({"reason": "lost"}, 125),
        ({"reason": "bad_output"}, 1),
        ({"reason": "exited", "exit_code": 0, "status": "succeeded"}, 0),
    ],
)
def test_run_and_wait_exit_with_the_tasks_code(
    gpool: Gpool, pool: Pool, result: dict[str, Any], code: int
) -> None:
    ends(pool, **result)
    assert gpool("run", "--", "x").exit_code == code
    task = gpool("run", "--detach", "--", "x").stdout.strip()
    assert gpool("wait", task).exit_code == code


def test_run_sends_inputs_and_fetches_outputs_here(
    gpool: Gpool, pool: Pool, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x.txt").write_text("hello")
    ends(pool, status="succeeded", exit_code=0, outputs=[left(pool, "model/w", b"weights")])
    done = gpool("run", "--input", "data", "--output", "model/", "--", "train")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "model" / "w").read_bytes() == b"weights"
    assert [one["path"] for one in pool.bodies[-1]["inputs"]] == ["data/x.txt"]
    assert pool.bodies[-1]["outputs"] == ["model/"]


def test_an_output_path_outside_the_directory_is_not_written(
    gpool: Gpool, pool: Pool, tmp_path: Path
) -> None:
    ends(pool, status="succeeded", exit_code=0, outputs=[left(pool, "../evil", b"x")])
    done = gpool("run", "--output", "x", "--", "train")
    assert done.exit_code == 125
    assert not (tmp_path.parent / "evil").exists()


def test_outputs_that_cannot_be_written_can_be_fetched_again(
    gpool: Gpool, pool: Pool, tmp_path: Path
) -> None:
    ends(pool, status="succeeded", exit_code=0, outputs=[left(pool, "model/w", b"weights")])
    (tmp_path / "model").write_text("in the way")
    done = gpool("run", "--output", "model/", "--", "train")
    assert done.exit_code == 125
    assert "may still run" not in done.stderr
    [task] = pool.tasks
    assert f"gpool result {task} --into DIR" in done.stderr
    assert gpool("result", task, "--into", "elsewhere").exit_code == 0
    assert (tmp_path / "elsewhere" / "model" / "w").read_bytes() == b"weights"


def test_outputs_into_a_file_are_refused_before_anything_runs(
    gpool: Gpool, pool: Pool, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("x")
    assert gpool("run", "--output", "model/", "--into", "file", "--", "train").exit_code == 2
    assert not pool.tasks


def test_run_sends_the_requested_resources(
    gpool: Gpool, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "t")
    options = "--gpu H100:2 --cpus 4 --memory 8GB --timeout 2h --retries 1 --priority -5"
    gpool("run", *options.split(), "--env", "A=b=c", "--env", "TOKEN", "--name", "n", "--", "x")
    sent = pool.bodies[-1]
    assert (sent["gpu"], sent["cpus"], sent["memory"], sent["timeout_s"]) == (
        "H100:2",
        4.0,
        "8GB",
        7200.0,
    )
    assert (sent["retries"], sent["priority"], sent["name"]) == (1, -5, "n")
    assert sent["env"] == {"A": "b=c", "TOKEN": "t"}


def test_json_of_run_is_the_document_alone(gpool: Gpool, pool: Pool) -> None:
    pool.command = lambda task: pool.logs.update({task["id"]: [("stdout", "noise\n")]}) or {}
    done = gpool("run", "--json", "--", "x")
    assert json.loads(done.stdout)["status"] == "succeeded"
    assert done.stderr == "noise\n"


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["run", "--gppu", "1", "--", "x"], 2, "No such option"),
        (["run"], 2, "Missing argument"),
        (
            ["run", "--timeout", "soon", "--", "x"],
            2,
            "'soon' is not a duration; write 90s, 45m, 2h, 1h30m, 30d",
        ),
        (["run", "--input", "missing", "--", "x"], 2, "input 'missing' does not exist"),
        (["run", "--env", "NO_SUCH_THING", "--", "x"], 2, "no such variable"),
        (["status", "t-0000000000000"], 4, "nothing at"),
        (["wait", "t-0000000000000"], 4, "nothing at"),
        (["join", "http://x/join/y"], 2, "not a join link"),
    ],
)
def test_usage_errors_print_one_line_and_exit_with_the_right_code(
    gpool: Gpool, args: list[str], code: int, said: str
) -> None:
    done = gpool(*args)
    assert done.exit_code == code, done.output
    assert said in done.stderr
    assert "Traceback" not in done.output


def test_a_wrong_key_exits_3_and_an_unreachable_server_5(gpool: Gpool, pool: Pool) -> None:
    with Client("http://pool.test", "wrong", transport=pool) as stranger:
        assert CliRunner().invoke(cli, ["ps"], obj=stranger).exit_code == 3
        pool.refuse = 10**9
        with Client("http://pool.test", "x", transport=pool, patience_s=0.05) as far:
            done = CliRunner().invoke(cli, ["ps"], obj=far)
    assert done.exit_code == 5
    assert "gpool up" in done.stderr


def test_ps_lists_and_json_is_the_documents(gpool: Gpool) -> None:
    assert "No tasks yet" in gpool("ps").stderr
    task = gpool("run", "-d", "--name", "train", "--", "x").stdout.strip()
    listed = gpool("ps")
    assert listed.stdout.splitlines()[0].split() == ["ID", "NAME", "STATUS", "AGE", "DURATION", "NODE", "GPU"]  # fmt: skip
    assert task in listed.stdout
    documents = json.loads(gpool("ps", "--json", "--all").stdout)
    assert documents[0]["id"] == task
    assert {"id", "name", "status", "created_at"} <= set(documents[0])


def test_logs_status_explain_cancel_result_and_whoami(
    gpool: Gpool, pool: Pool, tmp_path: Path
) -> None:
    ends(pool, status="succeeded", exit_code=0, outputs=[left(pool, "out", b"data")])
    task = gpool("run", "-d", "--", "x").stdout.strip()
    pool.logs[task] = [("stdout", "a\n"), ("stderr", "b\n"), ("stdout", "c\n")]
    for args in (["logs", task], ["logs", "-f", task]):
        assert (gpool(*args).stdout, gpool(*args).stderr) == ("a\nc\n", "b\n")
    assert len(json.loads(gpool("logs", task, "--json").stdout)) == 3
    assert task in gpool("status", task).stdout
    assert json.loads(gpool("status", task, "--json").stdout)["id"] == task
    assert gpool("explain", task).stdout == "No node has a GPU.\n"
    assert gpool("result", task, "-o", "into").stdout == "into/out\n"
    assert (tmp_path / "into" / "out").read_bytes() == b"data"
    assert gpool("cancel", task).stdout == f"{task} cancelled\n"
    assert "ada" in gpool("whoami").stdout


def test_the_result_of_an_unfinished_task_says_to_wait(gpool: Gpool, pool: Pool) -> None:
    pool.runs = False
    task = gpool("run", "-d", "--", "x").stdout.strip()
    done = gpool("result", task)
    assert done.exit_code == 1
    assert f"gpool wait {task}" in done.stderr


def test_the_result_of_a_failed_task_prints_the_reason(gpool: Gpool, pool: Pool) -> None:
    ends(pool, status="failed", reason="exited", exit_code=3)
    task = gpool("run", "-d", "--", "x").stdout.strip()
    done = gpool("result", task)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == f"Task {task} left no outputs.\ngpool: task {task} exited with code 3\n"


def test_empty_listings_print_a_message(gpool: Gpool, pool: Pool) -> None:
    assert gpool("ps").stderr == "No tasks yet.\n"
    assert gpool("ps", "--status", "running").stderr == "No task is running.\n"
    assert gpool("ps", "--json").stdout == "[]\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_its_completion(gpool: Gpool, shell: str) -> None:
    assert "_GPOOL_COMPLETE" in gpool("completion", shell).stdout


def test_a_secret_comes_from_the_environment_or_a_file_and_never_from_the_command_line(
    gpool: Gpool, pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "from the environment")
    (tmp_path / "file").write_text("from a file\n")
    done = gpool(
        "run", "--secret", "TOKEN", "--secret", f"OTHER=@{tmp_path / 'file'}", "--", "true"
    )
    assert done.exit_code == 0, done.output
    assert pool.bodies[-1]["secrets"] == {"TOKEN": "from the environment", "OTHER": "from a file"}
    assert "from the environment" not in done.output
    done = gpool("run", "--secret", "STORED_ONE", "--", "true")
    assert done.exit_code == 0, done.output
    assert pool.bodies[-1]["secrets"] == {"STORED_ONE": None}
    for wrong in ("TOKEN=value", "=@file", f"OTHER=@{tmp_path / 'none'}"):
        done = gpool("run", "--secret", wrong, "--", "true")
        assert done.exit_code == 2, wrong
        assert "value" not in done.stderr.replace("a value on the command line", "")


def test_a_command_of_other_tools_is_answered_with_a_suggestion(gpool: Gpool) -> None:
    for word, meant in (
        ("nodes", "node ls"),
        ("squeue", "queue"),
        ("statu", "status"),
        ("submit", "run -d"),
        ("doctor", "node doctor"),
        ("version", "--version"),
    ):
        done = gpool(word)
        assert done.exit_code == 2
        assert f"No such command '{word}'. Did you mean: gpool {meant}\n" in done.stderr
    assert "Did you mean" not in gpool("xyzzy").stderr
    for meant in ELSEWHERE.values():
        assert meant.split()[0] in {*VERBS, "--help", "--version"}


def test_several_tasks_are_cancelled_even_if_one_is_unknown(gpool: Gpool, pool: Pool) -> None:
    pool.runs = False
    first, second = (gpool("run", "-d", "--", "true").stdout.strip() for _ in range(2))
    done = gpool("cancel", first, "t-0000000000999", second, "b-0000000000001")
    assert done.exit_code == 4
    assert done.stdout == f"{first} cancelled\n{second} cancelled\nb-0000000000001 cancelled\n"
    assert pool.cancelled == [first, second, "b-0000000000001"]
    assert [one["id"] for one in json.loads(gpool("cancel", "--json", first).stdout)] == [first]


def test_the_queue_lists_running_then_waiting_tasks_with_reasons(gpool: Gpool, pool: Pool) -> None:
    pool.runs = False
    oldest, middle, newest = (
        gpool("run", "-d", "--name", name, "--", "true").stdout.strip() for name in "abc"
    )
    pool.tasks[newest] |= {"status": "running", "node": "n-1", "node_name": "lab", "gpu": "A100"}
    done = gpool("queue")
    assert done.exit_code == 0, done.output
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["ID", newest, oldest, middle]
    assert done.stdout.count("No node has a GPU.") == 2
    shown = json.loads(gpool("queue", "--json", "--limit", "1").stdout)
    assert [(one["id"], one["explain"] is None) for one in shown] == [
        (newest, True),
        (oldest, False),
    ]
    assert "1 more tasks wait" in gpool("queue", "--limit", "1").stderr
    assert "exclude each other" in gpool("queue", "--everybody", "--team", "lab").stderr


def test_the_queue_shows_running_and_oldest_waiting_tasks_of_a_long_queue(
    gpool: Gpool, pool: Pool
) -> None:
    pool.runs = False
    first = gpool("run", "-d", "--", "true").stdout.strip()
    oldest = gpool("run", "-d", "--", "true").stdout.strip()
    pool.tasks[first] |= {"status": "running", "node": "n-1", "node_name": "n-2"}
    for number in range(1000, 4000):
        id_ = encode("task", number)
        pool.tasks[id_] = pool.tasks[oldest] | {"id": id_}
    done = gpool("queue", "--limit", "1")
    lines = [line.split() for line in done.stdout.splitlines()[1:]]
    assert [line[0] for line in lines] == [first, oldest]
    assert "n-1" in lines[0]  # by its id: its name is like another's
    assert "3000 more tasks wait" in done.stderr


def test_the_queue_says_when_running_tasks_are_left_out(gpool: Gpool, pool: Pool) -> None:
    pool.runs = False
    task = gpool("run", "-d", "--", "true").stdout.strip()
    pool.tasks[task] |= {"status": "running", "node": "n-1", "node_name": "lab"}
    assert "ps --status running" not in gpool("queue").stderr
    pool.more_running = True
    assert "only the newest 1 running tasks" in gpool("queue").stderr
    shown = gpool("queue", "--json")
    assert "gpool ps --status running --all" in shown.stderr
    assert [one["id"] for one in json.loads(shown.stdout)] == [task]


def test_the_queue_is_asked_again_after_the_time_that_a_rate_limit_names(
    gpool: Gpool, pool: Pool
) -> None:
    pool.too_many = [1]
    done = gpool("queue")
    assert (done.exit_code, pool.too_many) == (0, []), done.output
    pool.too_many = [3600]  # longer than anybody waits
    assert "try again in 3600" in gpool("queue").stderr


def test_a_timeout_of_a_month_is_shown_in_whole_seconds(gpool: Gpool, pool: Pool) -> None:
    pool.runs = False
    task = gpool("run", "-d", "--", "true").stdout.strip()
    pool.tasks[task] |= {"timeout_s": 2592000.0}
    assert "2592000 s" in gpool("status", task).stdout


def test_requested_sizes_are_shown_as_typed(gpool: Gpool, pool: Pool) -> None:
    pool.runs = False
    task = gpool("run", "-d", "--", "true").stdout.strip()
    pool.tasks[task] |= {"memory_bytes": 8 << 30, "disk_bytes": 20 * 10**9}
    shown = gpool("status", task).stdout
    assert "8GiB" in shown
    assert "20GB" in shown


def test_waiting_for_several_tasks_exits_with_the_first_failure(gpool: Gpool, pool: Pool) -> None:
    tasks = []
    for code in (0, 7, 3):
        pool.command = lambda _, code=code: {
            "status": "failed" if code else "succeeded",
            "exit_code": code,
        }
        tasks.append(gpool("run", "-d", "--", "true").stdout.strip())
    assert gpool("wait", *tasks).exit_code == 7
    assert gpool("wait", tasks[0]).exit_code == 0
    shown = json.loads(gpool("wait", "--json", *tasks).stdout)
    assert [one["id"] for one in shown] == tasks
    assert json.loads(gpool("wait", "--json", tasks[2]).stdout)["id"] == tasks[2]
    pool.runs = False
    waits = gpool("run", "-d", "--", "true").stdout.strip()
    done = gpool("wait", tasks[0], waits, "--timeout", "0.05s")
    assert (done.exit_code, done.stderr) == (
        1,
        f"gpool: task {waits} has not ended within 0.05s; it continues\n",
    )


def test_a_command_is_shown_quoted_for_the_shell(gpool: Gpool, pool: Pool) -> None:
    task = gpool("run", "-d", "--", "x").stdout.strip()
    pool.tasks[task]["command"] = ["sh", "-c", "echo up; sleep 1"]
    assert "sh -c 'echo up; sleep 1'" in gpool("status", task).stdout


def test_a_truncated_listing_prints_a_note(gpool: Gpool, pool: Pool) -> None:
    for _ in range(51):
        gpool("run", "-d", "--", "true")
    for words in (["ps"], ["ps", "--json"]):
        done = gpool(*words)
        assert "--all" in done.stderr
        assert done.stdout.count("t-") == 50
        assert gpool(*words, "--limit", "2").stderr == ""  # the caller chose it
        assert gpool(*words, "--all", "--limit", "2").stdout.count("t-") == 51


@pytest.mark.parametrize("verb", ["logs", "explain", "result"])
def test_a_batch_id_for_a_task_command_is_refused_with_alternatives(
    gpool: Gpool, verb: str
) -> None:
    done = gpool(verb, "b-0000000000001")
    assert done.exit_code == 2
    assert "is a batch" in done.stderr
    assert "gpool wait b-0000000000001" in done.stderr


def test_cancelling_a_finished_batch_reports_that_it_has_ended(gpool: Gpool, pool: Pool) -> None:
    gpool("run", "-d", "--", "true")
    [batch] = pool.batches
    assert gpool("cancel", batch).stdout == f"{batch} has ended\n"
    assert json.loads(gpool("cancel", "--json", batch).stdout)[0]["status"] == "ended"


def test_times_of_a_task_are_shown_in_local_time(gpool: Gpool, pool: Pool) -> None:
    task = gpool("run", "-d", "--", "x").stdout.strip()
    pool.tasks[task]["finished_at"] = "2026-01-01T12:00:05.123456Z"
    shown = gpool("status", task).stdout
    assert local_time("2026-01-01T12:00:05.123456Z") in shown
    assert "123456" not in shown


def test_status_of_a_shrunk_task_says_what_expired_and_when(gpool: Gpool, pool: Pool) -> None:
    gpool("run", "-d", "--", "true")
    [task] = pool.tasks.values()
    assert "expired" not in gpool("status", task["id"]).output
    task["expired_at"] = "2026-01-02T03:04:05Z"
    shown = gpool("status", task["id"]).output
    assert "arguments, results, log and checkpoint were deleted" in shown
