"""Pickles made to do harm: each is refused with one of the package's errors, and nothing of it runs."""

from __future__ import annotations

import gc
import os
import pickle
import struct
import sys
from typing import Any

import pytest

from ckpt_tool.dtypes import DTYPES
from ckpt_tool.errors import CkptError, FormatError, UnsafePickle, UsageError
from ckpt_tool.formats._pickle.load import load_pickle, load_prefix
from ckpt_tool.formats._pickle.nodes import Fields, Global, OrderedMap, Size, Stub
from ckpt_tool.formats._pickle.policy import refusal
from ckpt_tool.formats._pickle.scan import pickle_end
from ckpt_tool.formats._pickle.walk import leaves, plain


class _Calls:
    """Pickles as a call of ``function(*args)``."""

    def __init__(self, function: Any, *args: Any) -> None:
        self._reduced = (function, args)

    def __reduce__(self) -> Any:
        return self._reduced


def _unicode(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def _load(body: bytes, protocol: int = 4) -> Any:
    return load_pickle(b"\x80" + bytes([protocol]) + body + b".", where="x.pt")


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_os_system_is_refused_with_the_byte_that_asks(protocol: int) -> None:
    """A REDUCE of os.system names the offset of the opcode that asks for it, and leaves no trace."""
    data = pickle.dumps({"a": 1, "b": _Calls(os.system, "touch /tmp/owned")}, protocol=protocol)
    with pytest.raises(UnsafePickle) as caught:
        load_pickle(data, where="x.pt")
    place, _, offset = str(caught.value.where).partition(":")
    assert place == "x.pt"
    assert data[int(offset) : int(offset) + 1] in (b"c", b"\x93")
    assert "posix.system" in str(caught.value)


def test_a_name_put_together_from_the_memo_is_refused() -> None:
    """STACK_GLOBAL takes its strings from the memo; the offset is that of STACK_GLOBAL."""
    body = _unicode("system") + b"\x94" + _unicode("os") + b"\x94" + b"0" + b"0" + b"h\x01h\x00\x93" + b"."
    data = b"\x80\x04" + body
    with pytest.raises(UnsafePickle) as caught:
        load_pickle(data, where="x.pt")
    assert caught.value.where == f"x.pt:{data.index(0x93)}"


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("nt", "system"),
        ("subprocess", "Popen"),
        ("builtins", "eval"),
        ("__builtin__", "eval"),
        ("builtins", "__import__"),
        ("importlib", "import_module"),
        ("runpy", "run_path"),
        ("torch.hub", "load"),
        ("torch", "load"),
        ("numpy.testing._private.utils", "runstring"),
        ("asyncio.subprocess", "create_subprocess_shell"),
        ("multiprocessing.util", "spawnv_passfds"),
        ("pip._internal", "main"),
        ("torch.serialization", "os.system"),
        ("torch.utils.data", "sys.modules"),
        ("torch", "Tensor.__class__"),
        ("collections", "OrderedDict.__init__.__globals__"),
        ("operator", "attrgetter"),
        ("_pickle", "loads"),
        ("torch.storage", "_load_from_bytes"),
    ],
)
def test_dangerous_names_are_refused(module: str, name: str) -> None:
    """Names that run code or reach into the interpreter are refused, directly or through another module."""
    with pytest.raises(UnsafePickle, match="neither imported nor called"):
        _load(_unicode(module) + _unicode(name) + b"\x93")


@pytest.mark.parametrize(
    "qualified", ["megatron.core.enums.ModelType", "torch._utils._rebuild_tensor_v2", "code.gpt.Config"]
)
def test_unknown_names_are_not_refused(qualified: str) -> None:
    """A class that is merely unknown is no threat."""
    module, _, name = qualified.rpartition(".")
    assert refusal(module, name) is None


def test_getattr_chains_are_followed_by_name_only() -> None:
    """Getattr joins names; a chain to the interpreter is refused at the place that started it."""
    getattr_ = _unicode("builtins") + _unicode("getattr") + b"\x93"
    inner = _unicode("some.module") + _unicode("Outer") + b"\x93"
    nested = _load(getattr_ + inner + _unicode("Inner") + b"\x86R")
    assert nested == Global("some.module", "Outer.Inner")
    with pytest.raises(UnsafePickle, match="__globals__"):
        _load(getattr_ + inner + _unicode("__globals__") + b"\x86R")
    step = getattr_ + inner + _unicode("os") + b"\x86R"
    with pytest.raises(UnsafePickle, match=r"os\.system"):
        _load(getattr_ + step + _unicode("system") + b"\x86R")


