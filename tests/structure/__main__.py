"""Measures the structure of a source tree and enforces its limits. Reads text only; imports nothing of gpool.

python -m tests.structure                      print the table
python -m tests.structure --check              fail on a violation that tests/recorded/structure_allowed.json does not list
python -m tests.structure --accept             write that list again; review the difference before you commit it
python -m tests.structure --before FILE|DIR    compare with a recorded table or another tree; --base REV adds causes by git

`--tree DIR` measures another checkout (a folder that holds `src`, or a source folder itself).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.structure.causes import causes
from tests.structure.limits import (
    ALLOWED,
    ATTRIBUTES,
    DOCSTRING_WORDS,
    EXEMPT_FOLDERS,
    FILES,
    METHODS,
    MODULES_PER_FOLDER,
    problems,
    violations_of,
)
from tests.structure.measures import measure

ROOT = Path(__file__).resolve().parents[2]


def table(found: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(measure, value, limit) for each line of the table of CODE.md section 2 that source text can answer."""
    lines = found["lines"]
    folders = found["modules_per_folder"]
    reused = found["class_names_reused"]
    over = found["classes_over_limits"]
    planner = found["planner"]
    reads = found["rows_read_by_position"]
    most = sorted(over.items(), key=lambda item: -item[1]["methods"] - item[1]["attributes"])
    return [
        ("files", str(found["files"]), f"≤ {FILES}"),
        ("lines", str(lines["total"]), ""),
        ("  code", str(lines["code"]), "must not grow"),
        ("  docstring", str(lines["docstring"]), ""),
        ("  comment", str(lines["comment"]), ""),
        ("  blank", str(lines["blank"]), ""),
        ("docstring words", str(lines["docstring_words"]), f"≤ {DOCSTRING_WORDS}"),
        ("  of attributes, not counted", str(lines["attribute_docstring_words"]), ""),
        ("comment words", str(lines["comment_words"]), ""),
        ("files under 50 lines", str(len(found["files_under_50_lines"])), "not enforced"),
        ("files over 400 lines", str(len(found["files_over_400_lines"])), ""),
        ("  without a reason", str(len(found["files_over_400_lines_without_reason"])), "0"),
        ("files over 600 lines", str(len(found["files_over_600_lines"])), "0"),
        (
            "modules per folder, largest",
            ", ".join(str(count) for count in list(folders.values())[:5]),
            f"≤ {MODULES_PER_FOLDER}",
        ),
        (
            f"  folders over {MODULES_PER_FOLDER}",
            str(
                sum(n > MODULES_PER_FOLDER and f not in EXEMPT_FOLDERS for f, n in folders.items())
            ),
            "0",
        ),
        (
            "class names used more than once",
            f"{len(reused)} names, {sum(map(len, reused.values()))} classes",
            "0",
        ),
        ("classes over the limits", f"{len(over)} of {found['classes']}", "0"),
        *(
            (f"  {name}", f"{size['methods']} methods, {size['attributes']} attributes", "")
            for name, size in most[:5]
        ),
        ("  limits", "", f"≤ {METHODS} methods, ≤ {ATTRIBUTES} attributes"),
        (
            "largest class of the planner",
            f"{planner['methods']} methods, {planner['attributes']} attributes",
            "",
        ),
        ("  its name, definitions", f"{planner['name']}, {planner['definitions']}", ""),
        ("rows read by position: row[7]", str(reads["row"]), "0"),
        ("rows read by position: rows[0][7]", str(reads["rows[i]"]), "0"),
    ]


def print_table(found: Mapping[str, Any], before: Mapping[str, Any] | None) -> None:
    old = {name: value for name, value, _ in table(before)} if before else {}
    if before:
        say(f"{'measure':<36}{'before':<34}{'after':<34}limit")
    for name, value, limit in table(found):
        middle = f"{old.get(name, '-'):<34}" if before else ""
        say(f"{name:<36}{middle}{value:<34}{limit}".rstrip())


def say(text: str) -> None:
    sys.stdout.write(text + "\n")


def load(path: Path) -> dict[str, Any]:
    if path.is_dir():
        return measure(path)
    recorded: dict[str, Any] = json.loads(path.read_text())
    return recorded


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.structure")
    parser.add_argument(
        "--tree", type=Path, default=ROOT, metavar="DIR", help="checkout to measure"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the measures to FILE")
    parser.add_argument(
        "--before", type=Path, metavar="FILE|DIR", help="compare with these measures"
    )
    parser.add_argument("--base", metavar="REV", help="show files by cause since REV, by git")
    parser.add_argument(
        "--check", action="store_true", help="fail on a violation that is not listed"
    )
    parser.add_argument("--accept", action="store_true", help="write the list of violations again")
    options = parser.parse_args(arguments)
    found = measure(options.tree)
    violations = violations_of(found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    listed = options.tree / ALLOWED
    allowed = json.loads(listed.read_text()) if listed.exists() else {}
    if options.accept:
        entries = {each.key: each.value for each in violations}
        listed.parent.mkdir(parents=True, exist_ok=True)
        listed.write_text(json.dumps(entries, indent=0) + "\n")
        added, removed = entries.keys() - allowed.keys(), allowed.keys() - entries.keys()
        say(f"{listed}: {len(entries)} entries, {len(added)} added, {len(removed)} removed")
        return 0
    if options.check:
        wrong = problems(violations, allowed)
        for text in wrong:
            say(text)
        say(f"structure: {len(wrong)} problems, {len(allowed)} violations listed in {ALLOWED}")
        return 1 if wrong else 0
    print_table(found, load(options.before) if options.before else None)
    if options.base:
        say("")
        for line in causes(options.tree, options.base):
            say(line)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
