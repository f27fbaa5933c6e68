"""What a task may ask for, checked for form before anything is sent; the server decides what is possible."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from gpool.client import times
from gpool.client.environment_specs import environment_spec
from gpool.client.times import seconds
from gpool.core.errors import Invalid


@dataclass(frozen=True, slots=True)
class Options:
    """Requirements and manners of a task, under the names `@gpool.task` and `gpool run` give them."""

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
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)  # variables never shown
    python: str | None = None  # a minor, "3.12"
    pip: Sequence[str] = ()  # packages, as pip is told them
    requirements: str | os.PathLike[str] | None = None  # a file of such lines
    script: str | os.PathLike[str] | None = None  # a Python file whose own block names packages
    image: str | None = None
    network: str | None = None  # "none" or "egress"
    preload: Sequence[str] = ()  # modules to have imported before the start
    checkpoint: str | None = None  # a directory that is kept between attempts
    checkpoint_every: str | float | None = None
    grace: str | float | None = None  # between SIGTERM and the end
    preemptible: bool | None = None  # may be stopped for others and begun anew
    by: str | datetime | None = None  # wanted by then: "18:00", "2h", "2026-11-15T18:00+00:00"
    nodes: int | None = None  # at once, each with all of the above: a gang
    engine: str | None = None  # "torchrun", "ray" or "none": what starts a gang's command
    on_loss: str | None = None  # "reform" or "end": when a gang loses a node
    labels: Sequence[str] = ()  # a node must have all of these
    max_price: str | float | None = None  # "0.40/h", for what it gets on one node
    team: str | None = None  # the team in whose name it runs, by name or id; None: your own
    results: str | None = None  # "pickle": unpickle values from other accounts' nodes too

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """From keyword arguments, with the known names listed when one is unknown."""
        known = [one.name for one in fields(cls)]
        unknown = sorted(set(given) - set(known))
        if unknown:
            like = difflib.get_close_matches(unknown[0], known, 1)
            meant = f" Did you mean {like[0]!r}?" if like else ""
            raise TypeError(
                f"gpool knows no option {unknown[0]!r}; it knows {', '.join(known)}.{meant}"
            )
        return cls(**given)

    @property
    def pickle_requested(self) -> bool:
        """Whether values from nodes of other accounts are unpickled: their owners could run code here."""
        return self.results == "pickle"

    def members(self) -> dict[str, object]:
        """The members of a `TaskRequest` that were asked for; the server's defaults stand for the rest."""
        said: dict[str, object] = {
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
            "secrets": _variables("secrets", self.secrets) or None,
            "recipe": self._recipe(),
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
            "team": self.team,
        }
        if self.results not in (None, "pickle"):
            raise Invalid(f"results is {self.results!r}; give results='pickle' or leave it out")
        if self.checkpoint_every is not None and self.checkpoint is None:
            raise Invalid(
                "'checkpoint_every' says how often 'checkpoint' is saved; name that folder"
            )
        return {name: value for name, value in said.items() if value is not None}

    def _recipe(self) -> dict[str, object] | None:
        """The environment asked for, as a `RecipeDocument`; None: the node's own."""
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
        said = {"python": made.python, "packages": list(made.packages), "image": made.image}
        return {name: value for name, value in said.items() if value}


def _words(option: str, given: Sequence[str], like: str) -> list[str]:
    """A list of words. One alone would be taken for its letters."""
    if isinstance(given, str):
        raise Invalid(f"{option} is {given!r}; give a list, like {option}=[{like!r}]")
    return [str(word) for word in given]


def _variables(option: str, given: Mapping[str, str]) -> dict[str, str]:
    """Names and values as text. What was given is not shown: it may be secret."""
    if not isinstance(given, Mapping):
        raise Invalid(f"{option} is no mapping; write {option}={{'NAME': 'value'}}")
    return {str(name): str(value) for name, value in given.items()}


def _maybe_seconds(duration: str | float | None, *, zero: bool = False) -> float | None:
    return None if duration is None else seconds(duration, zero=zero)
