"""Task templates: a command or script with options and typed parameters, as written in a project's `gpool.toml`.

Pure: parsed TOML in, words of a command out. Every error is `Invalid` and names the template and the member.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpool.core.errors import Invalid
from gpool.core.specs.fields import checked_path

ParameterValue = str | int | float | bool

_NAME = re.compile(r"[a-z][a-z0-9_-]{0,62}")
_TYPES: Mapping[str, type[ParameterValue]] = {"str": str, "int": int, "float": float, "bool": bool}
_TRUE, _FALSE = frozenset({"true", "yes", "1"}), frozenset({"false", "no", "0"})
_OWN = frozenset(
    {"version", "description", "command", "script", "inputs", "outputs", "env", "parameters"}
)
_PARAMETER_MEMBERS = frozenset({"type", "default", "min", "max", "choices", "help"})
OPTIONS = frozenset(
    [
        "checkpoint",
        "checkpoint_every",
        "cpus",
        "disk",
        "gpu",
        "grace",
        "image",
        "labels",
        "max_price",
        "memory",
        "network",
        "on",
        "pip",
        "preemptible",
        "priority",
        "project",
        "python",
        "retries",
        "team",
        "tier",
        "timeout",
        "vram",
    ]
)
"""Options of a task that a template may set; those of a gang are left to `gpool run`."""

MAX_TEXT = 4096
"""Letters of a text parameter."""


@dataclass(frozen=True, slots=True)
class TemplateParameter:
    """`default` None: the parameter is required. Bounds include their ends."""

    name: str
    kind: type[ParameterValue]
    default: ParameterValue | None = None
    least: float | None = None
    most: float | None = None
    choices: tuple[ParameterValue, ...] = ()
    help: str = ""

    def value_of(self, text: str) -> ParameterValue:
        """Value of a word of a command line; `Invalid` if it has another type or is out of range."""
        try:
            value = self._read(text)
        except ValueError:
            raise self._wrong(repr(text[:80]), f"of type {self.kind.__name__}") from None
        self.check(value)
        return value

    def _read(self, text: str) -> ParameterValue:
        if self.kind is bool:
            if text.lower() not in _TRUE | _FALSE:
                raise ValueError
            return text.lower() in _TRUE
        return self.kind(text)

    def check(self, value: ParameterValue) -> None:
        if isinstance(value, float) and not math.isfinite(value):
            raise self._wrong(repr(value), "a finite number")
        if isinstance(value, str) and (len(value) > MAX_TEXT or "\0" in value):
            raise self._wrong("a text", f"at most {MAX_TEXT} letters without NUL")
        if self.choices and value not in self.choices:
            raise self._wrong(repr(value), f"one of {', '.join(map(str, self.choices))}")
        if isinstance(value, str):
            return
        if self.least is not None and value < self.least:
            raise self._wrong(repr(value), f"at least {self.least:g}")
        if self.most is not None and value > self.most:
            raise self._wrong(repr(value), f"at most {self.most:g}")

    def _wrong(self, given: str, wanted: str) -> Invalid:
        return Invalid(f"parameter {self.name} is {given}; it must be {wanted}")


@dataclass(frozen=True, slots=True)
class TaskTemplate:
    """`options`: keywords of `@gpool.task`. Exactly one of `command` and `script` is set."""

    name: str
    version: str
    description: str
    command: tuple[str, ...]
    script: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    env: Mapping[str, str]
    options: Mapping[str, Any]
    parameters: tuple[TemplateParameter, ...]

    def values_of(self, words: Sequence[str]) -> dict[str, ParameterValue]:
        """Parameters from `--name value`, `--name=value` or, of a bool, `--name`; defaults for the rest."""
        known = {one.name: one for one in self.parameters}
        found: dict[str, ParameterValue] = {}
        left = list(words)
        while left:
            word = left.pop(0)
            name, equals, text = word.removeprefix("--").partition("=")
            parameter = known.get(name.replace("_", "-"))
            if not word.startswith("--") or parameter is None:
                like = difflib.get_close_matches(name, known, 1)
                meant = f" Did you mean --{like[0]}?" if like else ""
                raise Invalid(
                    f"task {self.name} has no parameter {word[:80]!r}; it has: "
                    f"{', '.join(f'--{one}' for one in known) or 'none'}.{meant}"
                )
            if not equals and parameter.kind is bool and not (left and _is_bool(left[0])):
                text = "true"
            elif not equals:
                if not left:
                    raise Invalid(f"parameter {parameter.name} of task {self.name} has no value")
                text = left.pop(0)
            found[parameter.name] = parameter.value_of(text)
        for one in self.parameters:
            if one.name not in found:
                if one.default is None:
                    raise Invalid(f"task {self.name} needs --{one.name}")
                found[one.name] = one.default
        return {one.name: found[one.name] for one in self.parameters}

    def words(self, values: Mapping[str, ParameterValue]) -> tuple[str, ...]:
        """Command with the parameters as options; a bool is a flag that is there if it is true."""
        words = list(self.command or ("python", self.script))
        for name, value in values.items():
            if value is not False:
                words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        return tuple(words)


def _is_bool(word: str) -> bool:
    return word.lower() in _TRUE | _FALSE


def templates_of(document: Mapping[str, Any]) -> dict[str, TaskTemplate]:
    """Templates of the table `tasks` of a `gpool.toml`."""
    tasks = document.get("tasks", {})
    if not isinstance(tasks, Mapping):
        raise Invalid("'tasks' is not a table; write [tasks.NAME]")
    return {name: template_of(name, members) for name, members in tasks.items()}


def template_of(name: str, members: object) -> TaskTemplate:
    where = f"task {name[:80]!r}"
    if not _NAME.fullmatch(name):
        raise Invalid(f"{where}: a name has lower-case letters, digits, - and _, at most 63")
    if not isinstance(members, Mapping):
        raise Invalid(f"{where} is not a table; write [tasks.{name}]")
    unknown = sorted(set(members) - _OWN - OPTIONS)
    if unknown:
        like = difflib.get_close_matches(unknown[0], _OWN | OPTIONS, 1)
        meant = f" Did you mean {like[0]!r}?" if like else ""
        raise Invalid(f"{where} has an unknown member {unknown[0]!r}.{meant}")
    command = _texts(where, members, "command")
    script = _text(where, members, "script")
    if bool(command) == bool(script):
        raise Invalid(f"{where} needs either 'script' or 'command'")
    parameters = members.get("parameters", {})
    env = members.get("env", {})
    if not isinstance(parameters, Mapping):
        raise Invalid(f"{where}: 'parameters' is not a table")
    if not isinstance(env, Mapping) or not all(isinstance(one, str) for one in env.values()):
        raise Invalid(f"{where}: 'env' is not a table of texts")
    return TaskTemplate(
        name,
        _text(where, members, "version"),
        _text(where, members, "description"),
        command,
        checked_path(script) if script else "",
        tuple(_texts(where, members, "inputs")),
        tuple(checked_path(one, directory=True) for one in _texts(where, members, "outputs")),
        dict(env),
        {option: value for option, value in members.items() if option in OPTIONS},
        tuple(_parameter(where, each, about) for each, about in parameters.items()),
    )


def _parameter(where: str, name: str, about: object) -> TemplateParameter:
    where = f"{where}, parameter {name[:80]!r}"
    if not _NAME.fullmatch(name) or "_" in name or name == "help":
        raise Invalid(f"{where}: a name has lower-case letters, digits and -, and is not 'help'")
    if not isinstance(about, Mapping) or set(about) - _PARAMETER_MEMBERS:
        raise Invalid(f"{where} has members: {', '.join(sorted(_PARAMETER_MEMBERS))}")
    kind = _TYPES.get(str(about.get("type", "str")))
    if kind is None:
        raise Invalid(f"{where}: 'type' is one of {', '.join(_TYPES)}")
    choices = about.get("choices", [])
    if not isinstance(choices, list):
        raise Invalid(f"{where}: 'choices' is not a list")
    default = about.get("default")
    found = TemplateParameter(
        name,
        kind,
        None if default is None else _typed(where, kind, default),
        _bound(where, about, "min"),
        _bound(where, about, "max"),
        tuple(_typed(where, kind, one) for one in choices),
        _text(where, about, "help"),
    )
    if found.default is not None:
        found.check(found.default)
    return found


def _typed(where: str, kind: type[ParameterValue], value: object) -> ParameterValue:
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise Invalid(f"{where}: {value!r} is not of type {kind.__name__}")
    assert isinstance(value, str | int | float | bool)
    return value


def _bound(where: str, about: Mapping[str, Any], member: str) -> float | None:
    value = about.get(member)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise Invalid(f"{where}: {member!r} is not a number")
    return value


def _text(where: str, members: Mapping[str, Any], member: str) -> str:
    value = members.get(member, "")
    if not isinstance(value, str) or not all(map(str.isprintable, value.splitlines())):
        raise Invalid(f"{where}: {member!r} is not a printable text")
    return value


def _texts(where: str, members: Mapping[str, Any], member: str) -> tuple[str, ...]:
    value = members.get(member, [])
    if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
        raise Invalid(f"{where}: {member!r} is not a list of texts")
    return tuple(value)
