"""Previews of result files: which ones a browser shows, and as what.

The type comes from the name alone and is one of a fixed list without scripts (no HTML, SVG or PDF). The response has
`nosniff` and a sandbox policy, so a file that is something else is shown as broken and runs nothing.
"""

from __future__ import annotations

from pathlib import PurePosixPath

TEXT = "text/plain; charset=utf-8"
MAX_TEXT_BYTES = 256 * 1024
MAX_IMAGE_BYTES = 16 * 1024 * 1024
_TEXTS = frozenset(
    [".txt", ".log", ".csv", ".tsv", ".json", ".jsonl", ".yaml", ".yml", ".toml", ".md", ".py"]
)
_IMAGES = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".gif": "image/gif",
    ".webp": "image/webp",
}


def preview_type(path: str, size_bytes: int) -> str:
    """Media type of the preview; empty: the file is only downloaded."""
    ending = PurePosixPath(path).suffix.lower()
    if ending in _TEXTS:
        return TEXT if size_bytes <= MAX_TEXT_BYTES else ""
    return _IMAGES.get(ending, "") if size_bytes <= MAX_IMAGE_BYTES else ""
