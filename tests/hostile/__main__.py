"""python -m tests.hostile [--only COLUMN]… [--json FILE]: attacks every runtime that is here, and prints the table."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tests.hostile import suite


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("--only", action="append", choices=list(suite.COLUMNS))
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    names = []
    for name in chosen.only or suite.COLUMNS:
        absent = suite.why_not(suite.COLUMNS[name])
        if absent is None:
            names.append(name)
        else:
            sys.stdout.write(f"{name} is not attacked: {absent} is missing\n")
    sys.stdout.write(suite.table(names) + "\n")
    if chosen.json is not None:
        said = {
            name: {
                "attacks": suite.verdicts(name),
                "secrets": len(suite.stage(name)["words"]),
                "found": suite.found(name),
                "outputs_wrong": suite.wrong_outputs(name),
                "changes": suite.stage(name)["changes"],
                "took_s": suite.of(name)["took_s"],
            }
            for name in names
        }
        proved = suite.controls() if suite.CONTROL in names else {}
        chosen.json.write_text(json.dumps({"columns": said, "controls": proved}, indent=2) + "\n")
    bad = [
        c
        for name in names
        for c in suite.verdicts(name).values()
        if c not in ("refused", "own kernel")
    ]
    return 1 if bad or any(suite.found(name) or suite.wrong_outputs(name) for name in names) else 0


if __name__ == "__main__":
    sys.exit(main())
