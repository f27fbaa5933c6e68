"""A task's output must not be able to command the user's terminal."""

from __future__ import annotations

import json
from collections.abc import Callable

import click
import pytest

from gpool.cli import tasks
from gpool.cli.main import print_error
from gpool.cli.printing import (
    age,
    duration,
    emit_json,
    local_time,
    table,
    watch,
)
from gpool.core.errors import Conflict
from gpool.core.terminal import TerminalText, neutral


@pytest.mark.parametrize(
    "text", ["plain\n", "\x1b[1;31mred\x1b[0m\t\r\n", "π ☃ 漢字", "\x1b[38:2:1:2:3m"]
)
def test_text_and_colours_pass(text: str) -> None:
    assert neutral(text) == text


@pytest.mark.parametrize(
    "attack",
    [
        "\x1b]0;title\x07",  # sets the window's title
        "\x1b]52;c;ZXZpbA==\x07",  # writes the clipboard
        "\x1b[2J\x1b[H",  # clears the screen
        "\x1b[6n",  # makes the terminal type an answer
        "\x9b2J",  # the same as one character
        "\x1bP+q544e\x1b\\",
        "\x08\x7f\x00",
    ],
)
def test_nothing_else_reaches_the_terminal(attack: str) -> None:
    shown = neutral(attack)
    assert not any(ord(letter) < 0x20 or 0x7F <= ord(letter) < 0xA0 for letter in shown)
    assert len(shown) == len(attack)


@pytest.mark.parametrize("code", [0x061C, 0x200E, 0x200F, 0x202A, 0x202E, 0x2028, 0x2066, 0x2069])
def test_marks_that_turn_the_direction_of_text_are_shown(code: int) -> None:
    assert neutral(f"a{chr(code)}b") == f"a<U+{code:04X}>b"


def test_a_colour_sequence_split_by_the_stream_still_passes() -> None:
    text = TerminalText()
    assert text.feed("a\x1b[3") + text.feed("1mb") + text.flush() == "a\x1b[31mb"


def test_a_control_sequence_split_by_the_stream_is_still_neutralised() -> None:
    text = TerminalText()
    shown = text.feed("a\x1b") + text.feed("]0;x\x07") + text.flush()
    assert "\x1b" not in shown
    assert "\x1b" not in text.feed("\x1b[") + text.flush()


def test_age_is_shown_in_one_unit() -> None:
    now = "Thu, 01 Jan 2026 03:00:00 GMT"
    assert age("2026-01-01T02:59:18Z", now) == "42s"
    assert age("2026-01-01T02:57:00Z", now) == "3m"
    assert age("2025-12-30T03:00:00Z", now) == "2d"


EVIL = "\x1b]0;t\x07\x9b2J\rok\u202egnp.exe\u2066\u2028"


def is_harmless(text: str) -> bool:
    return not any(letter in text for letter in "\x1b\x07\x9b\r\u202e\u2066\u2028")


def test_untrusted_names_are_neutralised_in_tables(capsys: pytest.CaptureFixture[str]) -> None:
    table(("name",), [(EVIL,)], "")
    assert is_harmless(capsys.readouterr().out)


