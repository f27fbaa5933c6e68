"""The limits of CODE.md, the violations of a measured tree, and the list of violations that are still allowed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ALLOWED = Path("tests/recorded/structure_allowed.json")

SHORT_FILE = 50
REASON_FROM = 400
LONGEST_FILE = 600
MODULES_PER_FOLDER = 12
METHODS = 25
ATTRIBUTES = 15
FILES = 380
DOCSTRING_WORDS = 40_000
"""Figures of the restructuring: printed, not enforced, since new capabilities add modules."""

EXEMPT_FOLDERS = {
    "gpool/server/store/migrations/versions": "one module per schema version, in order; never edited again",
}
SHARED_CLASS_NAMES: dict[str, str] = {}
"""Class names that may be used more than once in src, each with the reason."""


class Violation(NamedTuple):
    """A limit that is not kept. `value` is None where growth is not compared, only presence."""

    limit: str
    subject: str
    value: int | None
    text: str

    @property
    def key(self) -> str:
        return f"{self.limit} {self.subject}"


def violations_of(found: Mapping[str, Any]) -> list[Violation]:
    """One entry for each limit that is not kept."""
    result = [
        Violation(
            "file-without-reason",
            path,
            None,
            "longer than 400 lines: split it by subject, or give the reason in its module docstring (One file because …)",
        )
        for path in found["files_over_400_lines_without_reason"]
    ]
    result += [
        Violation(
            "file-too-long", path, None, f"longer than {LONGEST_FILE} lines: split it by subject"
        )
        for path in found["files_over_600_lines"]
    ]
    result += [
        Violation(
            "folder", folder, count, f"{count} modules, at most {MODULES_PER_FOLDER} in a folder"
        )
        for folder, count in found["modules_per_folder"].items()
        if count > MODULES_PER_FOLDER and folder not in EXEMPT_FOLDERS
    ]
    result += [
        Violation("class-name", name, len(paths), f"used {len(paths)} times: {', '.join(paths)}")
        for name, paths in found["class_names_reused"].items()
        if name not in SHARED_CLASS_NAMES
    ]
    for name, size in found["classes_over_limits"].items():
        for kind, limit in (("methods", METHODS), ("attributes", ATTRIBUTES)):
            if size[kind] > limit:
                text = f"{size[kind]} {kind} with its bases, at most {limit}"
                result.append(Violation(f"class-{kind}", name, size[kind], text))
    reads = sum(found["rows_read_by_position"].values())
    if reads:
        files = found["rows_read_by_position_by_file"]
        text = f"{reads} columns read by position, none allowed: " + ", ".join(
            f"{path} ({count})" for path, count in files.items()
        )
        result.append(Violation("rows-by-position", "src", reads, text))
    return sorted(result, key=lambda violation: violation.key)


def problems(violations: Sequence[Violation], allowed: Mapping[str, int | None]) -> list[str]:
    """Violations that are new or have grown, and entries of the list that are no longer violated."""
    found = []
    for each in violations:
        if each.key not in allowed:
            found.append(f"{each.key}: {each.text}")
        else:
            limit = allowed[each.key]
            if each.value is not None and limit is not None and each.value > limit:
                found.append(f"{each.key}: {each.text}; the list allows {limit}")
    keys = {each.key for each in violations}
    found += [
        f"{key}: no longer violated; remove it from {ALLOWED}" for key in allowed if key not in keys
    ]
    return found
