"""Pickles written from plain data and the records of this package, importing nothing.

What ``load`` made of a pickle goes back to the same classes, calls and states; tensors are written as torch.save
(2.13) writes them, byte for byte, with their storages by persistent id. Does not write storages.
"""

from __future__ import annotations

import gc
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Literal

from ckpt_tool.dtypes import DTYPES, DType
from ckpt_tool.errors import Unsupported
from ckpt_tool.formats._pickle.emit import REDUCED, Call
from ckpt_tool.formats._pickle.nodes import DefaultMap, Fields, Global, OrderedMap, Size, Stub
from ckpt_tool.formats._pickle.tensors import StorageRef
from ckpt_tool.sizes import counted

__all__ = ["dump_pickle"]

_BATCH = 1000  # as CPython's pickler: SETITEMS and APPENDS take at most this many
_PYTHON2_NAMES = {"builtins": "__builtin__", "copyreg": "copy_reg"}
_CLASS_NAMES: Mapping[type, tuple[str, str]] = {
    OrderedMap: ("collections", "OrderedDict"),
    DefaultMap: ("collections", "defaultdict"),
    Size: ("torch", "Size"),
}


def dump_pickle(value: Any, *, protocol: Literal[2, 4] = 2) -> bytes:
    """The pickle of ``value``; shared parts stay shared. torch.load(weights_only=True) reads protocol 2 only.

    Raises:
        Unsupported: an object of a kind that no record describes, or one nested deeper than Python's stack.
    """
    if protocol not in (2, 4):
        raise Unsupported(f"pickle protocol {protocol}, expected 2 or 4")
    pickler = _Pickler(protocol)
    was_enabled = gc.isenabled()
    gc.disable()  # everything written stays alive until the end, and a collection would look at all of it
    try:
        pickler.save(value)
    except RecursionError as error:
        raise Unsupported("the object is nested too deeply to be written as a pickle") from error
    finally:
        if was_enabled:
            gc.enable()
    return pickler.finished()


_CLASSES = {cls: Global(*names) for cls, names in _CLASS_NAMES.items()}
_BUILTIN = {name: Global("builtins", name) for name in ("set", "frozenset", "bytearray")}
_ENCODE = Global("_codecs", "encode")
_STORAGE_CLASSES: Mapping[DType | None, Global] = {
    None: Global("torch.storage", "UntypedStorage"),
    **{row: Global("torch", row.storage) for row in DTYPES.values() if row.storage},
}


