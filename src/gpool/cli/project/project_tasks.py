"""`gpool run :NAME`: a task of the nearest `gpool.toml`, in this folder or one above; `:builtin/NAME`: a shipped one."""

from __future__ import annotations

import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpool.core.errors import Invalid, NotFound
from gpool.core.specs.templates import TaskTemplate, templates_of

if TYPE_CHECKING:
    from gpool.client.artifacts import LocalFile

FILE = "gpool.toml"
BUILTIN = "builtin/"
"""Prefix of the tasks that gpool ships; a name in a `gpool.toml` has no slash."""


@dataclass(frozen=True, slots=True)
class ProjectTask:
    """A template with its parameters. `folder`: that of the file; the template's paths are relative to it."""

    template: TaskTemplate
    folder: Path
    command: tuple[str, ...]

    def files(self) -> list[LocalFile]:
        """Script and inputs, by their paths in the project."""
        from gpool.client.artifacts import LocalFile, gather

        found = gather(self.template.inputs, self.folder)
        if (script := self.script) is not None:
            about = script.stat()
            executable = bool(about.st_mode & stat.S_IXUSR)
            sent = LocalFile(self.template.script, script, about.st_size, executable)
            found = [*(one for one in found if one.path != sent.path), sent]
        return found

    @property
    def script(self) -> Path | None:
        if not self.template.script:
            return None
        path = self.folder / self.template.script
        if not path.is_file():
            raise Invalid(f"task {self.template.name}: there is no script {path}")
        return path

    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Options of the command line, then those of the template."""
        wanted = {name: value for name, value in given.items() if value not in (None, ())}
        own = dict(self.template.options)
        own.setdefault("name", self.template.name)
        return {**given, **own, **wanted}


def project_task(words: tuple[str, ...], start: Path | None = None) -> ProjectTask:
    """Task of `:NAME --parameter value …`."""
    folder, template = project_template(words[0], start)
    return ProjectTask(template, folder, template.words(template.values_of(words[1:])))


def project_template(word: str, start: Path | None = None) -> tuple[Path, TaskTemplate]:
    """Template of `:NAME` and the folder of its file; `NotFound` lists the known names."""
    name = word.removeprefix(":")
    is_builtin = name.startswith(BUILTIN)
    folder, templates = builtin_templates() if is_builtin else project_templates(start)
    name = name.removeprefix(BUILTIN)
    template = templates.get(name)
    if template is None:
        raise NotFound(
            f"{folder / FILE} has no task {name!r}; it has: {', '.join(templates) or 'none'}"
        )
    return folder, template


def project_templates(start: Path | None = None) -> tuple[Path, dict[str, TaskTemplate]]:
    here = (start or Path()).absolute()
    for folder in (here, *here.parents):
        if (folder / FILE).is_file():
            return folder, _read(folder / FILE)
    raise NotFound(f"there is no {FILE} in {here} or a folder above it")


def builtin_templates() -> tuple[Path, dict[str, TaskTemplate]]:
    """Shipped tasks and their folder: that of the wheel, or `examples/catalogue` of a source checkout."""
    here = Path(__file__).resolve()
    folders = (here.parent / "examples", here.parents[4] / "examples" / "catalogue")
    for folder in folders:
        if (folder / FILE).is_file():
            return folder, _read(folder / FILE)
    raise NotFound(f"this installation has no shipped tasks in {folders[0]}; install gpool again")


def _read(file: Path) -> dict[str, TaskTemplate]:
    try:
        return templates_of(tomllib.loads(file.read_text("utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise Invalid(f"{file} cannot be read: {exc}") from exc
    except Invalid as error:
        raise Invalid(f"{file}: {error.detail}") from error


def help_of(template: TaskTemplate) -> str:
    """Text of `gpool run :NAME --help`."""
    version = f" {template.version}" if template.version else ""
    lines = [f"{template.name}{version}: {template.description}".rstrip(": "), ""]
    for one in template.parameters:
        facts = [one.kind.__name__]
        facts += [f"one of {', '.join(map(str, one.choices))}"] if one.choices else []
        facts += [f"from {one.least:g}"] if one.least is not None else []
        facts += [f"to {one.most:g}"] if one.most is not None else []
        facts += ["required" if one.default is None else f"default {one.default}"]
        lines.append(f"  --{one.name:<16} {one.help} ({', '.join(facts)})")
    return "\n".join(lines)
