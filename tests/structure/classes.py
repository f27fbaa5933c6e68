"""Classes of a source tree with their bases inside it: names are resolved through imports, statically."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

VALUE_BASES = {
    "NamedTuple",
    "TypedDict",
    "Struct",
    "BaseModel",
    "BaseSettings",
    "Enum",
    "IntEnum",
    "StrEnum",
    "Flag",
    "IntFlag",
    *(
        name
        for name, value in vars(builtins).items()
        if isinstance(value, type) and issubclass(value, BaseException)
    ),
}
"""A class derived from one of these, however far, is a value, a document, settings or an error: no limit on its size."""


class Module(NamedTuple):
    """A parsed file; `path` is relative to the source folder."""

    path: str
    text: str
    tree: ast.Module

    @property
    def folder(self) -> str:
        return self.path.rpartition("/")[0]

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def dotted(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@dataclass(eq=False, slots=True)
class Class:
    """A class statement. `bases` are classes of this tree; `outside` holds the last names of all other bases."""

    name: str
    module: Module
    node: ast.ClassDef
    bases: list[Class] = field(default_factory=list)
    outside: set[str] = field(default_factory=set)

    def lineage(self) -> Iterator[Class]:
        """This class and all its bases in the tree, each once."""
        seen: dict[int, Class] = {}
        todo = [self]
        while todo:
            each = todo.pop()
            if id(each) not in seen:
                seen[id(each)] = each
                todo.extend(each.bases)
        return iter(seen.values())

    def is_exempt(self) -> bool:
        """A Protocol, a frozen dataclass, or derived from one of `VALUE_BASES`."""
        return (
            "Protocol" in self.outside
            or dataclass_kind(self.node) == "frozen"
            or any(each.outside & VALUE_BASES for each in self.lineage())
        )


class Size(NamedTuple):
    """Distinct names of methods and of attributes assigned on `self`, bases in the tree included."""

    methods: int
    attributes: int


def classes_of(modules: Sequence[Module]) -> list[Class]:
    """Every class of the tree, nested ones too, with bases resolved through imports."""
    found = [
        Class(node.name, module, node)
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
    ]
    # Of classes of one name in one module, e.g. nested ones, the first in the file that is not nested wins.
    known: dict[str, Class] = {}
    for each in found:
        known.setdefault(f"{each.module.dotted}.{each.name}", each)
    imports = {module.dotted: imports_of(module) for module in modules}
    for each in found:
        for base in each.node.bases:
            target = resolve(dotted_name(base), each.module.dotted, known, imports)
            if isinstance(target, Class) and target is not each:
                each.bases.append(target)
            else:
                each.outside.add(dotted_name(base).rpartition(".")[2])
    return found


def imports_of(module: Module) -> dict[str, str]:
    """Local name to dotted name, for every import of a module wherever it stands."""
    package = module.dotted if module.name == "__init__.py" else module.dotted.rpartition(".")[0]
    found: dict[str, str] = {}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                first = each.name.partition(".")[0]
                found[each.asname or first] = each.name if each.asname else first
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                parts = package.split(".")
                kept = parts[: len(parts) - node.level + 1]
                source = ".".join([*kept, *([source] if source else [])])
            for each in node.names:
                found[each.asname or each.name] = f"{source}.{each.name}"
    return found


def resolve(
    name: str, module: str, known: Mapping[str, Class], imports: Mapping[str, Mapping[str, str]]
) -> Class | None:
    """The class that `name` means in `module`, following re-exports; None if it is not of this tree."""
    visited: set[tuple[str, str]] = set()
    while name and (module, name) not in visited:
        visited.add((module, name))
        if f"{module}.{name}" in known:
            return known[f"{module}.{name}"]
        first, dot, rest = name.partition(".")
        target = imports.get(module, {}).get(first)
        if target is None:
            return known.get(f"{module}.{name.rpartition('.')[2]}") if dot else None
        module, _, name = f"{target}{dot}{rest}".rpartition(".")
    return None


def dotted_name(node: ast.expr) -> str:
    """`a.b.C` of a base expression; type arguments are dropped; empty for any other expression."""
    if isinstance(node, ast.Subscript):
        return dotted_name(node.value)
    if isinstance(node, ast.Attribute):
        return f"{dotted_name(node.value)}.{node.attr}".lstrip(".")
    return node.id if isinstance(node, ast.Name) else ""


def dataclass_kind(node: ast.ClassDef) -> str:
    """`frozen`, `mutable`, or empty if the class is no dataclass."""
    for each in node.decorator_list:
        call = each if isinstance(each, ast.Call) else None
        if dotted_name(call.func if call else each).rpartition(".")[2] != "dataclass":
            continue
        frozen = call is not None and any(
            word.arg == "frozen" and isinstance(word.value, ast.Constant) and word.value.value
            for word in call.keywords
        )
        return "frozen" if frozen else "mutable"
    return ""


def methods_of(node: ast.ClassDef) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    return {
        each.name: each
        for each in statements_of(node)
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def statements_of(node: ast.AST) -> Iterator[ast.stmt]:
    """Statements of a class body, those under `if` and `try` included."""
    for each in ast.iter_child_nodes(node):
        if isinstance(each, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            yield from statements_of(each)
        elif isinstance(each, ast.stmt):
            yield each


def attributes_of(node: ast.ClassDef) -> set[str]:
    """Names assigned on the first argument of any method; of a mutable dataclass its fields too."""
    found: set[str] = set()
    if dataclass_kind(node) == "mutable":
        found |= {
            each.target.id
            for each in statements_of(node)
            if isinstance(each, ast.AnnAssign)
            and isinstance(each.target, ast.Name)
            and not ast.unparse(each.annotation).startswith(("ClassVar", "InitVar", "KW_ONLY"))
        }
    for method in statements_of(node):
        if not isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        decorators = {dotted_name(each) for each in method.decorator_list}
        arguments = [*method.args.posonlyargs, *method.args.args]
        if not arguments or decorators & {"staticmethod", "classmethod"}:
            continue
        found |= {
            each.attr
            for each in ast.walk(method)
            if isinstance(each, ast.Attribute)
            and isinstance(each.ctx, ast.Store)
            and isinstance(each.value, ast.Name)
            and each.value.id == arguments[0].arg
        }
    return found


def size_of(each: Class) -> Size:
    methods: set[str] = set()
    attributes: set[str] = set()
    for part in each.lineage():
        methods |= methods_of(part.node).keys()
        attributes |= attributes_of(part.node)
    return Size(len(methods), len(attributes))


def sizes_of(classes: Sequence[Class]) -> dict[str, Size]:
    """Size by class name, exempt classes left out; of classes with one name the larger numbers."""
    found: dict[str, Size] = {}
    for each in classes:
        if not each.is_exempt():
            size, other = size_of(each), found.get(each.name, Size(0, 0))
            found[each.name] = Size(
                max(size.methods, other.methods), max(size.attributes, other.attributes)
            )
    return found


def largest(classes: Sequence[Class], folders: tuple[str, ...]) -> dict[str, Any]:
    """Name and size of the class under `folders` with the most methods and attributes.

    `definitions` counts an overridden method (`__init__` of each base) as often as it is written.
    """
    found: dict[str, Any] = {"name": "none", "methods": 0, "definitions": 0, "attributes": 0}
    for each in classes:
        if each.is_exempt() or not each.module.path.startswith(folders):
            continue
        size = size_of(each)
        if sum(size) > found["methods"] + found["attributes"]:
            definitions = sum(len(methods_of(part.node)) for part in each.lineage())
            found = {"name": each.name, **size._asdict(), "definitions": definitions}
    return found
