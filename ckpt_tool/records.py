"""Data classes, as those of the standard library and checked as those by a type checker, but quick to define.

``dataclasses.dataclass`` compiles six methods for each class when its module is imported: half a millisecond, which for
the hundred and more classes of a command was a quarter of its start-up. Here methods differ in the names of fields
alone, and ``__init__`` is compiled for a class that is called often. What ``dataclasses`` asks of a class for
``fields``, ``replace`` or ``asdict`` is answered by a twin that the standard library makes, when asked. A class that
wants more than to be frozen, to have slots, an order and defaults is made by the standard library from the start.
"""

from __future__ import annotations

import dataclasses
import operator
from dataclasses import MISSING, FrozenInstanceError, field
from inspect import get_annotations
from reprlib import recursive_repr
from types import MemberDescriptorType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from dataclasses import dataclass
else:

    def dataclass(cls: type | None = None, /, **options: bool) -> Any:
        """``dataclasses.dataclass``, with the same options and the same result."""
        if cls is None:
            return lambda given: dataclass(given, **options)
        kinds = get_annotations(cls)
        defaults = {name: cls.__dict__.get(name, MISSING) for name in kinds}
        if _is_simple(cls, kinds, defaults, options):
            return _quick(cls, kinds, defaults, options)
        return dataclasses.dataclass(cls, **options)


__all__ = ["dataclass", "field"]

_OPTIONS = {"frozen", "slots", "eq", "order"}
_ORDER = {f"__{name}__": getattr(operator, name) for name in ("lt", "le", "gt", "ge")}
_ABSENT = object()
_N_UNCOMPILED = 4
"""So many calls of a class take less time together than to compile its ``__init__``; most classes see no more."""


def _is_simple(cls: type, kinds: Mapping[str, Any], defaults: Mapping[str, Any], options: Mapping[str, bool]) -> bool:
    """Whether the class asks for nothing but what is made here, and makes no mistake that is to be reported."""
    if cls.__bases__ != (object,) or not options.keys() <= _OPTIONS:
        return False
    if options.get("order", False) and (not options.get("eq", True) or not _ORDER.keys().isdisjoint(cls.__dict__)):
        return False
    is_optional = False
    for name, kind in kinds.items():
        default = defaults[name]
        if not isinstance(kind, str) or "ClassVar" in kind or "InitVar" in kind or not _is_simple_default(default):
            return False
        if is_optional and _is_required(default):
            return False
        is_optional = not _is_required(default)
    return True


def _is_simple_default(default: Any) -> bool:
    if not isinstance(default, dataclasses.Field):
        return type(default).__hash__ is not None
    wants = (default.init, default.hash, default.kw_only, default.metadata or None)
    return wants == (True, None, MISSING, None)


def _is_required(default: Any) -> bool:
    is_field = isinstance(default, dataclasses.Field)
    return default is MISSING or (is_field and default.default is MISSING and default.default_factory is MISSING)


def _quick(cls: type, kinds: Mapping[str, str], defaults: Mapping[str, Any], options: Mapping[str, bool]) -> type:
    """``cls`` with the methods of a data class, or with ``slots`` a class like it."""
    is_frozen, has_slots, has_eq = options.get("frozen", False), options.get("slots", False), options.get("eq", True)
    made = _slotted(cls, tuple(kinds)) if has_slots else _without_specifiers(cls, defaults)
    compared = _names_for("compare", defaults)
    methods: dict[str, Any] = {
        "__init__": _init_of(made, defaults, is_frozen=is_frozen),
        "__repr__": _repr_of(_names_for("repr", defaults)),
        "__match_args__": tuple(kinds),
    }
    if has_eq:
        methods["__eq__"] = _equality(compared)
        if made.__dict__.get("__hash__") is None:  # Python puts None there for a class with an __eq__ of its own
            made.__hash__ = _hash_of(compared) if is_frozen else None  # type: ignore[assignment,method-assign]
    if options.get("order", False):
        methods |= {name: _comparison(compare, compared) for name, compare in _ORDER.items()}
    if is_frozen:
        methods |= {"__setattr__": _refuse_to_set, "__delattr__": _refuse_to_delete}
    if is_frozen and has_slots:
        methods |= {"__getstate__": _values, "__setstate__": _set_values}

    def twin(**asked: bool) -> Any:
        stated = {name: default for name, default in defaults.items() if default is not MISSING}
        body = {"__doc__": made.__doc__, "__module__": made.__module__, "__annotations__": kinds, **stated}
        return dataclasses.dataclass(**asked)(type(made.__name__, (), body))

    # For its fields alone the standard library compiles nothing.
    methods["__dataclass_fields__"] = _Answer(lambda: twin(init=False, repr=False, eq=False).__dataclass_fields__)
    methods["__dataclass_params__"] = _Answer(lambda: twin(**{**options, "slots": False}).__dataclass_params__)
    for name, method in methods.items():
        if name not in made.__dict__:
            setattr(made, name, method)
    return made


