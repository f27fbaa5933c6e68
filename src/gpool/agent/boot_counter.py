"""Counts the agent's starts, on disk: a server that hears an earlier start late must know that it is over."""

from __future__ import annotations

from pathlib import Path

from gpool.transfer.private_files import write_private

FILE = "boots"


def next_boot(data_dir: Path) -> str:
    """The name of this start: sorts after all earlier ones from the same data directory."""
    file = data_dir / FILE
    try:
        started = int(file.read_text(encoding="ascii"))
    except (
        FileNotFoundError,
        ValueError,
    ):  # the first start, or a file that is none of ours any more
        started = 0
    write_private(file, str(started + 1).encode("ascii"), replace=True)
    return f"{started + 1:012d}"
