"""Lines of the log: ECS documents for programs, readable lines for people, whatever writes them."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.core.ids import encode
from gpool.observability import ecs
from gpool.observability.context import AtWork, NamedWork
from gpool.observability.logs import FIELDS, LogSource, get_logger, log_handler
from gpool.observability.redaction import Redactor
from tests.tools.ecs import TEMPLATE, declared, problems

SOURCE = LogSource("gpool-test", "1.0", pid=7)
TYPES = declared()


def record(message: str, **fields: object) -> logging.LogRecord:
    made = logging.makeLogRecord({"msg": message, "name": "gpool.x", "levelname": "ERROR"})
    setattr(made, FIELDS, fields)
    return made


def json_line(made: logging.LogRecord) -> str:
    return log_handler("json", SOURCE, Redactor()).format(made)


def test_the_index_template_is_the_one_made_from_the_fields() -> None:
    assert json.loads(TEMPLATE.read_text()) == ecs.index_template()


def test_a_log_line_is_text_or_one_ecs_document() -> None:
    made = record("größe 7\n", task=7, node=3, epoch=2, why="x")
    line = json_line(made)
    told = json.loads(line)
    assert problems(line, TYPES) == []
    assert list(told)[:3] == ["@timestamp", "log.level", "message"]
    assert (told["message"], told["log.level"]) == ("größe 7\n", "error")
    assert told["gpool.task.id"] == encode("task", 7)
    assert told["gpool.node.id"] == encode("node", 3)
    assert told["gpool.task.epoch"] == 2
    assert "\n" not in line
    text = log_handler("text", SOURCE, Redactor()).format(made)
    assert "größe 7" in text
    assert "\n" not in text
    assert "task=7" in text


@pytest.mark.parametrize(
    "broken",
    [
        "Traceback (most recent call last):",
        "[]",
        json.dumps({"message": "x"}),
        json_line(record("x")).replace('"error"', '"loud"'),
        json_line(record("x", epoch=1)).replace('"gpool.task.epoch":1', '"gpool.task.epoch":"1"'),
        json_line(record("x", client="10.0.0.1")).replace('"client.ip"', '"client.place"'),
    ],
)
def test_the_validator_refuses_what_is_no_ecs_document(broken: str) -> None:
    assert problems(broken, TYPES)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(
    st.text(),
    st.dictionaries(st.sampled_from([*ecs.NAMED, "other", "preload", "a.b"]), VALUES, max_size=6),
)
def test_every_event_is_a_valid_document(message: str, fields: dict[str, object]) -> None:
    line = json_line(record(message, **fields))
    assert problems(line, TYPES) == []
    assert len(line.splitlines()) == 1 or "\u2028" in line or "\x85" in line or "\u2029" in line


@given(st.text(alphabet=st.characters(), max_size=30))
def test_no_text_line_moves_the_cursor(message: str) -> None:
    line = log_handler("text", SOURCE, Redactor()).format(record(message))
    assert line.isprintable()


def test_a_line_has_the_fields_of_the_work_at_hand() -> None:
    with AtWork(NamedWork({"request": "r-1", "node": 3})):
        told = json.loads(json_line(record("x", node=4)))
    assert told["http.request.id"] == "r-1"
    assert told["gpool.node.id"] == encode("node", 4)  # the line's own
    assert "http.request.id" not in json.loads(json_line(record("x")))


def test_structlog_events_reach_handlers_of_the_standard_library(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = get_logger("gpool.test_events")
    error = ValueError("spoon")
    with caplog.at_level(logging.INFO):
        log.debug("left out")
        log.error("loop failed", loop="prune", exc_info=error)
    [made] = caplog.records
    assert made.getMessage() == "loop failed"
    told = json.loads(json_line(made))
    assert told["labels.loop"] == "prune"
    assert (told["error.type"], told["error.message"]) == ("ValueError", "spoon")
    assert told["error.stack_trace"] == "ValueError: spoon"


PROGRAM = """
import asyncio, logging, sys, threading, warnings
import structlog
from gpool.observability.logs import LogSource, configure, get_logger
configure("json", "info", LogSource("gpool-test", "1"))
get_logger("a").info("server's", task=1)
structlog.get_logger("b").info("agent's", task=1)
logging.getLogger("uvicorn.error").info("uvicorn's %s", "line")
logging.getLogger("c").info("wrong %d arguments", "x")
warnings.warn("a warning")
thread = threading.Thread(target=lambda: 1 / 0); thread.start(); thread.join()
class Unraisable:
    def __del__(self): raise KeyError("in __del__")
del (lambda: Unraisable())().__dict__
async def main():
    async def lost(): raise OSError("never awaited")
    task = asyncio.create_task(lost()); await asyncio.sleep(0); await asyncio.sleep(0)
asyncio.run(main())
raise SystemError("the end")
"""


def test_every_way_to_write_gives_valid_lines() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert [found for line in lines for found in problems(line, TYPES)] == []
    told = [json.loads(line) for line in lines]
    by_logger = {each["log.logger"] for each in told}
    assert {"a", "b", "c", "uvicorn.error", "py.warnings", "gpool.uncaught", "asyncio"} <= by_logger
    errors = [each.get("error.type") for each in told]
    assert {"ZeroDivisionError", "KeyError", "OSError", "SystemError"} <= set(errors)


def test_a_line_on_a_terminal_is_coloured_and_in_a_file_not() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, coloured in ((Terminal(), True), (io.StringIO(), False)):
        handler = log_handler("text", SOURCE, Redactor(), stream)
        handler.emit(record("channel_open", server="https://pool.example"))
        assert ("\x1b[" in stream.getvalue()) is coloured
        assert "channel_open" in stream.getvalue()