class _Pickler:
    """One pickle in the making: its bytes, and the memo of what it wrote."""

    def __init__(self, protocol: int) -> None:
        self._protocol = protocol
        self._parts: list[bytes] = []
        self._write = self._parts.append
        # Objects by identity, text by value; objects are kept alive so that no identity is used twice.
        self._memo: dict[int | str | tuple[str, str], int] = {}
        self._n_memoized = 0
        self._alive: list[object] = []

    def finished(self) -> bytes:
        body = b"".join([*self._parts, b"."])
        frame = b"\x95" + struct.pack("<Q", len(body)) if self._protocol == 4 else b""
        return b"\x80" + bytes([self._protocol]) + frame + body

    def save(self, value: Any) -> None:
        key: int | str = value if type(value) is str else id(value)
        index = self._memo.get(key)
        if index is not None:
            self._get(index)
            return
        writer = _WRITERS.get(type(value))
        if writer is not None:
            writer(self, value)
        elif isinstance(value, Global):
            self._global(value.module, value.name)
        elif isinstance(value, Stub):
            self._stub(value)
        elif value in _CLASS_NAMES if isinstance(value, type) else False:
            self._global(*_CLASS_NAMES[value])
        else:
            self._reduced(value)

    def _reduced(self, value: Any) -> None:
        for kinds, describe in REDUCED:
            if isinstance(value, kinds):
                self._call(value, describe(value))
                return
        raise Unsupported(f"a {type(value).__name__} cannot be written into a pickle")

    def _memoize(self, key: int | str | tuple[str, str], value: object = None) -> None:
        index = self._memo[key] = self._n_memoized
        self._n_memoized += 1
        self._alive.append(value)
        if self._protocol == 4:
            self._write(b"\x94")
        elif index < 256:
            self._write(b"q" + bytes([index]))
        else:
            self._write(b"r" + struct.pack("<I", index))

    def _get(self, index: int) -> None:
        self._write(b"h" + bytes([index]) if index < 256 else b"j" + struct.pack("<I", index))

    # ------------------------------------------------------------------------------------------------------ atoms

    def _none(self, value: None) -> None:
        del value
        self._write(b"N")

    def _bool(self, value: bool) -> None:  # noqa: FBT001 a value
        self._write(b"\x88" if value else b"\x89")

    def _int(self, value: int) -> None:
        if 0 <= value < 1 << 8:
            self._write(b"K" + bytes([value]))
        elif 0 <= value < 1 << 16:
            self._write(b"M" + struct.pack("<H", value))
        elif -(1 << 31) <= value < 1 << 31:
            self._write(b"J" + struct.pack("<i", value))
        else:
            nbytes = (value.bit_length() >> 3) + 1
            raw = value.to_bytes(nbytes, "little", signed=True)
            if value < 0 and nbytes > 1 and raw[-1] == 0xFF and raw[-2] & 0x80:
                raw = raw[:-1]
            self._write(b"\x8a" + bytes([len(raw)]) + raw if len(raw) < 256 else b"\x8b" + _u32(raw))

    def _float(self, value: float) -> None:
        self._write(b"G" + struct.pack(">d", value))

    def _text(self, value: str) -> None:
        raw = value.encode("utf-8", "surrogatepass")
        if self._protocol == 4 and len(raw) < 256:
            self._write(b"\x8c" + bytes([len(raw)]) + raw)
        else:
            self._write(b"X" + _u32(raw))
        self._memoize(value)

    def _bytes(self, value: bytes) -> None:
        if self._protocol == 4:
            self._write(b"C" + bytes([len(value)]) + value if len(value) < 256 else b"B" + _u32(value))
            self._memoize(id(value), value)
        else:
            self._call(value, Call(_ENCODE, (value.decode("latin-1"), "latin1")))

    def _bytearray(self, value: bytearray) -> None:
        cls = _BUILTIN["bytearray"]
        args = (value.decode("latin-1"), "latin-1") if self._protocol == 2 else (bytes(value),)
        self._call(value, Call(cls, args if value else ()))

    # ------------------------------------------------------------------------------------------------- containers

    def _tuple(self, value: tuple[Any, ...]) -> None:
        if not value:
            self._write(b")")
            return
        if len(value) > 3:
            self._write(b"(")
        for item in value:
            self.save(item)
        index = self._memo.get(id(value))
        if index is not None:  # it contains itself, and was finished on the way
            self._write(b"0" * len(value) if len(value) <= 3 else b"1")
            self._get(index)
            return
        self._write((b"\x85", b"\x86", b"\x87")[len(value) - 1] if len(value) <= 3 else b"t")
        self._memoize(id(value), value)

    def _list(self, value: list[Any]) -> None:
        self._write(b"]")
        self._memoize(id(value), value)
        self._appends(value)

    def _dict(self, value: dict[Any, Any]) -> None:
        self._write(b"}")
        self._memoize(id(value), value)
        self._setitems(value.items())

    def _set(self, value: set[Any]) -> None:
        if self._protocol == 2:
            self._call(value, Call(_BUILTIN["set"], (list(value),)))
            return
        self._write(b"\x8f")
        self._memoize(id(value), value)
        for batch in _batches(value):
            self._write(b"(")
            for item in batch:
                self.save(item)
            self._write(b"\x90")

    def _frozenset(self, value: frozenset[Any]) -> None:
        self._call(value, Call(_BUILTIN["frozenset"], (list(value),)))

    def _ordered_map(self, value: OrderedMap) -> None:
        args = (value.factory,) if isinstance(value, DefaultMap) and value.factory is not None else ()
        self._call(
            value, Call(_CLASSES[type(value)], args, entries=list(value.items()), state=value.attributes or None)
        )

    def _appends(self, items: Sequence[Any]) -> None:
        for batch in _batches(items):
            if len(batch) > 1:
                self._write(b"(")
            for item in batch:
                self.save(item)
            self._write(b"e" if len(batch) > 1 else b"a")

    def _setitems(self, entries: Iterable[tuple[Any, Any]]) -> None:
        for batch in _batches(entries):
            if len(batch) > 1:
                self._write(b"(")
            for key, item in batch:
                self.save(key)
                self.save(item)
            self._write(b"u" if len(batch) > 1 else b"s")

    # ------------------------------------------------------------------------------------------ names and objects

    def _global(self, module: str, name: str) -> None:
        index = self._memo.get((module, name))
        if index is not None:
            self._get(index)
            return
        if self._protocol == 4:
            self.save(module)
            self.save(name)
            self._write(b"\x93")
        elif "." in name:  # before protocol 4, a nested name is an attribute of the outer one
            outer, _, last = name.rpartition(".")
            self._global("builtins", "getattr")
            self._global(module, outer)
            self.save(last)
            self._write(b"\x86R")
        else:
            old = _PYTHON2_NAMES.get(module, module)
            self._write(b"c" + old.encode("utf-8") + b"\n" + name.encode("utf-8") + b"\n")
        self._memoize((module, name))

    def _dtype(self, value: DType) -> None:
        self._global("torch", value.name)

    def _storage(self, value: StorageRef) -> None:
        cls = _STORAGE_CLASSES.get(value.dtype)
        if cls is None:
            raise Unsupported(f"torch has no storage class for {value.dtype}")
        view = () if value.view is None else (value.view,)
        self._tuple(("storage", cls, value.key, value.location, value.numel, *view))
        self._write(b"Q")

    def _stub(self, value: Stub) -> None:
        call = Call(value.cls, value.args, value.kwargs, value.state, value.entries, value.items)
        self._call(value, call, is_new=value.made == "newobj")

    def _call(self, value: Any, call: Call, *, is_new: bool = False) -> None:
        args: tuple[Any, ...] = call.args
        if is_new and not call.kwargs:
            self.save(call.function)
            self.save(args)
            self._write(b"\x81")
        elif is_new and self._protocol == 4:
            for part in (call.function, args, call.kwargs):
                self.save(part)
            self._write(b"\x92")
        else:
            function = call.function
            if is_new:
                function, args = Global("copyreg", "__newobj_ex__"), (function, args, call.kwargs)
            self.save(function)
            self.save(args)
            self._write(b"R")
        self._memoize(id(value), value)
        if call.items:
            self._appends(call.items)
        if call.entries:
            self._setitems(call.entries)
        if call.state is not None:
            self.save(call.state)
            self._write(b"b")