def test_unknown_classes_are_neither_imported_nor_made() -> None:
    """A stdlib module that nothing has imported stays unimported, and its object is a stub."""
    sys.modules.pop("this", None)
    made = _load(_unicode("this") + _unicode("Zen") + b"\x93" + _unicode("arg") + b"\x85R")
    assert isinstance(made, Stub)
    assert (made.cls.qualified, made.args, "this" in sys.modules) == ("this.Zen", ("arg",), False)


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02Nr\xff\xff\xff\x7f.",
        b"\x80\x02Np2147483647\n.",
        b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"x.",
        b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"x.",
        b"\x80\x04\x96" + struct.pack("<Q", (1 << 64) - 1) + b".",
        b"\x80\x02X\xff\xff\xff\xffab.",
        b"\x80\x02\x8b" + struct.pack("<I", 1 << 20) + b"\x01" * (1 << 20) + b".",
        b"\x80\x02I" + b"9" * 100_000 + b"\n.",
        b"\x80\x02\x82\x01.",
        b"\x80\x02N",
        b"\x80\x02",
        b"",
        b"\x80\x02K",
        b"\x80\x02\xff.",
        b"<!DOCTYPE html>",
        b"version https://git-lfs.github.com/spec/v1\n",
    ],
)
def test_absurd_claims_are_refused_before_anything_is_allocated(data: bytes) -> None:
    """Memo bombs, huge lengths and numbers, missing ends and unknown opcodes name the file and a byte."""
    with pytest.raises(FormatError) as caught:
        load_pickle(data, where="x.pt")
    place, _, offset = str(caught.value.where).partition(":")
    assert place == "x.pt"
    assert 0 <= int(offset) <= len(data)


def test_every_truncation_of_a_pickle_is_refused() -> None:
    """A cut pickle has no STOP."""
    data = pickle.dumps([{"a": (1, 2.5, "x" * 300)}, b"bytes", 2**80, frozenset({1})], protocol=4)
    for length in range(len(data)):
        with pytest.raises(FormatError):
            load_pickle(data[:length], where="x.pt")


def test_bytes_behind_the_pickle_are_refused_and_prefixes_say_what_they_used() -> None:
    """A whole file is one pickle; consecutive pickles are read one by one."""
    first, second = pickle.dumps([1], protocol=2), pickle.dumps({"k": 2}, protocol=4)
    with pytest.raises(FormatError, match="1 byte follows the pickle"):
        load_pickle(first + b"x", where="x.pt")
    assert load_prefix(first + second, where="x.pt") == ([1], len(first))
    assert load_prefix(first + second, where="x.pt", start=len(first)) == ({"k": 2}, len(second))


@pytest.mark.parametrize(
    "body",
    [
        b"]" * 100_000 + b"a" * 99_999,
        b"}" + b"K\x01}" * 100_000 + b"s" * 100_000,
        b")" + b"\x85" * 1_000_000,
        _unicode("m") + _unicode("C") + b"\x93\x94" + b"h\x00" * 50_000 + b")R" + b"\x85R" * 49_999,
    ],
)
def test_deep_nesting_does_not_crash(body: bytes) -> None:
    """Lists, dicts, tuples, keys and objects nested 50,000 deep and more are loaded, walked and previewed."""
    value = _load(body)
    assert plain(value) is not None
    with pytest.raises(FormatError, match="levels deep"):
        for _ in leaves(value):
            pass


def test_hashing_deep_tuples_does_not_crash() -> None:
    """A tuple nested a million deep is hashed as a key, on a stack that holds it."""
    value = _load(b"})" + b"\x85" * 1_000_000 + b"K\x01s")
    assert list(value.values()) == [1]
    assert plain(value) == {"(...)": 1}


def test_billion_laughs_are_not_spelled_out() -> None:
    """Parts that contain each other forty levels deep end at the stated number of values."""
    body = b"]\x94" + b"".join(b"](h" + bytes([k]) + b"h" + bytes([k]) + b"e\x94" for k in range(100))
    value = _load(body[: body.rindex(b"\x94")].replace(b"e\x94](", b"e\x94]("))
    with pytest.raises(FormatError, match="spells out more than 10,000 values"):
        for _ in leaves(value, max_values=10_000):
            pass
    assert plain(value, max_values=1_000) is not None


def test_a_pickle_cannot_alter_what_is_shared() -> None:
    """BUILD reaches neither the dtype table, nor our classes, nor a record that was checked."""
    before = dict(DTYPES)
    float32 = _unicode("torch") + _unicode("float32") + b"\x93"
    for state in (
        b"](K\x01K\x02K\x03e",
        b"}" + _unicode("bits") + b"K\x01s",
        b"N}" + _unicode("bits") + b"K\x01s\x86",
    ):
        with pytest.raises(FormatError):
            _load(float32 + state + b"b")
    assert before == DTYPES
    for module, name, shared in (("collections", "OrderedDict", OrderedMap), ("torch", "Size", Size)):
        attributes = dict(vars(shared))
        with pytest.raises(FormatError):
            _load(_unicode(module) + _unicode(name) + b"\x93" + b"N}" + _unicode("items") + b"K\x01s\x86b")
        assert dict(vars(shared)) == attributes
    with pytest.raises(FormatError):
        _load(_unicode("m") + _unicode("C") + b"\x93" + b"N}" + _unicode("args") + b"K\x01s\x86b")


