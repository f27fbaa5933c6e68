"""Run pytest; retry failed tests once if all of them depend on the host's speed (decision 0018).

python -m tests.retries [--retries-file FILE] [pytest arguments]

A test depends on the host's speed if it has the marker `host_speed` (set by tests/conftest.py for
the folders listed there). Every retry is printed at the end and appended to the file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

TESTS_FAILED = 1  # pytest's exit code; every other non-zero code is not about single tests
MAX_FILES = 3
"""Files with failed tests. A busy host disturbs few tests; more failures have another cause."""
RETRIES_FILE = Path("build") / "test-retries.txt"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--retries-file", type=Path, default=RETRIES_FILE)
    options, for_pytest = parser.parse_known_args(arguments)
    with tempfile.TemporaryDirectory(prefix="gpool-tests-") as cache:
        code, failed = run(for_pytest, Path(cache) / "first")
        if code != TESTS_FAILED or not may_retry(failed, marked(Path(cache) / "first")):
            return code
        report("failed, run again by themselves:", failed)
        code, still = run(failed, Path(cache) / "second")
        report("failed twice:", still)
        if code in (0, TESTS_FAILED):
            passed = sorted({*failed} - {*still})
            report("UNSTEADY: passed when run again; a test listed twice is a bug:", passed)
            record(options.retries_file, failed, still)
        return code


def run(arguments: Sequence[str], cache: Path) -> tuple[int, list[str]]:
    """Run pytest; return its exit code and the ids of the failed tests."""
    command = [sys.executable, "-m", "pytest", "-o", f"cache_dir={cache}", *arguments]
    code = subprocess.run(command, check=False).returncode
    return code, sorted(_cached(cache, "lastfailed"))


def marked(cache: Path) -> set[str]:
    """Return the ids of the collected tests with the marker `host_speed` (see tests/conftest.py)."""
    return set(_cached(cache, "gpool/host_speed"))


def may_retry(failed: Sequence[str], host_speed: set[str]) -> bool:
    files = {test.partition("::")[0] for test in failed}
    return 0 < len(files) <= MAX_FILES and host_speed.issuperset(failed)


def record(file: Path, failed: Sequence[str], still: Sequence[str]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as lines:
        for test in failed:
            lines.write(f"{'failed twice' if test in still else 'passed when run again'}\t{test}\n")


def report(title: str, tests: Sequence[str]) -> None:
    if tests:
        sys.stdout.write("\n  ".join([title, *tests]) + "\n")
        sys.stdout.flush()


def _cached(cache: Path, key: str) -> list[str]:
    file = cache / "v" / key if "/" in key else cache / "v" / "cache" / key
    return list(json.loads(file.read_text())) if file.exists() else []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
