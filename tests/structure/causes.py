"""Files and lines that moved, merged, appeared or vanished since a revision, estimated by git."""

from __future__ import annotations

import subprocess
from collections import defaultdict
from pathlib import Path

SHARE_MERGED = 0.5
"""A deleted file counts as merged if this share of its longer lines stands somewhere in the new tree."""
LONGER = 12
"""Characters from which a line is told apart from another: `return None` says nothing about its origin."""


def git(tree: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=tree, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"git {arguments[0]} failed: {done.stderr.strip()}")
    return done.stdout


def longer_lines(text: str) -> list[str]:
    return [line for each in text.splitlines() if len(line := each.strip()) >= LONGER]


def causes(tree: Path, base: str) -> list[str]:
    """One line per cause: number of files, their lines in `base`, and their lines in HEAD."""
    changes = git(tree, "diff", "-M", "-l0", "--name-status", base, "HEAD", "--", "src")
    kept: set[str] | None = None
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for change in changes.splitlines():
        status, *paths = change.split("\t")
        if not paths[-1].endswith(".py"):
            continue
        old = "" if status == "A" else git(tree, "show", f"{base}:{paths[0]}")
        new = "" if status == "D" else git(tree, "show", f"HEAD:{paths[-1]}")
        if status == "D" and kept is None:
            listed = git(tree, "ls-tree", "-r", "--name-only", "HEAD", "src").splitlines()
            files = (git(tree, "show", f"HEAD:{path}") for path in listed if path.endswith(".py"))
            kept = {line for text in files for line in longer_lines(text)}
        row = totals[cause_of(status, old, kept or set())]
        row[0] += 1
        row[1] += len(old.splitlines())
        row[2] += len(new.splitlines())
    lines = [f"{'cause, since ' + base:<36}{'files':>8}{'lines before':>14}{'lines after':>14}"]
    lines += [
        f"{cause:<36}{n:>8}{before:>14}{after:>14}"
        for cause, (n, before, after) in sorted(totals.items())
    ]
    return lines


def cause_of(status: str, old: str, kept: set[str]) -> str:
    if status == "R100":
        return "moved"
    if status.startswith("R"):
        return "moved and edited"
    if status == "A":
        return "new (or merged into)"
    if status == "D":
        longer = longer_lines(old)
        found = sum(line in kept for line in longer)
        return "merged" if longer and found >= SHARE_MERGED * len(longer) else "deleted"
    return "edited in place"