def test_a_map_keeps_its_methods() -> None:
    """Attributes set on an OrderedDict are kept apart from it."""
    ordered = _unicode("collections") + _unicode("OrderedDict") + b"\x93)R"
    value = _load(ordered + _unicode("k") + b"K\x05s" + b"}" + _unicode("items") + b"K\x01sb")
    assert list(value.items()) == [("k", 5)]
    assert value.attributes == {"items": 1}


def _tensor(numel: int, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    stub = Global("torch._utils", "_rebuild_tensor_v2")
    from ckpt_tool.dtypes import DTYPES as TYPES
    from ckpt_tool.formats._pickle.dump import dump_pickle
    from ckpt_tool.formats._pickle.tensors import StorageRef

    storage = StorageRef(TYPES["float32"], "0", "cpu", numel)
    return dump_pickle(stub(storage, offset, shape, strides, False, OrderedMap()))


@pytest.mark.parametrize(
    ("numel", "offset", "shape", "strides"),
    [
        (6, 1, (2, 3), (3, 1)),
        (6, 0, (2, 3), (4, 1)),
        (6, -1, (2,), (1,)),
        (6, 0, (-1,), (1,)),
        (6, 0, (2, 3), (1,)),
        (6, 0, (1 << 70,), (1,)),
    ],
)
def test_tensors_beyond_their_storage_are_refused(
    numel: int, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    """An element outside of the storage would be read from a neighbour's bytes."""
    with pytest.raises(FormatError):
        load_pickle(_tensor(numel, offset, shape, strides), where="x.pt")


def test_numpy_arrays_with_lying_sizes_are_refused() -> None:
    """Shape, dtype and bytes of an array must agree."""
    from ckpt_tool.formats._pickle.dump import dump_pickle
    from ckpt_tool.formats._pickle.numpy_values import NumpyDType

    for shape, code, raw in (
        ((3,), "f4", b"\0" * 8),
        ((-1,), "f4", b"\0" * 4),
        ((1 << 61, 8), "f8", b""),
        ((2,), "O", b"ab"),
    ):
        made = Global("numpy._core.multiarray", "_reconstruct")(Global("numpy", "ndarray"), (0,), b"b")
        made.state = (1, shape, NumpyDType(code), False, raw)
        with pytest.raises(CkptError):
            load_pickle(dump_pickle(made), where="x.pt")


@pytest.mark.parametrize("inner", ["f4", 3])
def test_numpy_arrays_of_arrays_are_refused(inner: Any) -> None:
    """Only a field can be an array; an array of such elements is nothing that numpy makes."""
    from ckpt_tool.formats._pickle.dump import dump_pickle
    from ckpt_tool.formats._pickle.numpy_values import NumpyDType

    described = NumpyDType("V8")
    described.state = (3, "|", (NumpyDType(inner) if isinstance(inner, str) else inner, (2,)), None, None, 8, 4, 0)
    made = Global("numpy._core.multiarray", "_reconstruct")(Global("numpy", "ndarray"), (0,), b"b")
    made.state = (1, (1,), described, False, b"\0" * 8)
    with pytest.raises(CkptError, match=r"elements that are arrays|lacks the dtype of their elements"):
        load_pickle(dump_pickle(made), where="x.pt")


def test_garbage_collection_is_restored() -> None:
    """Also after a failure."""
    assert gc.isenabled()
    with pytest.raises(FormatError):
        _load(b"K\x01K\x02s")
    assert gc.isenabled()


def test_caller_classes_stand_for_torchs_own_only() -> None:
    """Classes are matched by last name below torch; the C unpickler sets their state."""
    torch_own = _unicode("torch.distributed.checkpoint.metadata") + _unicode("ChunkStorageMetadata") + b"\x93"
    others = _unicode("evil.metadata") + _unicode("ChunkStorageMetadata") + b"\x93"
    body = b"(" + torch_own + b")\x81}" + _unicode("sizes") + b"K\x01sb" + others + b")\x81t"
    ours, theirs = load_pickle(b"\x80\x04" + body + b".", where="m", classes={"ChunkStorageMetadata": Fields})
    assert (type(ours), ours[0], type(theirs.cls)) == (Fields, {"sizes": 1}, Global)
    with pytest.raises(UsageError, match="has no __setstate__"):
        load_pickle(b"\x80\x04N.", where="m", classes={"ChunkStorageMetadata": _Calls})


def test_the_scan_agrees_with_pickle_on_every_protocol() -> None:
    """The end found by scanning is the end of the pickle."""
    value = [
        1,
        2.5,
        "a" * 300,
        b"b" * 10,
        {"k": (1, 2, 3, 2**70)},
        None,
        True,
        list(range(1000)),
        {1},
        bytearray(b"x"),
    ] * 3
    for protocol in range(6):
        data = pickle.dumps(value, protocol=protocol)
        assert pickle_end(data + b"more", where="x") == len(data)
