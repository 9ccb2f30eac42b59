"""Data classes, as those of the standard library and checked as those by a type checker, but quick to define.

``dataclasses.dataclass`` compiles six methods for each class when its module is imported: half a millisecond, which for
the hundred and more classes of a command was a quarter of its start-up. Here the methods are shared between classes,
and ``__init__`` is compiled when a class is called for the first time. What ``dataclasses`` asks of a class for
``fields``, ``replace`` or ``asdict`` is answered by a twin that the standard library makes, when asked. A class
that wants more than ``frozen``, ``slots``, ``eq`` and defaults is made by the standard library from the start.
"""

from __future__ import annotations

import dataclasses
from dataclasses import MISSING, FrozenInstanceError, field
from functools import cache
from inspect import get_annotations
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from dataclasses import dataclass
else:

    def dataclass(cls: type | None = None, /, **options: bool) -> Any:
        """``dataclasses.dataclass``, with the same options and the same result."""
        if cls is None:
            return lambda given: dataclass(given, **options)
        return _quick(cls, options) if _is_simple(cls, options) else dataclasses.dataclass(cls, **options)


__all__ = ["dataclass", "field"]

_OPTIONS = {"frozen", "slots", "eq"}
_ABSENT = object()


def _is_simple(cls: type, options: Mapping[str, bool]) -> bool:
    """Whether the class asks for nothing but what is made here, and makes no mistake that is to be reported."""
    names = get_annotations(cls)
    defaults = [cls.__dict__.get(name, MISSING) for name in names]
    is_optional = [default is not MISSING and not _is_required(default) for default in defaults]
    return (
        cls.__bases__ == (object,)
        and bool(names)
        and options.keys() <= _OPTIONS
        and all(isinstance(kind, str) and "ClassVar" not in kind and "InitVar" not in kind for kind in names.values())
        and all(_is_simple_default(default) for default in defaults)
        and is_optional == sorted(is_optional)
    )


def _is_simple_default(default: Any) -> bool:
    if not isinstance(default, dataclasses.Field):
        return type(default).__hash__ is not None
    wants = (default.init, default.repr, default.compare, default.hash, default.kw_only, default.metadata or None)
    return wants == (True, True, True, None, MISSING, None)


def _is_required(default: Any) -> bool:
    is_field = isinstance(default, dataclasses.Field)
    return is_field and default.default is MISSING and default.default_factory is MISSING


def _quick(cls: type, options: Mapping[str, bool]) -> type:
    """``cls`` with the methods of a data class, or with ``slots`` a class like it."""
    is_frozen, has_slots, has_eq = options.get("frozen", False), options.get("slots", False), options.get("eq", True)
    annotations: dict[str, str] = get_annotations(cls)
    names = tuple(annotations)
    defaults = {name: cls.__dict__[name] for name in names if name in cls.__dict__}
    made = _slotted(cls, names) if has_slots else _without_specifiers(cls, defaults)

    def first_init(self: Any, *args: Any, **kwargs: Any) -> None:
        initialise = _compiled_init(made, names, defaults, is_frozen=is_frozen)
        made.__init__ = initialise  # type: ignore[misc]
        initialise(self, *args, **kwargs)

    @cache
    def twin() -> type:
        body = {"__doc__": made.__doc__, "__module__": made.__module__, "__annotations__": annotations, **defaults}
        return dataclasses.dataclass(frozen=is_frozen, eq=has_eq)(type(made.__name__, (), body))

    methods: dict[str, Any] = {"__init__": first_init, "__repr__": _repr, "__match_args__": names}
    if has_eq:
        methods["__eq__"] = _eq
        if made.__dict__.get("__hash__") is None:  # Python puts None there for a class with an __eq__ of its own
            made.__hash__ = _hash if is_frozen else None  # type: ignore[assignment,method-assign]
    if is_frozen:
        methods |= {"__setattr__": _refuse_to_set, "__delattr__": _refuse_to_delete}
    if is_frozen and has_slots:
        methods |= {"__getstate__": _values, "__setstate__": _set_values}
    answers = {name: _Answer(name, twin) for name in ("__dataclass_fields__", "__dataclass_params__")}
    for name, method in {**methods, **answers}.items():
        if name not in made.__dict__:
            setattr(made, name, method)
    return made