def _fields(_: _Pickler, value: Fields) -> None:
    raise Unsupported(f"a {type(value).__name__} keeps no class and cannot be written into a pickle")


_WRITERS: dict[type, Callable[[_Pickler, Any], None]] = {
    type(None): _Pickler._none,  # noqa: SLF001 the table is the class's dispatch
    bool: _Pickler._bool,  # noqa: SLF001
    int: _Pickler._int,  # noqa: SLF001
    float: _Pickler._float,  # noqa: SLF001
    str: _Pickler._text,  # noqa: SLF001
    bytes: _Pickler._bytes,  # noqa: SLF001
    bytearray: _Pickler._bytearray,  # noqa: SLF001
    tuple: _Pickler._tuple,  # noqa: SLF001
    list: _Pickler._list,  # noqa: SLF001
    dict: _Pickler._dict,  # noqa: SLF001
    set: _Pickler._set,  # noqa: SLF001
    frozenset: _Pickler._frozenset,  # noqa: SLF001
    OrderedMap: _Pickler._ordered_map,  # noqa: SLF001
    DefaultMap: _Pickler._ordered_map,  # noqa: SLF001
    DType: _Pickler._dtype,  # noqa: SLF001
    StorageRef: _Pickler._storage,  # noqa: SLF001
    Fields: _fields,
}


def _u32(raw: bytes) -> bytes:
    if len(raw) >= 1 << 32:
        raise Unsupported(f"a single value of {counted(len(raw), 'byte')} in a pickle, expected below 4 GiB")
    return struct.pack("<I", len(raw)) + raw


def _batches(items: Iterable[Any]) -> Iterable[list[Any]]:
    iterator = iter(items)
    while batch := list(islice(iterator, _BATCH)):
        yield batch