def _names_for(use: str, defaults: Mapping[str, Any]) -> tuple[str, ...]:
    """Fields that take part in ``repr`` or ``compare``."""
    return tuple([k for k, v in defaults.items() if not isinstance(v, dataclasses.Field) or getattr(v, use)])


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


def _init_of(made: type, defaults: Mapping[str, Any], *, is_frozen: bool) -> Callable[..., None]:
    """``__init__`` for the first calls; a class that is called often, or wrongly, gets a compiled one."""
    n_left = _N_UNCOMPILED
    put = object.__setattr__ if is_frozen else setattr

    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal n_left
        values = _bound(defaults, args, kwargs) if n_left > 0 else None
        if values is None:
            compiled = _compiled_init(made, defaults, is_frozen=is_frozen)
            made.__init__ = compiled  # type: ignore[misc]
            compiled(self, *args, **kwargs)
            return
        n_left -= 1
        for name, value in values.items():
            put(self, name, value)
        if hasattr(made, "__post_init__"):
            self.__post_init__()

    return initialise


def _bound(defaults: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """The value of each field in a call with these arguments; None where Python has an error to report."""
    given = dict(zip(defaults, args, strict=False))
    if len(args) > len(defaults) or not given.keys().isdisjoint(kwargs) or not kwargs.keys() <= defaults.keys():
        return None
    given |= kwargs
    values: dict[str, Any] = {}
    for name, stated in defaults.items():
        default, make = _default_of(stated)
        if name in given:
            values[name] = given[name]
        elif default is MISSING:
            return None
        else:
            values[name] = default if make is None else make()
    return values


def _compiled_init(made: type, defaults: Mapping[str, Any], *, is_frozen: bool) -> Callable[..., None]:
    """``__init__`` with a parameter for each field."""
    scope: dict[str, Any] = {"_put": object.__setattr__, "_absent": _ABSENT}
    parameters, lines = ["self"], ["pass"]
    for name, stated in defaults.items():
        default, make = _default_of(stated)
        scope |= {f"_default_{name}": default, f"_make_{name}": make}
        parameters.append(name if default is MISSING else f"{name}=_default_{name}")
        value = name if make is None else f"_make_{name}() if {name} is _absent else {name}"
        slot = made.__dict__.get(name)
        if not is_frozen:
            lines.append(f"self.{name} = {value}")
        elif isinstance(slot, MemberDescriptorType):  # its own setter takes half of the time
            scope[f"_put_{name}"] = slot.__set__
            lines.append(f"_put_{name}(self, {value})")
        else:
            lines.append(f"_put(self, {name!r}, {value})")
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
    """An attribute of a class that is made when somebody asks for it."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._made: Any = None

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if self._made is None:
            self._made = self._make()
        return self._made


def _repr_of(names: Sequence[str]) -> Callable[[Any], str]:
    @recursive_repr()
    def represent(self: Any) -> str:
        shown = ", ".join([f"{name}={getattr(self, name)!r}" for name in names])
        return f"{type(self).__qualname__}({shown})"

    return represent


def _comparison(compare: Callable[[Any, Any], bool], names: Sequence[str]) -> Callable[[Any, object], Any]:
    def compared(self: Any, other: object) -> Any:
        if other.__class__ is not self.__class__:
            return NotImplemented
        return compare(tuple([getattr(self, k) for k in names]), tuple([getattr(other, k) for k in names]))

    return compared


def _equality(names: Sequence[str]) -> Callable[[Any, object], Any]:
    compared = _comparison(operator.eq, names)
    return lambda self, other: other is self or compared(self, other)


def _hash_of(names: Sequence[str]) -> Callable[[Any], int]:
    return lambda self: hash(tuple([getattr(self, name) for name in names]))


def _values(self: Any) -> list[Any]:
    return [getattr(self, name) for name in type(self).__match_args__]


def _set_values(self: Any, values: list[Any]) -> None:
    for name, value in zip(type(self).__match_args__, values, strict=True):
        object.__setattr__(self, name, value)


def _refuse_to_set(self: Any, name: str, value: Any) -> NoReturn:  # noqa: ARG001 - the signature is Python's
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_to_delete(self: Any, name: str) -> NoReturn:  # noqa: ARG001 - the signature is Python's
    raise FrozenInstanceError(f"cannot delete field {name!r}")