def test_server_texts_are_neutralised_in_errors(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(Conflict(EVIL))
    assert is_harmless(capsys.readouterr().err)


def test_json_output_is_neutralised_and_decodes_to_the_same_value(
    capsys: pytest.CaptureFixture[str],
) -> None:
    emit_json({"name": EVIL})
    shown = capsys.readouterr().out
    assert is_harmless(shown)
    assert json.loads(shown) == {"name": EVIL}


def test_a_gang_is_listed_by_its_nodes_and_a_waiting_one_by_their_number() -> None:
    members = [
        {"rank": 0, "node": "node_1", "node_name": "ada", "status": "running"},
        {"rank": 1, "node": "node_2", "node_name": None, "status": "leased"},
    ]
    assert tasks.where({"nodes": 2, "members": members}) == "ada,node_2"
    assert tasks.where({"nodes": 2, "members": []}) == "(2 nodes)"
    assert tasks.where({"node": "node_1", "node_name": "ada"}) == "ada"
    assert tasks.where({}) == "-"
    assert tasks._member(members[1]) == "rank 1 on node_2 (leased);"


def test_columns_are_aligned_in_every_writing_system(
    capsys: pytest.CaptureFixture[str],
) -> None:
    table(("name", "status"), [("訓練", "a"), ("e\u0301te\u0301", "b"), ("train", "c")], "")
    assert capsys.readouterr().out.splitlines() == [
        "NAME   STATUS",
        "訓練   a",  # each of its letters takes two places
        "e\u0301te\u0301    b",
        "train  c",
    ]


def test_a_table_fits_the_terminal_and_wraps_words_not_ids(
    capsys: pytest.CaptureFixture[str],
) -> None:
    why = "No node has a GPU of this model; the largest node has 8 of another model."
    row = ("t-6gxytcp4dha6m", "train.py", "queued", "2m", "H100", "-", "14:20", why)
    columns = ("id", "name", "status", "age", "gpu", "node", "starts", "why it waits")
    table(columns, [row], "", width=80)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].endswith("WHY IT WAITS")
    assert len({line.rindex(line.split()[0]) for line in lines[2:]}) == 1  # below the last column
    assert " ".join(line[lines[0].index("WHY") :].strip() for line in lines[1:]) == why
    table(columns, [row], "")
    assert why in capsys.readouterr().out  # no terminal: one line per row


@pytest.mark.parametrize("width", [80, 60, 40])
def test_columns_that_do_not_fit_are_printed_beneath_their_row(
    capsys: pytest.CaptureFixture[str], width: int
) -> None:
    columns = ("id", "at", "actor", "action", "thing", "outcome", "address", "empty", "facts")
    row = ("t-6gxytcp4dha6m", "2026-11-18 09:26:10", "u-6gyvyjxtdptr5", "node.invite", "n-6gyvyjy6ghbxm", "ok", "127.0.0.1", "-", "expires_in_s=86400")  # fmt: skip
    table(columns, [row], "", width=width)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= width
    assert "EMPTY" not in shown  # a column without values is left out first
    assert "empty" not in shown
    for value in (row[0], row[2], row[4], "facts expires_in_s=86400"):
        assert value in shown  # no id is folded


def test_watching_prints_again_until_it_is_interrupted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rounds = iter(range(9))
    pauses: list[float] = []

    def refresh() -> Callable[[], None]:
        number = next(rounds)
        return lambda: click.echo(f"round {number}")

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        watch(refresh, 2.0, pause)
    assert capsys.readouterr().out.splitlines() == ["round 0", "round 1", "round 2"]
    assert pauses == [2.0] * 3


def test_a_failed_status_is_red_and_other_columns_keep_their_colour(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with_colour = click.Context(click.Command("x"), color=True)
    with with_colour:
        table(("name", "status"), [("failed", "failed"), ("a", "succeeded")], "")
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "failed  \x1b[31mfailed\x1b[0m"
    assert "\x1b" not in lines[2]


def test_times_in_tables_are_local_and_to_the_second(capsys: pytest.CaptureFixture[str]) -> None:
    table(("at",), [("2026-11-15T23:37:05.872050Z",)], "")
    assert capsys.readouterr().out.splitlines()[1] == local_time("2026-11-15T23:37:05.872050Z")


def test_the_duration_of_a_task_is_its_run_time_so_far() -> None:
    now, started = "Thu, 01 Jan 2026 03:00:00 GMT", "2026-01-01T02:59:18Z"
    assert duration({"started_at": started}, now) == "42s"
    assert duration({"started_at": started, "finished_at": "2026-01-01T04:01:18Z"}, now) == "1h02m"
    assert duration({}, now) == "-"
