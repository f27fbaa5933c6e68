"""`gpool admin gpu-models` and `gpool admin admit` against a real server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gpool.cli.listings import gpu_notes
from gpool.cli.main import cli
from tests.server.server_desk import Live, serving


def asked(live: Live, home: Path, *words: str) -> Result:
    env = {"GPOOL_HOME": str(home), "GPOOL_URL": live.url, "GPOOL_KEY": live.key}
    return CliRunner().invoke(cli, ["admin", *words], env=env)


@pytest.mark.parametrize("verifies", [True, False])
def test_the_table_is_listed(tmp_path: Path, verifies: bool) -> None:
    file = tmp_path / "more.toml"
    file.write_text(
        '[[model]]\nname = "RTX9090"\nint8_teraops = 9\nmemory_gb_per_s = 8\nmemory_gib = 7\n'
    )
    with serving(tmp_path / "data", examine_gpus=verifies, gpu_models=file) as live:
        shown = asked(live, tmp_path / "home", "gpu-models")
        assert shown.exit_code == 0, shown.output
        assert "RTX9090" in shown.output
        assert "H200" in shown.output
        assert ("verification is off" in shown.output) is not verifies
        page = json.loads(asked(live, tmp_path / "home", "gpu-models", "--json").output)
        assert {"name": "RTX9090", "int8_teraops": 9, "memory_gb_per_s": 8, "memory_gib": 7} in (
            page["items"]
        )
        missing = asked(live, tmp_path / "home", "admit", "g-6gc8n0ng0237t")
        assert missing.exit_code != 0


def test_a_note_says_whom_an_unproven_gpu_serves() -> None:
    [note] = gpu_notes({"index": 0, "unproven": "no row"})
    assert "--on" in note
    assert "no row" in note
