"""Texts of a hostile node in the caller's terminal: exceptions, tracebacks, notes and output hold no control character.

The controls get the same texts from a node of their own, or as data.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest

import gpool
from gpool import Client
from gpool.agent.runner import encoding
from gpool.core.terminal import plain
from tests.client.standin import Pool

ATTACKS = {
    "clipboard": "\x1b]52;c;cm0gLXJmIH4=\x07",
    "title": "\x1b]0;root@host\x1b\\",
    "title in C1": "\x9d0;root@host\x9c",
    "clear": "\x1b[2J\x1b[1;1H",
    "answerback": "\x1b[6n\x05",
    "colour": "\x1b[8mhidden",
    "overwrite": "harmless\rrm -rf",
    "backspace": "rm\x08\x08ls",
    "delete": "a\x7fb",
    "direction": "\u202eexe.txt\u2066\u200f\u061c",
    "separator": "a\u2028b\u2029c",
    "null": "a\0b",
}
BINARY = {**ATTACKS, "surrogate": "a\ud800b"}
"""The format of values carries lone surrogates; JSON does not."""


class Rude(ValueError):
    """Prints its attribute."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.words = {text: [text]}

    def __str__(self) -> str:
        return " ".join(self.words)


def rude(text: str) -> Callable[[], object]:
    def fail() -> object:
        error = Rude(text)
        error.add_note(f"note {text}")
        raise error

    return fail


def grouped(text: str) -> Callable[[], object]:
    def fail() -> object:
        raise ExceptionGroup(text, [ValueError(text), OSError(2, text, text)])

    return fail


def unknown(text: str) -> Callable[[], object]:
    def fail() -> object:
        class Local(ValueError):
            pass

        raise Local(text)

    return fail


def shown(call: Callable[[], object]) -> str:
    """Everything that Python prints for the exception of a call."""
    with pytest.raises((gpool.TaskFailed, ValueError, ExceptionGroup)) as caught:
        call()
    return "".join(traceback.format_exception(caught.value, chain=True))


def controls(text: str) -> set[str]:
    """Characters that a terminal obeys; Python's own traceback of this process has line ends only."""
    return {letter for letter in text if plain(letter) != letter}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_an_exception_of_anothers_node_writes_nothing_to_the_terminal(
    client: Client, pool: Pool, attack: str
) -> None:
    pool.own_node = True
    assert controls(shown(client.task(rude(attack)).remote))  # the control
    pool.own_node = False
    for function in (rude(attack), unknown(attack)):
        task = client.task(function)
        run = task.submit()
        for way in (
            task.remote,
            run.result,
            client.get(run.id).result,
            lambda one=function: list(client.task(lambda _: one()).map([1])),
        ):
            text = shown(way)
            assert "fail" in text  # the remote traceback is there
            assert controls(text) == set()


@pytest.mark.parametrize("attack", BINARY.values(), ids=BINARY)
def test_exceptions_in_a_group_and_in_a_returned_value_are_filtered_too(
    client: Client, pool: Pool, attack: str
) -> None:
    pool.own_node = False
    pool.forged = _encoded(grouped(attack))
    assert controls(shown(client.task(rude("")).remote)) == set()
    pool.forged = b""
    [error] = client.task(lambda: [ValueError(attack)]).remote()
    assert controls(str(error)) == set()
    pool.own_node = True
    [error] = client.task(lambda: [ValueError(attack)]).remote()
    assert error.args == (attack,)  # the control


def _encoded(function: Callable[[], object]) -> bytes:
    try:
        function()
    except ExceptionGroup as group:
        return encoding.encode_exception(group)
    raise AssertionError


@pytest.mark.parametrize("reason", ["node_failed", "timed_out", "bad_output", "exited", "raised"])
def test_the_error_text_of_a_task_that_did_not_run_is_filtered(
    client: Client, pool: Pool, reason: str
) -> None:
    attack = "".join(ATTACKS.values())
    end = {"status": "failed", "reason": reason, "error_text": f"why {attack}\n\tline"}
    pool.command = lambda _: end
    run = client.submit_command(["true"])
    text = shown(run.result)
    assert controls(text) == set()
    assert reason == "raised" or "\n\tline" in text
    assert run.wait().error_text == plain(f"why {attack}\n\tline")


@pytest.mark.parametrize("attack", BINARY.values(), ids=BINARY)
def test_a_value_is_data_and_arrives_as_returned(client: Client, pool: Pool, attack: str) -> None:
    pool.own_node = False
    assert client.task(lambda: attack).remote() == attack
    assert client.task(lambda: {attack: [attack]}).remote() == {attack: [attack]}


def test_logs_for_a_terminal_keep_colours_and_no_other_control_sequence(
    client: Client, pool: Pool
) -> None:
    run = client.submit_command(["true"])
    bad = [text for name, text in ATTACKS.items() if name not in ("colour", "overwrite")]
    sent = ["\x1b[31mred\x1b[0m\n", *bad, "\x1b", "]52;c;eA==\x07", "\x1b[3", "2mgreen"]
    pool.logs[run.id] = [("stdout", text) for text in sent]
    for text in (run.logs(), "".join(run.logs(follow=True))):
        assert text.startswith("\x1b[31mred\x1b[0m\n")
        assert text.endswith("\x1b[32mgreen")
        left = text.replace("\x1b[31m", "").replace("\x1b[0m", "").replace("\x1b[32m", "")
        assert controls(left) == set()
    raw: Any = "".join(piece.text for piece in run.printed())
    assert "\x1b]52;c;" in raw  # the control: the bytes as printed


def test_a_servers_problem_with_anothers_words_is_filtered(client: Client, pool: Pool) -> None:
    with pytest.raises(gpool.NotFound) as caught:
        client.api.get_json("/v1/nodes/\x1b]0;x\x07".replace("\x1b", "%1b").replace("\x07", "%07"))
    assert "]0;x" in caught.value.detail
    assert controls(caught.value.detail) == set()
