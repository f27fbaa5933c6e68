"""`--log-format` reaches the process that the command becomes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from tests.tools.ecs import problems
from tests.tools.processes import GPOOL, free_port


def test_all_lines_of_a_server_started_with_json_are_documents(tmp_path: Path) -> None:
    clean = {name: v for name, v in os.environ.items() if not name.startswith("GPOOL_")}
    options = ["--port", str(free_port()), "--data", str(tmp_path / "data")]
    done = subprocess.run(
        [*GPOOL, "server", "--log-format", "json", *options],
        env={**clean, "GPOOL_HOME": str(tmp_path), "GPOOL_SERVER_LOG_LEVEL": "loud"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert [found for line in lines for found in problems(line)] == []
    told = [json.loads(line) for line in lines]
    assert {each["service.name"] for each in told} == {"gpool-cli", "gpool-server"}
    assert told[-1]["log.level"] == "critical"
    assert "GPOOL_SERVER_LOG_LEVEL" in told[-1]["message"]
