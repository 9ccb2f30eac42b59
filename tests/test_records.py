"""A quick data class does what one of the standard library does."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from ckpt_tool import records

OPTIONS: list[dict[str, Any]] = [
    {"frozen": frozen, "slots": slots, "eq": eq, "order": order}
    for frozen in (True, False)
    for slots in (True, False)
    for eq, order in ((True, False), (False, False), (True, True))
]


def made_by(decorator: Any, options: dict[str, Any]) -> Any:
    """A class with each kind of field."""

    @decorator(**options)
    class Piece:
        """A class."""

        fqn: str
        sizes: tuple[int, ...]
        offset: int = 3
        notes: list[str] = dataclasses.field(default_factory=list)
        kind: str = dataclasses.field(default="plain")
        seen: int = dataclasses.field(default=0, repr=False, compare=False)

        def end(self) -> int:
            return self.offset + 1

    return Piece


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returns, or the type of what it raises."""
    try:
        return call()
    except (AttributeError, TypeError, ValueError) as error:
        return type(error)


def subclass(cls: Any) -> Any:
    """A data class of the standard library that has the fields of ``cls``."""
    made: Any = type("Sub", (cls,), {})
    return dataclasses.dataclass(frozen=cls.__dataclass_params__.frozen)(made)


CALLS: dict[str, Callable[[Any], Any]] = {
    "repr": lambda cls: repr(cls("w", (1, 2))),
    "by name": lambda cls: repr(cls(sizes=(1,), fqn="w", offset=9, kind="odd")),
    "equal": lambda cls: cls("w", (1,)) == cls("w", (1,)),
    "different": lambda cls: cls("w", (1,)) == cls("w", (2,)),
    "of another class": lambda cls: cls("w", (1,)) == ("w", (1,), 3, [], "plain"),
    "not compared": lambda cls: cls("w", (1,), seen=1) == cls("w", (1,), seen=2),
    "order": lambda cls: sorted([cls("w", (2,)), cls("w", (1,)), cls("v", (3,))])[1].sizes,
    "at least": lambda cls: (cls("w", (1,)) >= cls("w", (1,), seen=2), cls("w", (1,)) > cls("w", (1,))),
    "order of another class": lambda cls: cls("w", (1,)) < 3,
    "hash of a list": lambda cls: hash(cls("w", (1,))) and None,
    "hash": lambda cls: len(set(map(hash, [cls("w", (1,), 0, ()), cls("w", (1,), 0, ())]))),
    "set": lambda cls: setattr(cls("w", (1,)), "offset", 4),
    # A TypeError in Python 3.11, because its frozen classes with slots forget which class they are.
    "set another": lambda cls: isinstance(outcome(lambda: setattr(cls("w", (1,)), "unknown", 4)), type),
    "delete": lambda cls: delattr(cls("w", (1,)), "offset"),
    "too few": lambda cls: cls("w"),
    "too many": lambda cls: cls("w", (1,), 2, [], "x", 1, 2),
    "twice": lambda cls: cls("w", (1,), fqn="w"),
    "unknown": lambda cls: cls("w", (1,), other=1),
    "replace": lambda cls: repr(dataclasses.replace(cls("w", (1,)), offset=8)),
    "asdict": lambda cls: dataclasses.asdict(cls("w", (1,))),
    "astuple": lambda cls: dataclasses.astuple(cls("w", (1,))),
    "fields": lambda cls: [(f.name, f.type, f.default) for f in dataclasses.fields(cls)],
    "is one": dataclasses.is_dataclass,
    "copy": lambda cls: repr(copy.copy(cls("w", (1,)))),
    "own list": lambda cls: cls("w", (1,)).notes is cls("w", (1,)).notes,
    "method": lambda cls: cls("w", (1,)).end(),
    "match": lambda cls: cls.__match_args__,
    "room for more": lambda cls: hasattr(cls("w", (1,)), "__dict__"),
    "class attribute": lambda cls: type(getattr(cls, "offset", None)),
    "names": lambda cls: (cls.__name__, cls.__qualname__.replace("records", ""), cls.__doc__, cls.__module__),
    "subclass": lambda cls: repr(subclass(cls)("w", ())),
}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_does_what_the_standard_one_does(options: dict[str, Any], call: Callable[[Any], Any]) -> None:
    """Results, and kinds of errors, are the same for each combination of options, in the first calls and later."""
    quick, standard = made_by(records.dataclass, options), made_by(dataclasses.dataclass, options)
    expected = outcome(lambda: call(standard))
    assert [outcome(lambda: call(quick)) for _ in range(6)] == [expected] * 6


@records.dataclass(frozen=True, slots=True)
class Pickled:
    """At the top of its module, as a pickle asks for."""

    a: int
    b: tuple[int, ...] = ()


@records.dataclass(frozen=True, slots=True)
class Checked:
    """Complains of its values."""

    n: int

    def __post_init__(self) -> None:
        """Refuse what is negative."""
        if self.n < 0:
            raise ValueError("negative")


@records.dataclass(frozen=True)
class OwnEquality:  # noqa: PLW1641 - the decorator gives the hash
    """Keeps the methods that its body has."""

    a: int

    def __eq__(self, other: object) -> bool:
        """Everything is equal."""
        return True

    def __repr__(self) -> str:
        """Says hello."""
        return "hello"


def test_pickles() -> None:
    """A frozen class with slots goes through a pickle, as between processes."""
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(Pickled(1, (2,)), protocol)) == Pickled(1, (2,))


def test_runs_what_comes_after_init() -> None:
    """``__post_init__`` is called, the first time and later."""
    for _ in range(2):
        with pytest.raises(ValueError, match="negative"):
            Checked(-1)
    assert Checked(1).n == 1


def test_methods_of_the_class_stay() -> None:
    """What the class defines is not replaced; its hash is that of its fields, as in the standard library."""
    assert OwnEquality(1) == OwnEquality(2)
    assert repr(OwnEquality(1)) == "hello"
    assert hash(OwnEquality(1)) == hash(OwnEquality(1))


def test_a_class_without_fields() -> None:
    """All of its objects are equal."""

    @records.dataclass(frozen=True, slots=True)
    class Mark:
        """Says something by being there."""

    assert [Mark() == Mark() for _ in range(6)] == [True] * 6
    assert hash(Mark()) == hash(Mark())
    assert repr(Mark()).endswith("Mark()")


def test_leaves_the_rest_to_the_standard_library() -> None:
    """Other options, and mistakes, are its business."""

    @records.dataclass(kw_only=True)
    class ByName:
        """Takes names alone."""

        a: int

    assert outcome(lambda: ByName(1)) is TypeError  # type: ignore[call-arg]
    assert ByName(a=1) == ByName(a=1)
    with pytest.raises(ValueError, match="mutable default"):

        @records.dataclass
        class Mutable:
            """One list for all."""

            a: list[int] = []  # noqa: RUF012

    with pytest.raises(TypeError, match="default"):

        @records.dataclass
        class Misplaced:
            """No default behind one."""

            a: int = 0
            b: int  # type: ignore[misc]


def test_quick_classes_are_not_made_by_the_standard_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defining and calling one does not compile what is dear."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("made by the standard library")

    monkeypatch.setattr(dataclasses, "dataclass", refuse)
    assert made_by(records.dataclass, {"frozen": True, "slots": True})("w", ()).offset == 3
