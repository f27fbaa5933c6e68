"""Classes of values received as data: looked up among imported modules, instances made without the classes' own code.

Runs no import, no `__getattr__` of a module and no `__new__` or `__init__` of a class that is not built in.
"""

from __future__ import annotations

import sys
import types
from typing import Any

MODULE_DICT = vars(types.ModuleType)["__dict__"].__get__
TYPE_DICT = type.__dict__["__dict__"].__get__
EXCEPTION_DICT = BaseException.__dict__["__dict__"].__get__
_SET_ARGUMENTS = BaseException.__dict__["args"].__set__


class BadValue(Exception):
    """The bytes are not a value in this format, exceed a limit, or name a class that is not imported here."""


class MissingClass(BadValue):
    """The value needs a class or module that this program has not imported."""


def imported_module(module: str, thing: str) -> Any:
    found = sys.modules.get(module)
    if found is None:
        raise MissingClass(
            f"it has a {thing}, and this program has not imported {module}; import it before you read the value"
        )
    return found


def imported_class(module: str, name: str) -> type | None:
    """Look the class up among what is imported; runs neither imports nor `__getattr__` of a module."""
    found: Any = sys.modules.get(module)
    if not issubclass(type(found), types.ModuleType):
        return None
    names: Any = MODULE_DICT(found)
    for part in name.split("."):
        found = names.get(part)
        if not issubclass(type(found), type):
            return None
        names = TYPE_DICT(found)
    assert isinstance(found, type)
    return found


def is_plain_field(cls: type, name: str) -> bool:
    """Return whether setting the field only stores the value: in the instance's dict, or in a slot."""
    for base in cls.__mro__:
        names = TYPE_DICT(base)
        if name in names:
            kind = type(names[name])
            return kind is types.MemberDescriptorType or not hasattr(kind, "__set__")
    return True


_SCALARS = frozenset({type(None), bool, int, float, str, bytes})


def new_exception(cls: type[Exception], arguments: tuple[Any, ...]) -> Exception | None:
    """Create it by the C code of a built-in base; the class's own `__new__` and `__init__` are not called."""
    is_group = issubclass(cls, BaseExceptionGroup)
    is_plain = is_group or all(type(argument) in _SCALARS for argument in arguments)
    for base in cls.__mro__:
        if base.__module__ != "builtins" or not issubclass(base, BaseException):
            continue
        for given in (arguments, ()) if is_plain else ((),):
            try:
                made: Any = base.__new__(cls, *given)
                base.__init__(made, *given)  # sets errno, reason …
            except (TypeError, ValueError):
                continue
            if not given:
                _SET_ARGUMENTS(made, arguments)
            assert isinstance(made, Exception)
            return made
    return None
