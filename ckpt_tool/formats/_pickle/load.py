"""Pickles read into plain data and inert records. Nothing that a pickle names is imported or called.

CPython's C unpickler does the work; its ``find_class`` answers every name with a record (``nodes``), a builder of
records (``constructors``), or a refusal (``policy``). Does not know where the bytes come from.
"""

from __future__ import annotations

import gc
import io
import pickle
import struct
import threading
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

from ckpt_tool.dtypes import DTYPES
from ckpt_tool.errors import CkptError, FormatError, UnsafePickle, UsageError
from ckpt_tool.formats._pickle.constructors import constructor
from ckpt_tool.formats._pickle.nodes import DefaultMap, Global, OrderedMap, Size
from ckpt_tool.formats._pickle.policy import canonical_module, refusal
from ckpt_tool.formats._pickle.rebuild import storage_from_id
from ckpt_tool.formats._pickle.scan import pickle_end
from ckpt_tool.sizes import counted

__all__ = ["load_pickle", "load_prefix"]

_MAX_GLOBALS = 20_000  # distinct names; real checkpoints have fewer than a hundred
_CONTAINERS: Mapping[tuple[str, str], type] = {
    ("collections", "OrderedDict"): OrderedMap,
    ("collections", "defaultdict"): DefaultMap,
    ("torch", "Size"): Size,
}
# What the C unpickler and our own records raise on a pickle that makes no sense.
_DAMAGE = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
    struct.error,
)
# Hashing a tuple recurses in C without a check, some 70 bytes of stack a level; each level costs the pickle a byte.
_STACK_BYTES_PER_LEVEL = 128
_MAX_INLINE_TUPLES = 20_000
_MAX_STACK_BYTES = 4 << 30
_SPARE_STACK_BYTES = 16 << 20
_PAGE_BYTES = 1 << 16
_stack_size_lock = threading.Lock()


def load_pickle(
    data: bytes,
    *,
    where: str,
    classes: Mapping[str, type] | None = None,
) -> Any:
    """The object that ``data``, exactly one pickle, describes.

    Args:
        data: The pickle; only read.
        where: The file (and member) for messages.
        classes: Classes that stand for torch's own, by last name: for a name whose module begins with ``torch`` the
            class is made with ``cls.__new__(cls, *args)`` (or called) and given its state by ``__setstate__``.

    Raises:
        UnsafePickle: it asks for something that can run code; ``where`` ends in the byte that asks.
        FormatError: not one whole pickle, or one that contradicts itself.
        Unsupported: it holds numpy values of a type that numpy does not know.
        UsageError: one of ``classes`` has no ``__setstate__``.
    """
    value, used = load_prefix(data, where=where, classes=classes)
    if used != len(data):
        raise FormatError(
            f"{counted(len(data) - used, 'byte', 'follow')} the pickle, expected none", where=f"{where}:{used}"
        )
    return value


def load_prefix(
    data: bytes,
    *,
    where: str,
    start: int = 0,
    classes: Mapping[str, type] | None = None,
) -> tuple[Any, int]:
    """The object that the pickle at byte ``start`` of ``data`` describes, and the number of bytes that it takes.

    Arguments and errors are those of ``load_pickle``.
    """
    end = pickle_end(data, where=where, start=start)
    stream = data if start == 0 and end == len(data) else data[start:end]
    unpickler = _Unpickler(stream, classes or {})
    was_enabled = gc.isenabled()
    gc.disable()  # a collection in between walks all that was made so far, again and again
    try:
        value = _on_deep_stack(unpickler.load, stream)
    except CkptError as error:
        if error.where is None:
            error.where = f"{where}:{start + unpickler.asking_offset()}" if isinstance(error, UnsafePickle) else where
        raise
    except _DAMAGE as error:
        text = str(error) or type(error).__name__
        raise FormatError(f"the pickle contradicts itself: {text[:200]}", where=where) from error
    finally:
        if was_enabled:
            gc.enable()
    return value, end - start


