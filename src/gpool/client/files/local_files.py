"""A folder's files to be shipped with a task, without what its ignore files leave out. Follows no link out of the folder.

`.gitignore` counts as git reads it, from the top of the repository down; `.gpoolignore` has the same language and the
last word in its folder. Version control, caches and virtual environments are never shipped.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpool.client.files.artifacts import LocalFile
from gpool.client.files.ignore_rules import IgnoreRules, left_out, rules_of
from gpool.core.errors import Invalid
from gpool.core.specs.paths import checked, folded

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
__all__ = ["MAX_FILES", "LocalFile", "local_files", "shown_size"]
ADVICE = "remove it, or name it in .gpoolignore"


def local_files(
    root: Path | str = ".", *, to: str = "", ignore: Sequence[str] = ()
) -> tuple[LocalFile, ...]:
    """What lies beneath `root`, in order of its names; it goes to the folder `to` of the work directory.

    `ignore` has lines as in an ignore file, and they win. `Invalid` says what cannot be shipped and what to do.
    """
    top = Path(root).absolute()
    if not top.is_dir():
        raise Invalid(f"'{root}' is not a folder; name the one to be shipped")
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


def shown_size(size_bytes: int) -> str:
    """For people: `12.3 MB`."""
    size = float(size_bytes)
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


@dataclass(frozen=True, slots=True)
class _Walk:
    real_top: Path
    given: IgnoreRules  # the caller's own lines

    def files(
        self, folder: Path, path: str, above: tuple[IgnoreRules, ...], entered: tuple[Path, ...]
    ) -> Iterator[LocalFile]:
        """`above`: the rules of the folders above, the deepest first; `entered`: where we are, without links."""
        rules = (_rules_in(folder, path), *above)
        for name in _names_in(folder):
            source = folder / name
            below = f"{path}/{name}" if path else name
            if name in NEVER:
                continue
            try:
                facts = source.lstat()
            except FileNotFoundError:  # gone meanwhile, as an editor's own files go
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
    """Those of the folders above, up to the top of the repository it lies in; none outside of one."""
    if (top / ".git").exists():
        return ()
    found: list[IgnoreRules] = []
    for folder in top.parents:
        found.append(_rules_in(folder, lead=f"{top.relative_to(folder).as_posix()}/"))
        if (folder / ".git").exists():
            return tuple(found)
    return ()
