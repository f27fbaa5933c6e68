"""Measures of a source tree: lines by kind, folders, class names and sizes, rows read by position. Reads text only."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.structure.classes import Class, Module, classes_of, largest, sizes_of
from tests.structure.limits import ATTRIBUTES, LONGEST_FILE, METHODS, REASON_FROM, SHORT_FILE

# "One file because …", "One file, however long: …", "Over 400 lines because …".
REASON = re.compile(
    r"\bone (file|module)\b[^.]{0,40}(because|:)|\b(over|past|longer than) 400 lines\b", re.I
)
NO_TEXT = {
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines of one or more files by kind, and words of prose."""

    total: int = 0
    code: int = 0
    docstring: int = 0
    comment: int = 0
    blank: int = 0
    docstring_words: int = 0
    attribute_docstring_words: int = 0
    comment_words: int = 0


def count_lines(text: str, tree: ast.Module) -> Lines:
    """Classify every line. Any string that is a statement of its own is a docstring.

    Only those of modules, classes and functions count as `docstring_words`; the rest describe attributes.
    """
    docstrings: set[int] = set()
    string_words = docstring_words = comment_words = 0
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
            string_words += len(node.value.value.split())
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring_words += len((ast.get_docstring(node) or "").split())
    code: set[int] = set()
    comments: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
            comment_words += len(token.string.lstrip("#").split())
        elif token.type not in NO_TEXT:
            code.update(range(token.start[0], token.end[0] + 1))
    code -= docstrings
    comments -= code | docstrings
    total = len(text.splitlines())
    blank = total - len(code) - len(comments) - len(docstrings)
    return Lines(
        total=total,
        code=len(code),
        docstring=len(docstrings),
        comment=len(comments),
        blank=blank,
        docstring_words=docstring_words,
        attribute_docstring_words=string_words - docstring_words,
        comment_words=comment_words,
    )


def sum_lines(parts: Sequence[Lines]) -> Lines:
    names = Lines.__dataclass_fields__
    return Lines(**{name: sum(getattr(part, name) for part in parts) for name in names})


def source_folder(tree: Path) -> Path:
    return tree / "src" if (tree / "src").is_dir() else tree


def read_modules(tree: Path) -> list[Module]:
    source = source_folder(tree)
    found = []
    for path in sorted(source.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        found.append(Module(path.relative_to(source).as_posix(), text, ast.parse(text)))
    if not found:
        raise SystemExit(f"{source} has no Python file; name a checkout with --tree")
    return found


def modules_per_folder(modules: Sequence[Module]) -> dict[str, int]:
    """Number of modules in each folder, largest first; `__init__` and `__main__` do not count."""
    counted = Counter(m.folder for m in modules if m.name not in ("__init__.py", "__main__.py"))
    return dict(sorted(counted.items(), key=lambda item: (-item[1], item[0])))


def reused_names(classes: Sequence[Class]) -> dict[str, list[str]]:
    paths = defaultdict(list)
    for each in classes:
        paths[each.name].append(each.module.path)
    reused = {name: sorted(where) for name, where in paths.items() if len(where) > 1}
    return dict(sorted(reused.items(), key=lambda item: (-len(item[1]), item[0])))


def positional_reads(module: Module) -> Iterator[str]:
    """Reads of a column by its position: `row[7]`, `old_row[7]`, `self.row[7]`, and `rows[0][7]`."""
    for node in ast.walk(module.tree):
        if not (isinstance(node, ast.Subscript) and has_number(node)):
            continue
        value = node.value
        if re.search(r"(^|_)row$", terminal_name(value)) or (
            isinstance(value, ast.Subscript)
            and has_number(value)
            and "/store/" in module.path
            and terminal_name(value.value)
        ):
            yield f"{module.path}:{node.lineno}: {ast.unparse(node)}"


def has_number(node: ast.Subscript) -> bool:
    index = node.slice.operand if isinstance(node.slice, ast.UnaryOp) else node.slice
    return isinstance(index, ast.Constant) and type(index.value) is int


def terminal_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def measure(tree: Path) -> dict[str, Any]:
    """Everything the table and the limits need, as JSON values."""
    modules = read_modules(tree)
    lines = {module.path: count_lines(module.text, module.tree) for module in modules}
    long = [path for path in lines if lines[path].total > REASON_FROM]
    docstrings = {module.path: ast.get_docstring(module.tree) or "" for module in modules}
    classes = classes_of(modules)
    sizes = sizes_of(classes)
    reads = [
        read
        for module in modules
        if module.path.startswith("gpool/server/")
        for read in positional_reads(module)
    ]
    total = sum_lines(list(lines.values()))
    nested = [read for read in reads if "][" in read.partition(": ")[2]]
    return {
        "files": len(modules),
        "lines": {name: getattr(total, name) for name in Lines.__dataclass_fields__},
        "files_under_50_lines": sorted(
            path
            for path in lines
            if lines[path].total < SHORT_FILE and not path.endswith("__init__.py")
        ),
        "files_over_400_lines": sorted(long),
        "files_over_400_lines_without_reason": sorted(
            path for path in long if not REASON.search(" ".join(docstrings[path].split()))
        ),
        "files_over_600_lines": sorted(p for p in lines if lines[p].total > LONGEST_FILE),
        "modules_per_folder": modules_per_folder(modules),
        "class_names_reused": reused_names(classes),
        "classes": len(classes),
        "classes_over_limits": {
            name: {"methods": size.methods, "attributes": size.attributes}
            for name, size in sorted(sizes.items())
            if size.methods > METHODS or size.attributes > ATTRIBUTES
        },
        "rows_read_by_position": {"row": len(reads) - len(nested), "rows[i]": len(nested)},
        "rows_read_by_position_by_file": dict(
            sorted(Counter(read.partition(":")[0] for read in reads).items())
        ),
        "planner": largest(classes, ("gpool/core/scheduling/", "gpool/core/scheduler/")),
    }
