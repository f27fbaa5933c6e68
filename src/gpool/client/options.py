"""Options of a task, checked for form before submission; the server decides what is possible."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, TypedDict

from gpool.client import times
from gpool.client.environment_specs import environment_spec
from gpool.client.times import seconds
from gpool.core.errors import Invalid
from gpool.core.specs.fields import checked_project


class TaskOptions(TypedDict, total=False):
    """Keywords of functions and of `gpool.run`; see docs/options.md."""

    gpu: str | int | float | None
    vram: str | None
    cpus: float | None
    memory: str | None
    disk: str | None
    tier: Literal["none", "container", "vm"] | None
    timeout: str | float | None
    retries: int | None
    priority: int | None
    env: Mapping[str, str]
    name: str | None
    secrets: Mapping[str, str | None] | Sequence[str]
    python: str | None
    pip: Sequence[str]
    requirements: str | os.PathLike[str] | None
    script: str | os.PathLike[str] | None
    image: str | None
    network: Literal["none", "egress"] | None
    preload: Sequence[str]
    checkpoint: str | None
    checkpoint_every: str | float | None
    grace: str | float | None
    preemptible: bool | None
    by: str | datetime | None
    nodes: int | None
    engine: Literal["none", "torchrun", "ray"] | None
    on_loss: Literal["reform", "end"] | None
    labels: Sequence[str]
    max_price: str | float | None
    max_cost: str | float | None
    team: str | None
    project: str | None
    on: str | None
    show_output: bool | None
    results: Literal["pickle"] | None
    verify: Literal[2, 3, "spot", "check"] | None
    compare: Literal["hash"] | float | Callable[[Any, Any], bool] | None


class FunctionOptions(TaskOptions, total=False):
    """Keywords of `@gpool.task` and `Task.with_options`; `check` of `gpool.run` is another."""

    check: Callable[..., object] | None


MEANINGS: Mapping[str, str] = {
    "gpu": 'GPUs: `1`, `"H100:2"`, `"24GB"` or `0.5`; default: none',
    "vram": 'GPU memory on a GPU that may be shared, `"6GB"`',
    "cpus": "CPU cores; default: with GPUs their part of the node, else 1",
    "memory": 'memory, `"4GB"`; default: the part of the node that its GPUs, or CPUs, are',
    "disk": 'disk space, `"20GB"`',
    "tier": 'minimum isolation: `"container"` (default), `"vm"` (no image; GPUs only on nodes that dedicate some to it), `"none"` (own nodes)',
    "timeout": 'time limit in seconds or `"2h"`; default 24 h',
    "retries": "attempts after a failure, 0 to 20",
    "priority": "-100 to 100; higher starts earlier",
    "env": 'variables: `{"NAME": "value"}`',
    "name": "name in listings",
    "secrets": 'variables that are stored encrypted and never shown: `{"NAME": "value"}`, or names of stored secrets, `["HF_TOKEN"]`',
    "python": 'Python version, `"3.12"`; commands only, a function has its caller\'s',
    "pip": 'packages, `["numpy>=2"]`',
    "requirements": "requirements file",
    "script": "Python file with inline metadata (PEP 723) whose packages are used",
    "image": "container image, preferably with its digest",
    "network": '`"egress"`: the public internet; default `"none"`',
    "preload": "modules a warm sandbox imports before a call; functions only",
    "checkpoint": "directory that is saved and restored between attempts; commands only",
    "checkpoint_every": "interval of checkpoints; default 10 min",
    "grace": "time from SIGTERM to SIGKILL; default 10 s",
    "preemptible": "may be stopped for other tasks and started again",
    "by": 'deadline: `"18:00"`, `"2h"`, a datetime',
    "nodes": "run on this many nodes of one site at once (a gang); commands only",
    "engine": 'launcher of a gang: `"torchrun"`, `"ray"` or `"none"`',
    "on_loss": 'gang that lost a node: `"reform"` (default) or `"end"`',
    "labels": "a node must have all of these",
    "max_price": 'most credits per hour on one node, `"0.40/h"`',
    "max_cost": 'most credits of a task over all its attempts, `"2.00"`',
    "team": "team that owns the task, by name or id",
    "project": "label of your statements (`gpool usage --by project`); default: `GPOOL_PROJECT`, then `project` in `./gpool.toml`",
    "on": 'owners whose nodes may run it: `"me"`, `"team:NAME"`, `"user:NAME"`, `"anyone"`, several with commas',
    "show_output": "`False`: do not show a function's output on standard error",
    "results": '`"pickle"`: unpickle values from nodes of other accounts too (one team\'s: `GPOOL_TRUST`); functions only',
    "verify": 'accept the result only if nodes of `2` or `3` other owners agree on it; `"spot"`: check some results; `"check"`: if `check` accepts it',
    "compare": 'how answers are compared: `"hash"` (default), a tolerance for numbers, `1e-6`, or a function of two values, run on further owners\' nodes; functions only',
    "check": 'with `verify="check"`: `check(result, *args, **kwargs)`, run on another owner\'s node; functions only',
}
"""One line per option, for docs/options.md and `help(gpool.task)`."""


def as_markdown() -> str:
    """docs/options.md, generated: `python -m gpool.client.options > docs/options.md`."""
    flags = {"labels": "label", "secrets": "secret"}
    only_python = {"script", "show_output", "results", "preload", "compare", "check"}
    lines = [
        "# Options of a task",
        "",
        "Generated from `gpool.client.options`; a test fails when it is stale. The keywords of",
        "`@gpool.task(...)`, `task.with_options(...)` and `gpool.run(command, ...)`; most are also options",
        "of `gpool run`.",
        "",
        "| keyword | type | meaning | `gpool run` |",
        "|---|---|---|---|",
    ]
    hints = {**TaskOptions.__annotations__, **FunctionOptions.__annotations__}
    for name, meaning in MEANINGS.items():
        flag = flags.get(name, name).replace("_", "-")
        kind = str(
            hints[name].__forward_arg__ if hasattr(hints[name], "__forward_arg__") else hints[name]
        )
        kind = kind.removesuffix(" | None").replace("|", "\\|")
        shown = "-" if name in only_python else f"`--{flag}`"
        lines.append(f"| `{name}` | `{kind}` | {meaning} | {shown} |")
    lines += [
        "",
        "`gpool.run` also takes `inputs`, `outputs`, `into`, `check`, `workdir` and `ignore`: [environments",
        "and files](guides/environments.md). An unknown keyword raises `TypeError` with the known ones.",
        "",
    ]
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Options:
    """Options under the names of `@gpool.task` and `gpool run`."""

    gpu: str | int | float | None = None
    vram: str | None = None
    cpus: float | None = None
    memory: str | None = None
    disk: str | None = None
    tier: str | None = None
    timeout: str | float | None = None
    retries: int | None = None
    priority: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    name: str | None = None
    secrets: Mapping[str, str | None] | Sequence[str] = field(
        default_factory=dict, repr=False
    )  # environment variables that are never shown; a name alone, or None: the stored value
    python: str | None = None  # minor version, "3.12"
    pip: Sequence[str] = ()  # packages as for pip
    requirements: str | os.PathLike[str] | None = None  # a requirements file
    script: str | os.PathLike[str] | None = None  # a Python file with inline metadata (PEP 723)
    image: str | None = None
    network: str | None = None  # "none" or "egress"
    preload: Sequence[str] = ()  # modules imported before the start
    checkpoint: str | None = None  # directory kept between attempts
    checkpoint_every: str | float | None = None
    grace: str | float | None = None  # time between SIGTERM and SIGKILL
    preemptible: bool | None = None  # may be stopped for other tasks and restarted
    by: str | datetime | None = None  # deadline: "18:00", "2h", "2026-11-15T18:00+00:00"
    nodes: int | None = None  # gang: nodes at once, each with all of the above
    engine: str | None = None  # "torchrun", "ray" or "none": launcher of a gang's command
    on_loss: str | None = None  # "reform" or "end": reaction of a gang to a lost node
    labels: Sequence[str] = ()  # a node must have all of these
    max_price: str | float | None = None  # "0.40/h", for its resources on one node
    max_cost: str | float | None = None  # "2.00" credits, over all attempts of a task
    team: str | None = None  # team that owns the task, by name or id
    project: str | None = None  # label of the account's statements
    on: str | None = None  # owners whose nodes may run it: "me", "team:lab", "user:ana", "anyone"
    show_output: bool | None = None  # of functions, on standard error; None: yes
    results: str | None = (
        None  # "pickle": send values pickled, and unpickle those of other accounts' nodes too
    )
    verify: int | str | None = None  # owners whose answers must agree, "spot" or "check"
    compare: str | float | Callable[..., object] | None = (
        None  # "hash", a tolerance of numbers, or a function of two values
    )
    check: Callable[..., object] | None = None  # returns whether a result is right

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """`TypeError` lists the known names."""
        known = [one.name for one in fields(cls)]
        unknown = sorted(set(given) - set(known))
        if unknown:
            like = difflib.get_close_matches(unknown[0], known, 1)
            meant = f" Did you mean {like[0]!r}?" if like else ""
            raise TypeError(f"unknown option {unknown[0]!r}; known: {', '.join(known)}.{meant}")
        return cls(**given)

    @property
    def pickle_requested(self) -> bool:
        """Whether to unpickle values from nodes of other accounts, whose owners could run code here."""
        return self.results == "pickle"

    @property
    def echoes(self) -> bool:
        return self.show_output is not False

    def members(self) -> dict[str, object]:
        """Set members of a `TaskRequest`; the rest has server defaults."""
        members: dict[str, object] = {
            "name": self.name,
            "gpu": self.gpu,
            "vram": self.vram,
            "cpus": self.cpus,
            "memory": self.memory,
            "disk": self.disk,
            "tier": self.tier,
            "timeout_s": None if self.timeout is None else seconds(self.timeout),
            "retries": self.retries,
            "priority": self.priority,
            "env": _variables("env", self.env) or None,
            "secrets": _secrets(self.secrets) or None,
            "recipe": self._environment(),
            "network": self.network,
            "preload": _words("preload", self.preload, "torch") or None,
            "checkpoint": self.checkpoint,
            "checkpoint_every_s": _maybe_seconds(self.checkpoint_every),
            "grace_s": _maybe_seconds(self.grace, zero=True),
            "preemptible": self.preemptible,
            "by": None if self.by is None else times.due(self.by),
            "nodes": self.nodes,
            "engine": self.engine,
            "on_loss": self.on_loss,
            "labels": _words("labels", self.labels, "ssd") or None,
            "max_price": self.max_price,
            "max_cost": self.max_cost,
            "team": self.team,
            "project": None if self.project is None else checked_project(self.project),
            "on": self.on,
            "verify": self.verify,
            "compare": None if callable(self.compare) else self.compare,
        }
        _check_verified(self.verify, self.compare)
        if callable(self.compare) and self.pickle_requested:
            raise Invalid("a comparator and results='pickle' exclude each other: it gets data")
        _check_checked(self)
        if self.results not in (None, "pickle"):
            raise Invalid(f"results is {self.results!r}; give results='pickle' or leave it out")
        if self.checkpoint_every is not None and self.checkpoint is None:
            raise Invalid("'checkpoint_every' needs 'checkpoint', the folder to save")
        return {name: value for name, value in members.items() if value is not None}

    def _environment(self) -> dict[str, object] | None:
        packages = _words("pip", self.pip, "numpy")
        if not (packages or self.python or self.requirements or self.script or self.image):
            return None
        made = environment_spec(
            python=self.python,
            pip=packages,
            requirements=None if self.requirements is None else Path(self.requirements),
            script=None if self.script is None else Path(self.script),
            image=self.image,
        )
        if made is None:
            return None
        members = {"python": made.python, "packages": list(made.packages), "image": made.image}
        return {name: value for name, value in members.items() if value}


def _check_verified(verify: object, compare: object) -> None:
    is_number = type(verify) is int and verify in (2, 3)
    if verify is not None and verify not in ("spot", "check") and not is_number:
        raise Invalid(
            f'verify is {verify!r}; give the number of owners that must agree, 2 or 3, "spot" or "check"'
        )
    if compare is None or compare == "hash":
        return
    is_tolerance = isinstance(compare, int | float) and 0 < compare < 1
    if not is_tolerance and not callable(compare):
        raise Invalid(
            f'compare is {compare!r}; give "hash", a tolerance between 0 and 1 like compare=1e-6, or a function of two '
            "values that returns whether they agree"
        )
    if verify is None:
        raise Invalid(f"compare is {compare!r} and verify is not given; add verify=2")


def _check_checked(options: Options) -> None:
    if options.verify != "check":
        if options.check is not None:
            raise Invalid('check is given and verify is not "check"; add verify="check"')
        return
    if not callable(options.check):
        raise Invalid(
            f'verify is "check" and check is {options.check!r}; give a function of the result and the arguments '
            "that returns whether the result is right"
        )
    if options.pickle_requested:
        raise Invalid('verify="check" and results="pickle" exclude each other: a check gets data')
    if options.compare not in (None, "hash"):
        raise Invalid('verify="check" and compare exclude each other: no answers are compared')


def _words(option: str, given: Sequence[str], like: str) -> list[str]:
    """Refuse a single string: it would be taken for its letters."""
    if isinstance(given, str):
        raise Invalid(f"{option} is {given!r}; give a list, like {option}=[{like!r}]")
    return [str(word) for word in given]


def _variables(option: str, given: Mapping[str, str]) -> dict[str, str]:
    """An error does not show the value: it may be secret."""
    if not isinstance(given, Mapping):
        raise Invalid(f"{option} is not a mapping; write {option}={{'NAME': 'value'}}")
    return {str(name): str(value) for name, value in given.items()}


def _secrets(given: Mapping[str, str | None] | Sequence[str]) -> dict[str, str | None]:
    """Value of each secret; None: the stored one of this name. An error does not show a value."""
    if isinstance(given, Mapping):
        return {str(name): None if value is None else str(value) for name, value in given.items()}
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise Invalid("secrets is not a list of names; write secrets=['NAME'] for stored secrets")
    for name in given:
        if not isinstance(name, str) or "=" in name:
            raise Invalid(
                "secrets has an entry that is not a name; write secrets=['NAME'] for stored secrets "
                "(gpool secret set NAME), or secrets={'NAME': 'value'}"
            )
    return dict.fromkeys(given)


def _maybe_seconds(duration: str | float | None, *, zero: bool = False) -> float | None:
    return None if duration is None else seconds(duration, zero=zero)


if __name__ == "__main__":
    print(as_markdown(), end="")  # noqa: T201 - its output is the page
