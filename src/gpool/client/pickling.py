"""Pickles functions and arguments: the caller's own modules by value, installed packages by name.

`loads` runs code of the pickle's author: its callers check that the node is trusted.
"""

from __future__ import annotations

import inspect
import io
import pickle
import site
import sys
import sysconfig
import threading
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from gpool.core.errors import Invalid

PROTOCOL = 5
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"

_PLAIN = frozenset({int, float, str, bytes, bool, type(None)})
"""Types whose pickle names no class, so the plain C pickler suffices."""

_ONE_AT_A_TIME = threading.Lock()
"""cloudpickle's register of modules by value is global to the process."""

PICKLING_ERRORS = (
    pickle.PicklingError,
    TypeError,
    AttributeError,
    ValueError,
    NotImplementedError,
    RecursionError,
    ImportError,
    OSError,
    RuntimeError,
)


class OwnModules:
    """The caller's own modules: next to the script, or editable; not installed ones."""

    def __init__(self, installed: Iterable[str] | None = None) -> None:
        self._installed = tuple(_installed_folders() if installed is None else installed)
        self._known: dict[str, bool] = {}

    def is_own(self, name: str) -> bool:
        known = self._known.get(name)
        if known is None:
            known = self._known[name] = self._look(name)
        return known

    def _look(self, name: str) -> bool:
        if name == "__main__" or name.partition(".")[0] == "gpool":
            return False  # cloudpickle sends __main__ by value anyway; nodes have gpool
        module = sys.modules.get(name)
        if module is None:
            return False
        file = getattr(module, "__file__", None)
        if file is None:
            folders = list(getattr(module, "__path__", ()))
            if not folders:
                return False  # built in
            file = folders[0]
        real = str(Path(file).resolve())
        return not any(real.startswith(folder) for folder in self._installed)


def _installed_folders() -> set[str]:
    found = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    found |= {*site.getsitepackages(), site.getusersitepackages()}
    return {str(Path(folder).resolve()) + "/" for folder in found if folder} | {"<frozen"}


_own = OwnModules()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle is untyped
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=PROTOCOL)
        self.registered: list[types.ModuleType] = []

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is types.ModuleType:
            self._meet(obj.__name__)
        elif kind is types.FunctionType or issubclass(kind, type):
            self._meet(getattr(obj, "__module__", None))
        return super().reducer_override(obj)

    def _meet(self, name: str | None) -> None:
        if name is None or not _own.is_own(name):
            return
        if name not in cloudpickle.cloudpickle._PICKLE_BY_VALUE_MODULES:
            module = sys.modules[name]
            cloudpickle.register_pickle_by_value(module)
            self.registered.append(module)


def dumps(value: object) -> bytes:
    with _ONE_AT_A_TIME, io.BytesIO() as file:
        pickler = _Pickler(file)
        try:
            pickler.dump(value)
        finally:
            for module in pickler.registered:
                cloudpickle.unregister_pickle_by_value(module)
        return file.getvalue()


def dumps_function(function: Callable[..., object], name: str) -> bytes:
    """`Invalid` says why the function cannot be pickled."""
    try:
        return dumps(function)
    except PICKLING_ERRORS as exc:
        raise Invalid(
            f"the function {name} cannot be sent: {exc}. "
            "It (or a global it uses) holds something tied to this process, such as a lock, "
            "a connection or an open file; create that inside the function."
        ) from exc


def dumps_call(
    function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
) -> bytes:
    """`Invalid` names the argument that cannot be pickled."""
    for value in args:
        if type(value) not in _PLAIN:
            break
    else:
        if not kwargs:
            return pickle.dumps((args, {}), PROTOCOL)
    try:
        return dumps((tuple(args), dict(kwargs)))
    except PICKLING_ERRORS as exc:
        raise Invalid(_which_argument(function, args, kwargs) or f"arguments: {exc}") from exc


def _which_argument(
    function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
) -> str:
    name = getattr(function, "__name__", "the function")
    labels = [f"number {position + 1}" for position in range(len(args))]
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    for position, parameter in enumerate(parameters[: len(args)]):
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            break
        labels[position] = repr(parameter.name)
    labels += [repr(keyword) for keyword in kwargs]
    for label, value in zip(labels, [*args, *kwargs.values()], strict=True):
        try:
            dumps(value)
        except PICKLING_ERRORS as exc:
            return (
                f"argument {label} of {name} cannot be sent: "
                f"a {type(value).__module__}.{type(value).__qualname__} ({exc})"
            )
    return ""


def loads(content: bytes) -> Any:
    """Unpickle a value from a trusted node only."""
    return pickle.loads(content)
