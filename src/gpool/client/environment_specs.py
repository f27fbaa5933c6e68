"""Environment specs from package names, requirements files and inline metadata (PEP 723). Installs nothing.

Packages come from the node's own index, so pip options and URLs are refused, with file and line.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gpool.core.errors import Invalid
from gpool.core.model import Recipe
from gpool.core.specs import fields

OLDEST, NEWEST = 11, 30
"""Range of Python 3 minor versions a node may have: gpool's oldest, and one that is years away."""

MAX_NESTED = 20
_OPEN, _CLOSE = "# /// script", "# ///"
_CLAUSE = re.compile(r"(===|~=|==|!=|<=|>=|<|>)\s*(\d+(?:\.\d+)*)(\.\*)?")
_NESTED = re.compile(r"(?:-r|--requirement)(?:\s*=\s*|\s+|(?<=-r))(\S.*)")


def environment_spec(
    *,
    python: str | None = None,
    pip: Sequence[str] = (),
    requirements: Path | None = None,
    script: Path | None = None,
    image: str | None = None,
) -> Recipe | None:
    """None if all sources are empty, which selects the node's own environment."""
    packages = list(pip)
    if requirements is not None:
        packages += _from_file(requirements, ())
    block = _block_of(script) if script is not None else None
    if script is not None and block is not None:
        packages += _dependencies(block, script)
        python = python or _minor_for(block, script)
    asked = fields.recipe(python, tuple(packages), image or "")
    return None if asked == Recipe() else asked


def _read(file: Path, what: str) -> str:
    try:
        return file.read_text("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise Invalid(f"{what} '{file}' is not UTF-8 text") from exc
    except OSError as exc:
        raise Invalid(f"{what} '{file}' cannot be read: {exc.strerror}") from exc


# ---- requirements files


def _from_file(file: Path, above: tuple[Path, ...]) -> Iterator[str]:
    if file.resolve() in above:
        return  # a cycle of -r
    if len(above) >= MAX_NESTED:
        raise Invalid(f"requirements file '{file}' is nested {MAX_NESTED} files deep; merge them")
    for number, line in _lines(_read(file, "requirements file")):
        place = f"{file}:{number}"
        if nested := _NESTED.fullmatch(line):
            yield from _from_file(file.parent / nested[1].strip("'\""), (*above, file.resolve()))
        elif options := [word for word in line.split() if _is_option(word)]:
            word = options[0]
            raise Invalid(
                f"{place}: {word[:40]!r} is a pip option; the node's owner chooses indexes and options, "
                "so only package names with versions, --hash and -r FILE are allowed"
            )
        else:
            try:
                fields.recipe(packages=(line,))
            except Invalid as exc:
                raise Invalid(f"{place}: {exc.detail}") from exc
            yield line


def _is_option(word: str) -> bool:
    return word.startswith("-") and not word.startswith("--hash=")


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield (number of the first line, content), continuations joined."""
    begun, held = 0, ""
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        begun = begun or number
        comment = line.lstrip().startswith("#")
        if line.endswith("\\") and not comment:
            held += line[:-1] + " "
            continue
        whole = re.sub(r"(^|\s)#.*", "", held + line).strip()
        if whole:
            yield begun, whole
        begun, held = 0, ""


# ---- scripts


def _block_of(script: Path) -> dict[str, Any] | None:
    lines = _read(script, "script").splitlines()
    found: list[list[str]] = []
    at = 0
    while at < len(lines):
        if lines[at].rstrip() != _OPEN:
            at += 1
            continue
        end = at + 1
        while end < len(lines) and (lines[end] == "#" or lines[end].startswith("# ")):
            end += 1
        closes = [n for n in range(at + 1, end) if lines[n].rstrip() == _CLOSE]
        if closes:
            found.append([line[2:] for line in lines[at + 1 : closes[-1]]])
            at = closes[-1]
        at += 1
    if not found:
        return None
    if len(found) > 1:
        raise Invalid(f"{script} has {len(found)} blocks '{_OPEN}'; keep one")
    try:
        return tomllib.loads("\n".join(found[0]))
    except tomllib.TOMLDecodeError as exc:
        raise Invalid(f"the block '{_OPEN}' of {script} is not TOML: {exc}") from exc


def _dependencies(block: dict[str, Any], script: Path) -> list[str]:
    named = block.get("dependencies", [])
    if not isinstance(named, list) or not all(isinstance(one, str) for one in named):
        raise Invalid(f"{script}: 'dependencies' is not a list of package names in quotes")
    return named


def _minor_for(block: dict[str, Any], script: Path) -> str | None:
    """None: any version; the caller's own if it fits, else the oldest that fits."""
    wanted = block.get("requires-python", "")
    if not isinstance(wanted, str):
        raise Invalid(f"{script}: 'requires-python' is not text like '>=3.11'")
    clauses = [_clause(part.strip(), script) for part in wanted.split(",") if part.strip()]
    fitting = [
        minor
        for minor in range(OLDEST, NEWEST + 1)
        if any(all(_meets((3, minor, micro), c) for c in clauses) for micro in range(100))
    ]
    if not fitting:
        raise Invalid(f"{script} requires Python {wanted!r}; nodes have Python 3.{OLDEST} or later")
    if len(fitting) == NEWEST + 1 - OLDEST:
        return None
    own = sys.version_info.minor
    return f"3.{own if own in fitting else fitting[0]}"


_Clause = tuple[str, tuple[int, ...], bool]


def _clause(text: str, script: Path) -> _Clause:
    found = _CLAUSE.fullmatch(text)
    if found is None:
        raise Invalid(f"{script}: 'requires-python' has {text!r}; write it like '>=3.11'")
    return found[1], tuple(int(part) for part in found[2].split(".")), bool(found[3])


def _meets(version: tuple[int, int, int], clause: _Clause) -> bool:
    sign, wanted, prefix = clause
    if sign == "~=":
        return version >= wanted and version[: len(wanted) - 1] == wanted[:-1]
    padded = (*wanted, 0, 0, 0)[:3]
    same = version[: len(wanted)] == wanted if prefix else version == padded
    match sign:
        case "==" | "===":
            return same
        case "!=":
            return not same
        case ">=":
            return version >= padded
        case "<=":
            return version <= padded
        case ">":
            return version > padded
        case _:
            return version < padded
