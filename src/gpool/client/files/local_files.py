"""Files of a folder to ship with a task. Follows no link out of the folder.

`.gitignore` applies as in git, from the top of the repository down; `.gpoolignore` has the same syntax and wins in its
folder. Version control, caches and virtual environments are never shipped.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpool.client.files.artifacts import Input, LocalFile
from gpool.client.files.ignore_rules import IgnoreRules, left_out, rules_of
from gpool.core.errors import Invalid
from gpool.core.specs.paths import checked, folded

log = logging.getLogger(__name__)

MAX_FILES = 10_000
IGNORE_FILES = (".gitignore", ".gpoolignore")
NEVER = frozenset(
    {
        ".git",
        ".hg",
        ".svn",
        "__pycache__",
        ".venv",
        ".tox",
        ".nox",
        ".eggs",
        ".mypy_cache",
        ".pytest_cache",
        ".ruff_cache",
        ".hypothesis",
        ".ipynb_checkpoints",
        "node_modules",
        ".DS_Store",
    }
)
__all__ = ["MAX_FILES", "LocalFile", "local_files", "shipment", "shown_size"]
ADVICE = "remove it, or name it in .gpoolignore"


def local_files(
    root: Path | str = ".", *, to: str = "", ignore: Sequence[str] = ()
) -> tuple[LocalFile, ...]:
    """Files beneath `root`, sorted, for the folder `to` of the work directory.

    `ignore`: lines that win over ignore files. `Invalid` names a file that cannot be shipped.
    """
    top = Path(root).absolute()
    if not top.is_dir():
        raise Invalid(f"'{root}' is not a folder; name the folder to ship")
    prefix = f"{checked(to.rstrip('/'))}/" if to else ""
    above = _rules_above(top)
    walk = _Walk(top.resolve(), rules_of(ignore))
    found: list[LocalFile] = []
    size = 0
    seen: dict[str, str] = {}
    for file in walk.files(top, "", above, (top.resolve(),)):
        try:
            name = checked(prefix + file.path)
        except Invalid as exc:
            raise Invalid(f"{exc.detail}; rename it, or name it in .gpoolignore") from exc
        twin = seen.setdefault(folded(name), name)
        if twin != name:
            raise Invalid(f"'{twin}' and '{name}' differ only in case; rename one of them")
        size += file.size_bytes
        found.append(LocalFile(name, file.source, file.size_bytes, file.executable))
        if len(found) > MAX_FILES:
            raise Invalid(
                f"'{root}' holds more than {MAX_FILES} files ({shown_size(size)} so far); leave out what "
                "the task does not need with a .gpoolignore, or pack it into one archive"
            )
    return tuple(sorted(found, key=lambda file: file.path))


def shipment(
    workdir: str | os.PathLike[str] | None, ignore: Sequence[str], inputs: Iterable[Input]
) -> list[Input]:
    if workdir is None:
        if ignore:
            raise Invalid("'ignore' needs 'workdir', the folder to ship")
        return list(inputs)
    found = local_files(Path(workdir), ignore=ignore)
    if not found:
        log.warning(
            "no file of '%s' is sent: it is empty, or .gitignore, .gpoolignore and 'ignore' exclude all files",
            workdir,
        )
    return [*found, *inputs]


def shown_size(size_bytes: int) -> str:
    size = float(size_bytes)
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


@dataclass(frozen=True, slots=True)
class _Walk:
    real_top: Path
    given: IgnoreRules  # of the `ignore` argument

    def files(
        self, folder: Path, path: str, above: tuple[IgnoreRules, ...], entered: tuple[Path, ...]
    ) -> Iterator[LocalFile]:
        """`above`: rules of the parent folders, deepest first; `entered`: their real paths, to detect cycles."""
        rules = (_rules_in(folder, path), *above)
        for name in _names_in(folder):
            source = folder / name
            below = f"{path}/{name}" if path else name
            if name in NEVER:
                continue
            try:
                facts = source.lstat()
            except FileNotFoundError:  # deleted meanwhile, e.g. an editor's swap file
                continue
            is_folder = stat.S_ISDIR(facts.st_mode)
            if left_out((self.given, *rules), below, folder=is_folder):
                continue
            if stat.S_ISLNK(facts.st_mode):
                facts = self._followed(source, below)
                is_folder = stat.S_ISDIR(facts.st_mode)
            if is_folder:
                real = source.resolve()
                if real in entered:
                    raise Invalid(f"'{below}' is a link to a folder it lies in; {ADVICE}")
                if not (source / "pyvenv.cfg").is_file():
                    yield from self.files(source, below, rules, (*entered, real))
            elif stat.S_ISREG(facts.st_mode):
                yield LocalFile(below, source, facts.st_size, bool(facts.st_mode & stat.S_IXUSR))
            else:
                raise Invalid(f"'{below}' is neither a file nor a folder; {ADVICE}")

    def _followed(self, link: Path, path: str) -> os.stat_result:
        try:
            real = link.resolve(strict=True)
        except (OSError, RuntimeError) as exc:
            raise Invalid(f"'{path}' is a link to nothing; {ADVICE}") from exc
        if not real.is_relative_to(self.real_top):
            raise Invalid(
                f"'{path}' is a link out of the folder, to {real}; copy what it names, or {ADVICE}"
            )
        if NEVER.intersection(real.relative_to(self.real_top).parts):
            raise Invalid(f"'{path}' is a link to {real}, which is never shipped; {ADVICE}")
        return real.stat()


def _names_in(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError as exc:
        raise Invalid(f"'{folder}' cannot be read ({exc.strerror}); {ADVICE}") from exc


def _rules_in(folder: Path, base: str = "", lead: str = "") -> IgnoreRules:
    lines: list[str] = []
    for name in IGNORE_FILES:
        file = folder / name
        if not file.is_file():
            continue
        try:
            text = file.read_text("utf-8", "replace")
        except OSError as exc:
            raise Invalid(f"'{file}' cannot be read: {exc.strerror}") from exc
        lines += text.removeprefix("\ufeff").split("\n")
    return rules_of(lines, base, lead)


def _rules_above(top: Path) -> tuple[IgnoreRules, ...]:
    """Rules up to the top of the repository; none outside one."""
    if (top / ".git").exists():
        return ()
    found: list[IgnoreRules] = []
    for folder in top.parents:
        found.append(_rules_in(folder, lead=f"{top.relative_to(folder).as_posix()}/"))
        if (folder / ".git").exists():
            return tuple(found)
    return ()
