"""Inert records: what stands for the classes, functions and objects that a pickle names.

Nothing here does anything. A pickle cannot change a record either: the ``BUILD`` opcode calls ``__setstate__``, and
the records that were checked when they were made refuse it. Does not know opcodes, files or torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, cast

from ckpt_tool.errors import FormatError
from ckpt_tool.sizes import counted

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["DefaultMap", "Device", "Fields", "Global", "OrderedMap", "PathText", "Size", "Stub", "refuse_state"]

_MAX_REPR = 120


def refuse_state(self: object, state: object) -> NoReturn:
    """The ``__setstate__`` of records that a pickle may not alter.

    Raises:
        FormatError: always.
    """
    del state
    raise FormatError(f"the pickle sets state on a {type(self).__name__}, which has none")


class Stub:
    """An object of a class that was not imported: its class by name, and what the pickle gave to it.

    Equal only to itself, so that it can be a key of a dict or a set before it is complete.
    """

    __slots__ = ("args", "entries", "items", "kwargs", "made", "state")

    args: tuple[Any, ...]
    """Positional arguments of the constructor, or of the function that returned it."""
    kwargs: dict[str, Any]
    state: Any
    """What ``BUILD`` set: usually a dict of attributes, or ``(dict or None, dict of slots)``; None when nothing."""
    entries: Sequence[tuple[Any, Any]]
    """Key and value pairs that the pickle stored into it, in order."""
    items: Sequence[Any]
    """Values that the pickle appended to it, in order."""
    made: str
    """``reduce`` when called, ``newobj`` when made by ``cls.__new__``."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Stub:  # noqa: PYI034 subclasses are Globals, made at run time
        """What the ``NEWOBJ`` opcodes call."""
        self = object.__new__(cls)
        self.args = args
        self.kwargs = kwargs
        self.state = None
        self.entries = ()
        self.items = ()
        self.made = "newobj"
        return self

    @property
    def cls(self) -> Global:
        """The class or function that made it."""
        return cast("Global", type(self))

    def __setstate__(self, state: object) -> None:
        self.state = state

    def __setitem__(self, key: object, value: object) -> None:
        if not isinstance(self.entries, list):
            self.entries = []
        self.entries.append((key, value))

    def append(self, item: object) -> None:
        """Keep one appended item."""
        self.extend([item])

    def extend(self, items: Sequence[object]) -> None:
        """Keep appended items."""
        if not isinstance(self.items, list):
            self.items = []
        self.items.extend(items)

    def attribute(self, name: str, default: object = None) -> Any:
        """The attribute ``name`` in the object's state, dict or slots; ``default`` where there is none."""
        states = self.state if isinstance(self.state, tuple) else (self.state,)
        for state in states:
            if isinstance(state, dict) and name in state:
                return state[name]
        return default

    def __repr__(self) -> str:
        args = "".join(f"{_short(item)}, " for item in self.args[:4]).removesuffix(", ")
        return f"<{self.cls.qualified} args=({args})>" if self.args else f"<{self.cls.qualified}>"


class Global(type):
    """A class or function that a pickle names, by name only; calling it makes a ``Stub``.

    It is a type because the C unpickler lets ``NEWOBJ`` make instances of nothing else. Two are equal when their names
    are.

    >>> ModelType = Global("megatron.core.enums", "ModelType")
    >>> ModelType(1)
    <megatron.core.enums.ModelType args=(1)>
    >>> ModelType.last, ModelType == Global("megatron.core.enums", "ModelType")
    ('ModelType', True)
    """

    _names: ClassVar[tuple[str, str]]

    def __new__(cls, module: str, name: str, **namespace: Any) -> Global:
        """The stand-in for ``module.name``; ``namespace`` is for subclasses."""
        return super().__new__(cls, "Stub", (Stub,), {"__slots__": (), "_names": (module, name), **namespace})

    def __init__(cls, module: str, name: str, **namespace: Any) -> None:
        del module, name, namespace
        super().__init__("Stub", (Stub,), {})

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.stub(*args, **kwargs)

    def stub(cls, *args: Any, **kwargs: Any) -> Stub:
        """A stub that records a call with these arguments."""
        made = Stub.__new__(cast("type[Stub]", cls), *args, **kwargs)
        made.made = "reduce"
        return made

    @property
    def module(cls) -> str:
        """The module's dotted name."""
        return cls._names[0]

    @property
    def name(cls) -> str:
        """The name within the module; dotted for nested classes."""
        return cls._names[1]

    @property
    def qualified(cls) -> str:
        """Module and name, joined by a dot."""
        return f"{cls._names[0]}.{cls._names[1]}"

    @property
    def last(cls) -> str:
        """The last component of the name."""
        return cls._names[1].rpartition(".")[2]

    def __eq__(cls, other: object) -> bool:
        return isinstance(other, Global) and cls._names == other._names

    def __hash__(cls) -> int:
        return hash(cls._names)

    def __repr__(cls) -> str:
        return f"<{cls.qualified}>"


class Fields(list[dict[str, Any]]):
    """An object kept as its bare state: ``fields[0]`` is the dict of attributes; empty when it has none.

    For classes of which a pickle holds very many: making one and setting its state run no Python code.
    """

    __slots__ = ()
    __setstate__ = list.append
    __hash__: ClassVar[Any] = object.__hash__
    __eq__ = object.__eq__


class Size(tuple[int, ...]):
    """A ``torch.Size``: equal to the tuple of its lengths."""

    __slots__ = ()
    __setstate__ = refuse_state


class OrderedMap(dict[Any, Any]):
    """A ``collections.OrderedDict``, with the attributes that were set on it (``_metadata`` of a state dict)."""

    __slots__ = ("attributes",)

    attributes: dict[str, Any]

    def __new__(cls, *args: Any) -> Self:
        """An empty map; arguments of an unpickled call are taken by ``__init__``."""
        del args
        self = dict.__new__(cls)
        self.attributes = {}
        return self

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, dict):
            raise FormatError(f"state of an OrderedDict: expected a dict, got {type(state).__name__}")
        self.attributes = state


class DefaultMap(OrderedMap):
    """A ``collections.defaultdict``, and what it would call for a missing key."""

    __slots__ = ("factory",)

    factory: Any

    def __init__(self, factory: object = None) -> None:
        super().__init__()
        self.factory = factory


class Device(str):
    """A ``torch.device`` as text: ``cuda:0``."""

    __slots__ = ()
    __setstate__ = refuse_state


class PathText(str):
    """A ``pathlib`` path as text, with the class that it had."""

    __slots__ = ("cls",)
    __setstate__ = refuse_state

    cls: Global

    def __new__(cls, text: str, made_by: Global) -> Self:
        """The path ``text`` of the class ``made_by``."""
        self = super().__new__(cls, text)
        self.cls = made_by
        return self

    __hash__ = str.__hash__


def _short(value: object) -> str:
    """A bounded text of one value: containers and long strings are not spelled out."""
    if isinstance(value, str):
        return repr(value if len(value) <= _MAX_REPR else value[:_MAX_REPR] + "...")
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return f"<int of {counted(value.bit_length(), 'bit')}>"
    if value is None or isinstance(value, (bool, int, float, Global)):
        return repr(value)
    if isinstance(value, Stub):
        return f"<{value.cls.qualified}>"
    if isinstance(value, (list, tuple, dict, set, frozenset)):
        return f"<{type(value).__name__} of {len(value):,}>"
    return f"<{type(value).__name__}>"