def _slotted(cls: type, names: tuple[str, ...]) -> type:
    """A class like ``cls`` whose instances hold ``names`` and nothing else."""
    left_out = {*names, "__dict__", "__weakref__"}
    body = {name: value for name, value in cls.__dict__.items() if name not in left_out}
    made = type(cls.__name__, cls.__bases__, {**body, "__slots__": names})
    made.__qualname__ = cls.__qualname__
    return made


def _without_specifiers(cls: type, defaults: Mapping[str, Any]) -> type:
    """``cls`` itself, with the defaults of its fields in the place of what ``field`` returned."""
    for name, default in defaults.items():
        if isinstance(default, dataclasses.Field):
            delattr(cls, name) if default.default is MISSING else setattr(cls, name, default.default)
    return cls


def _compiled_init(
    made: type, names: tuple[str, ...], defaults: Mapping[str, Any], *, is_frozen: bool
) -> Callable[..., None]:
    """``__init__`` with a parameter for each field."""
    scope: dict[str, Any] = {"_put": object.__setattr__, "_absent": _ABSENT}
    parameters, lines = ["self"], []
    for name in names:
        default, make = _default_of(defaults.get(name, MISSING))
        scope |= {f"_default_{name}": default, f"_make_{name}": make}
        parameters.append(name if default is MISSING else f"{name}=_default_{name}")
        value = name if make is None else f"_make_{name}() if {name} is _absent else {name}"
        lines.append(f"_put(self, {name!r}, {value})" if is_frozen else f"self.{name} = {value}")
    if hasattr(made, "__post_init__"):
        lines.append("self.__post_init__()")
    exec(f"def __init__({', '.join(parameters)}):\n " + "\n ".join(lines), scope)  # noqa: S102 - names of fields only
    initialise: Callable[..., None] = scope["__init__"]
    initialise.__qualname__ = f"{made.__qualname__}.__init__"
    initialise.__module__ = made.__module__
    return initialise


def _default_of(stated: Any) -> tuple[Any, Callable[[], Any] | None]:
    """``(default, factory)`` of a field as the class body has it; with a factory the default stands for its absence."""
    if not isinstance(stated, dataclasses.Field):
        return stated, None
    if stated.default_factory is not MISSING:
        return _ABSENT, stated.default_factory
    return stated.default, None


class _Answer:
    """An attribute of a class that its twin has."""

    def __init__(self, name: str, twin: Callable[[], type]) -> None:
        self._name = name
        self._twin = twin

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return getattr(self._twin(), self._name)


@recursive_repr()
def _repr(self: Any) -> str:
    shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in type(self).__match_args__)
    return f"{type(self).__qualname__}({shown})"


def _values(self: Any) -> list[Any]:
    return [getattr(self, name) for name in type(self).__match_args__]


def _set_values(self: Any, values: list[Any]) -> None:
    for name, value in zip(type(self).__match_args__, values, strict=True):
        object.__setattr__(self, name, value)


def _eq(self: Any, other: object) -> Any:
    if other is self:
        return True
    if other.__class__ is not self.__class__:
        return NotImplemented
    return tuple(_values(self)) == tuple(_values(other))


def _hash(self: Any) -> int:
    return hash(tuple(_values(self)))


def _refuse_to_set(self: Any, name: str, value: Any) -> NoReturn:  # noqa: ARG001 - the signature is Python's
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_to_delete(self: Any, name: str) -> NoReturn:  # noqa: ARG001 - the signature is Python's
    raise FrozenInstanceError(f"cannot delete field {name!r}")
