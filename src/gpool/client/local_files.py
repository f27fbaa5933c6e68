"""Files of a folder to ship with a task, less those that ignore rules exclude. Follows no link out of the folder.

The last matching line decides; lines of a deeper file come after those above it; a file in an ignored folder cannot be
included again.

`.gitignore` applies as in git, from the top of the repository down; `.gpoolignore` has the same syntax and wins in its
folder. Version control, caches and virtual environments are never shipped.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpool.client.artifacts import Input, LocalFile
from gpool.core.errors import Invalid
from gpool.core.specs.fields import checked_path, folded_path

_CLASSES = {
    "alnum": "0-9A-Za-z",
    "alpha": "A-Za-z",
    "blank": r" \t",
    "cntrl": r"\x00-\x1f\x7f",
    "digit": "0-9",
    "graph": r"\x21-\x7e",
    "lower": "a-z",
    "print": r"\x20-\x7e",
    "punct": r"!-/:-@\[-`{-~",
    "space": r" \t\r\n\v\f",
    "upper": "A-Z",
    "xdigit": "0-9A-Fa-f",
}


@dataclass(frozen=True, slots=True)
class IgnoreRule:
    """`keeps`: a line with `!`, which includes the path again."""

    pattern: re.Pattern[str]
    keeps: bool
    only_folders: bool
    by_name: bool  # a line without a slash matches names at any depth


@dataclass(frozen=True, slots=True)
class IgnoreRules:
    """`base`: path of the folder ("" for the top); `lead`: prefix of paths if it lies above the top ("project/src/")."""

    rules: tuple[IgnoreRule, ...]
    base: str = ""
    lead: str = ""

    def leaves_out(self, path: str, *, folder: bool) -> bool | None:
        """None if no line matches."""
        below = _bytewise(self.lead + (path[len(self.base) + 1 :] if self.base else path))
        name = below.rpartition("/")[2]
        for rule in reversed(self.rules):
            if rule.only_folders and not folder:
                continue
            if rule.pattern.fullmatch(name if rule.by_name else below):
                return not rule.keeps
        return None


def rules_of(lines: Iterable[str], base: str = "", lead: str = "") -> IgnoreRules:
    parsed = (_rule(line) for line in lines)
    return IgnoreRules(tuple(rule for rule in parsed if rule is not None), base, lead)


def left_out(stack: Iterable[IgnoreRules], path: str, *, folder: bool) -> bool:
    """Whether the first of `stack` with a matching line (deepest folder first) ignores the path."""
    for rules in stack:
        verdict = rules.leaves_out(path, folder=folder)
        if verdict is not None:
            return verdict
    return False


def _bytewise(text: str) -> str:
    """One character per byte: git matches bytes, so `?` is half an é."""
    return text.encode("utf-8", "surrogateescape").decode("latin-1")


def _rule(line: str) -> IgnoreRule | None:
    text = _trimmed(_bytewise(line.removesuffix("\r")))
    if not text or text.startswith("#"):
        return None
    keeps = text.startswith("!")
    text = text[1:] if keeps else text
    only_folders = text.endswith("/")
    text = text[:-1] if only_folders else text
    by_name = "/" not in text
    text = text.removeprefix("/")
    expression = _expression(text) if text else None
    return None if expression is None else IgnoreRule(expression, keeps, only_folders, by_name)


def _trimmed(text: str) -> str:
    end = len(text)
    while end and text[end - 1] == " ":
        slashes = end - 1
        while slashes and text[slashes - 1] == "\\":
            slashes -= 1
        if (end - 1 - slashes) % 2:
            break
        end -= 1
    return text[:end]


def _expression(text: str) -> re.Pattern[str] | None:
    """None if nothing can match (open bracket, trailing backslash)."""
    out, at = [], 0
    literal = next((n for n, char in enumerate(text) if char in "*?[\\"), len(text))
    while at < len(text):
        char = text[at]
        if char == "*":
            end = at
            while end < len(text) and text[end] == "*":
                end += 1
            piece, at = _stars(text, at, end, literal)
            out.append(piece)
        elif char == "?":
            out.append("[^/]")
            at += 1
        elif char == "[":
            found = _bracket(text, at + 1)
            if found is None:
                return None
            out.append(found[0])
            at = found[1]
        elif char == "\\":
            if at + 1 == len(text):
                return None
            out.append(re.escape(text[at + 1]))
            at += 2
        else:
            out.append(re.escape(char))
            at += 1
    return re.compile("".join(out), re.DOTALL)


def _stars(text: str, start: int, end: int, literal: int) -> tuple[str, int]:
    """Translate `text[start:end]`: two stars that fill a path segment match any number of folders, others one name.

    Git compares the rule's first `literal` characters itself and matches only the rest as a pattern. Stars right behind
    them therefore start a segment: `.**/*` matches `.a/b/c`, and `.a` too.
    """
    opens = start in (0, literal) or text[start - 1] == "/"
    if end - start >= 2 and opens:
        if end == len(text) or text.startswith("\\/", end):
            return ".*", end
        if text[end] == "/":
            return "(?:.*/)?", end + 1
    return "[^/]*", end


def _bracket(text: str, at: int) -> tuple[str, int] | None:
    negated = text[at : at + 1] in ("!", "^") and at < len(text)
    at += negated
    parts: list[str] = []
    first = True
    while True:
        if at >= len(text):
            return None
        if text[at] == "]" and not first:
            break
        first = False
        if text.startswith("[:", at):
            end = text.find(":]", at + 2)
            if end >= 0 and "]" not in text[at + 2 : end]:
                known = _CLASSES.get(text[at + 2 : end])
                if known is None:
                    return None
                parts.append(known)
                at = end + 2
                continue
        low = _member(text, at)
        if low is None:
            return None
        char, at = low
        if text[at : at + 1] == "-" and text[at + 1 : at + 2] not in ("]", ""):
            high = _member(text, at + 1)
            if high is None:
                return None
            top, at = high
            parts.extend([f"{re.escape(char)}-{re.escape(top)}"] if char <= top else [])
        else:
            parts.append(re.escape(char))
    inside = "".join(parts)
    if negated:
        return f"(?!/)[^{inside}]" if inside else "[^/]", at + 1
    return (f"(?!/)[{inside}]" if inside else "(?!)"), at + 1


def _member(text: str, at: int) -> tuple[str, int] | None:
    if text[at] == "\\":
        return (text[at + 1], at + 2) if at + 1 < len(text) else None
    return text[at], at + 1


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
    prefix = f"{checked_path(to.rstrip('/'))}/" if to else ""
    above = _rules_above(top)
    walk = _Walk(top.resolve(), rules_of(ignore))
    found: list[LocalFile] = []
    size = 0
    seen: dict[str, str] = {}
    for file in walk.files(top, "", above, (top.resolve(),)):
        try:
            name = checked_path(prefix + file.path)
        except Invalid as exc:
            raise Invalid(f"{exc.detail}; rename it, or name it in .gpoolignore") from exc
        twin = seen.setdefault(folded_path(name), name)
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
