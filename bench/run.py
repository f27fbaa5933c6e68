"""Run every benchmark that needs only gpool, one after another; keep the JSON of each in bench/results.

python -m bench.run [--full] [NAME ...]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from bench import FOLDERS

HERE = Path(__file__).resolve().parent
RUN_BY_HAND = {"run", "compare", "peers", "history", "plan_digests", "newcomer"}
"""`compare` and `plan_digests` need a second tree or data, `peers` and `history` the other systems,
`newcomer` a package index."""


def modules() -> dict[str, str]:
    """Texts of the modules that can be run, by name, in all folders."""
    files = [path for folder in ("", *FOLDERS) for path in (HERE / folder).glob("*.py")]
    texts = {path.stem: path.read_text() for path in files}
    return {name: text for name, text in texts.items() if '__name__ == "__main__"' in text}


def names() -> list[str]:
    return sorted(modules().keys() - RUN_BY_HAND)


def size_options(name: str, *, is_full: bool) -> list[str]:
    """Options for small or full sizes. Modules without `--full` have full sizes by default."""
    if not is_full:
        return ["--quick"]
    return ["--full"] if '"--full"' in modules()[name] else []


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--full", action="store_true", help="full sizes; minutes to hours")
    asked.add_argument("names", nargs="*", default=names(), metavar="NAME")
    options = asked.parse_args()
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    failed = []
    for name in options.names:
        print(f"\n## {name}\n", flush=True)
        argv = [sys.executable, "-m", f"bench.{name}", "--json", str(results / f"{name}.json")]
        argv += size_options(name, is_full=options.full)
        done = subprocess.run(argv, cwd=HERE.parent, check=False)
        if done.returncode:
            failed.append(name)
    if failed:
        print(f"\nfell short: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
