"""Runs pytest; the few tests that failed are run once more, by themselves, and named whatever comes of it (decision 0018).

python -m tests.second_look [what pytest takes]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

TESTS_FAILED = 1  # pytest's word for it; all its other codes are not about tests
FILES_AT_MOST = 3
"""Of failed tests. What a busy machine does to tests, it does to few of them."""
ONLY_COMPUTES = ("tests/core/", "tests/world/")
"""A second look at what knows neither time nor host would only hide how often it fails."""


def main(arguments: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="gpool-tests-") as kept:
        code, failed = run(arguments, Path(kept) / "first")
        if code != TESTS_FAILED or not may_be_unsteady(failed):
            return code
        say("failed, and run again by themselves:", failed)
        code, still = run(failed, Path(kept) / "second")
        say("failed twice:", still)
        if code in (0, TESTS_FAILED):
            say("UNSTEADY, each a bug:", sorted({*failed} - {*still}))
        return code


def run(arguments: Sequence[str], kept: Path) -> tuple[int, list[str]]:
    """pytest's exit code, and what failed."""
    command = [sys.executable, "-m", "pytest", "-o", f"cache_dir={kept}", *arguments]
    code = subprocess.run(command, check=False).returncode
    told = kept / "v" / "cache" / "lastfailed"
    return code, sorted(json.loads(told.read_text())) if told.exists() else []


def may_be_unsteady(failed: Sequence[str]) -> bool:
    files = {test.partition("::")[0] for test in failed}
    computing = any(file.startswith(ONLY_COMPUTES) for file in files)
    return 0 < len(files) <= FILES_AT_MOST and not computing


def say(what: str, tests: Sequence[str]) -> None:
    if tests:
        sys.stdout.write("\n  ".join([what, *tests]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