class _Unpickler(pickle.Unpickler):
    """A C unpickler that imports nothing."""

    def __init__(self, data: bytes, classes: Mapping[str, type]) -> None:
        # A buffered reader can be peeked into: without that, C reads opcode by opcode.
        super().__init__(io.BufferedReader(io.BytesIO(data), 1 << 17), encoding="latin-1")
        for cls in classes.values():
            # BUILD sets attributes on whatever has no __setstate__: the class itself, too, when a pickle names it.
            if cls.__module__ != "builtins" and not hasattr(cls, "__setstate__"):
                raise UsageError(f"{cls.__name__} stands for a class in a pickle and has no __setstate__")
        self._data = data
        self._classes = classes
        self._known: dict[tuple[str, str], Any] = {}
        self._n_asked = 0

    def find_class(self, module: str, name: str, /) -> Any:
        """What stands for a name: a record, never the thing itself."""
        self._n_asked += 1
        key = (module, name)
        if key in self._known:
            return self._known[key]
        if len(self._known) >= _MAX_GLOBALS:
            raise FormatError(f"the pickle names more than {counted(_MAX_GLOBALS, 'class')} and functions")
        found = self._known[key] = self._stand_in(canonical_module(module), name)
        return found

    def _stand_in(self, module: str, name: str) -> Any:
        why = refusal(module, name)
        if why is not None:
            raise UnsafePickle(
                f"the pickle asks for {module}.{name}, which {why}; it was neither imported nor called",
                hint="do not open this file with pickle or torch.load(weights_only=False); get it from where you trust",
            )
        if module.partition(".")[0] == "torch":
            last = name.rpartition(".")[2]
            if last in self._classes:
                return self._classes[last]
            if module == "torch" and name in DTYPES:
                return DTYPES[name]
        container = _CONTAINERS.get((module, name))
        if container is not None:
            return container
        return constructor(module, name) or Global(module, name)

    def persistent_load(self, pid: Any, /) -> Any:
        """What stands for an object outside of the pickle: torch's storages are."""
        if isinstance(pid, tuple) and len(pid) == 4 and pid[0] == "module" and isinstance(pid[1], Global):
            return pid[1]  # the class of a module, which the stream before torch 1.6 writes with its file and source
        return storage_from_id(pid)

    def asking_offset(self) -> int:
        """The offset of the opcode that asked for the latest name: pickles have no jumps, so it is the n-th such."""
        import pickletools  # for messages alone

        asking = (
            offset
            for opcode, _, offset in pickletools.genops(self._data)
            if opcode.name in ("GLOBAL", "STACK_GLOBAL", "INST") and offset is not None
        )
        return next(islice(asking, self._n_asked - 1, None), 0)


def _on_deep_stack(load: Callable[[], Any], data: bytes) -> Any:
    """The result of ``load``, run where tuples nested as deep as ``data`` allows can be hashed."""
    n_tuples = sum(data.count(opcode) for opcode in (b"\x85", b"\x86", b"\x87", b"t"))
    if n_tuples <= _MAX_INLINE_TUPLES:
        return load()
    outcome: list[Any] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(load())
        except BaseException as error:  # noqa: BLE001 raised again by the caller's thread
            failure.append(error)

    wanted = _STACK_BYTES_PER_LEVEL * n_tuples + _SPARE_STACK_BYTES
    worker = _started(run, min(-(-wanted // _PAGE_BYTES) * _PAGE_BYTES, _MAX_STACK_BYTES))
    worker.join()
    if failure:
        raise failure[0]
    return outcome[0]


def _started(run: Callable[[], None], stack_bytes: int) -> threading.Thread:
    """A running thread with a stack of ``stack_bytes``, or of less where the system does not give so much."""
    with _stack_size_lock:
        before = threading.stack_size()
        try:
            while True:
                threading.stack_size(stack_bytes)
                worker = threading.Thread(target=run, name="unpickle", daemon=True)
                try:
                    worker.start()
                except RuntimeError:
                    if stack_bytes <= _SPARE_STACK_BYTES:
                        raise
                    stack_bytes = max(stack_bytes // 4 // _PAGE_BYTES * _PAGE_BYTES, _SPARE_STACK_BYTES)
                else:
                    return worker
        finally:
            threading.stack_size(before)
