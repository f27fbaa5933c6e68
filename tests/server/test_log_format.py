"""The server's log for people and for programs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.tools.ecs import problems


def test_an_invalid_setting_is_one_line_and_a_usage_error() -> None:
    environment = {"GPOOL_SERVER_LOG_FORMAT": "xml", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-m", "gpool.server"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("gpool: GPOOL_SERVER_LOG_FORMAT: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("module", "prefix"), [("gpool.server", "GPOOL_SERVER"), ("gpool.agent", "GPOOL_AGENT")]
)
def test_an_invalid_setting_is_an_ecs_document_where_the_log_is_json(
    module: str, prefix: str
) -> None:
    variables = {f"{prefix}_LOG_FORMAT": "json", f"{prefix}_LOG_LEVEL": "loud"}
    done = subprocess.run(
        [sys.executable, "-m", module],
        env={**variables, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert problems(line) == []
    told = json.loads(line)
    assert told["log.level"] == "critical"
    assert f"{prefix}_LOG_LEVEL: " in told["message"]
