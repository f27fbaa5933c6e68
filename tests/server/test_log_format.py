"""The server's log for people and for programs."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

from gpool.server.main import log_handler


def test_a_log_line_is_text_or_one_json_object() -> None:
    record = logging.makeLogRecord({"msg": "größe %s", "args": ("7\n",), "levelname": "ERROR"})
    told = json.loads(log_handler("json").format(record))
    assert (told["message"], told["level"]) == ("größe 7\n", "error")
    assert "\n" not in log_handler("json").format(record)
    assert "größe 7" in log_handler("text").format(record)


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
