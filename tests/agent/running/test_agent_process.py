"""`python -m gpool.agent` says in one line why it cannot run, and its exit code says what kind of mistake it was."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_with_policy(folder: Path, policy: str) -> subprocess.CompletedProcess[str]:
    file = folder / "policy.toml"
    file.write_text(policy)
    variables = {
        "SERVER_URL": "https://127.0.0.1:1",
        "NODE": "n-1",
        "SERVER_NAME": "pool",
        "KEY_FILE": str(folder / "node.key"),
        "DATA_DIR": str(folder / "data"),
        "POLICY": str(file),
    }
    named = {f"GPOOL_AGENT_{name}": value for name, value in variables.items()}
    return subprocess.run(
        [sys.executable, "-m", "gpool.agent"],
        env={**os.environ, **named},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_a_mistake_in_the_policy_is_named_in_one_harmless_line(tmp_path: Path) -> None:
    """Exit code 2 is wrong usage; characters that could control the terminal are replaced."""
    done = run_with_policy(tmp_path, '"\\u001b[2J" = 1')
    assert done.returncode == 2
    assert done.stderr.startswith("gpool: policy: unknown key '\ufffd[2J'; known keys: ")
    assert len(done.stderr.splitlines()) == 1
