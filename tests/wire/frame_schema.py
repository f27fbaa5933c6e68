"""Fields of all frames and words of their enumerations, as a release sends them.

`python -m tests.wire.frame_schema` prints tests/recorded/frames.json; record it again with each release.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from enum import StrEnum
from typing import Any, NamedTuple, get_args, get_type_hints

import msgspec

from gpool.wire.frames import FromAgent, FromServer


class FrameSchema(NamedTuple):
    """By kind, words separated by spaces; an optional field ends with `?`.

    `positional`: fields of frames and their parts, in order; `named`: of values that travel as maps; `words`: of
    enumerations.
    """

    positional: dict[str, str]
    named: dict[str, str]
    words: dict[str, str]


def schema() -> FrameSchema:
    found = FrameSchema({}, {}, {})
    for kind in _reachable(FromAgent | FromServer):
        if issubclass(kind, msgspec.Struct):
            fields = [
                each.name + ("" if each.required else "?") for each in msgspec.structs.fields(kind)
            ]
            found.positional[kind.__name__] = " ".join(fields)
        elif issubclass(kind, StrEnum):
            found.words[kind.__name__] = " ".join(each.value for each in kind)
        else:
            fields = [
                each.name + ("" if _is_required(each) else "?") for each in dataclasses.fields(kind)
            ]
            found.named[kind.__name__] = " ".join(fields)
    return found


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is field.default_factory is dataclasses.MISSING


def _reachable(kinds: Any) -> Iterator[type]:
    seen: set[Any] = set()
    waiting = [kinds]
    while waiting:
        kind = waiting.pop()
        if kind in seen:
            continue
        seen.add(kind)
        waiting += get_args(kind)
        is_ours = isinstance(kind, type) and kind.__module__.startswith("gpool.")
        if is_ours and (
            issubclass(kind, msgspec.Struct | StrEnum) or dataclasses.is_dataclass(kind)
        ):
            yield kind
            if not issubclass(kind, StrEnum):
                waiting += get_type_hints(kind).values()


if __name__ == "__main__":
    sys.stdout.write(json.dumps(schema()._asdict(), indent=1, sort_keys=True) + "\n")
