"""python -m tests.hostile.attacks FOLDER: files made to harm whoever opens them, each given to commands.

Runs in a process with little memory, watched; prints a line of JSON for each attack: what was said, and what it did.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import struct
import sys
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ckpt_tool.cli.app import main
from tests.formats.dcp.build import Checkpoint
from tests.hostile.fuzz import Watch, limit_memory, limited, look_up_the_c_library

MEMORY_BYTES = 3 << 29

Files = dict[str, bytes]


def torch_zip(data: bytes, storages: Files | None = None, others: Files | None = None) -> bytes:
    """A zip as torch.save writes one, around any ``data.pkl``."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("a/data.pkl", data)
        archive.writestr("a/byteorder", b"little")
        for key, content in (storages or {}).items():
            archive.writestr(f"a/data/{key}", content)
        archive.writestr("a/version", b"3\n")
        for name, content in (others or {}).items():
            archive.writestr(name, content)
    return out.getvalue()


def _text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def _global(module: str, name: str) -> bytes:
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n"


def _tensor(shape: tuple[int, ...], strides: tuple[int, ...], numel: int, offset: int = 0, key: str = "0") -> bytes:
    """The pickle of one float32 tensor."""
    persistent = b"(" + _text("storage") + _global("torch", "FloatStorage") + _text(key) + _text("cpu")
    persistent += pickle.dumps(numel, 2)[2:-1] + b"tQ"
    arguments = b"(" + persistent + pickle.dumps(offset, 2)[2:-1] + pickle.dumps(shape, 2)[2:-1]
    arguments += pickle.dumps(strides, 2)[2:-1] + b"\x89" + _global("collections", "OrderedDict") + b")R" + b"t"
    return b"\x80\x02" + _global("torch._utils", "_rebuild_tensor_v2") + arguments + b"R."


class _Shell:
    def __reduce__(self) -> Any:
        return os.system, ("touch ckpt-was-here",)


class _Eval:
    def __reduce__(self) -> Any:
        return eval, ("open('ckpt-was-here', 'w')",)


def _commands() -> Iterator[tuple[str, Files]]:
    """``__reduce__`` in every place that a checkpoint keeps a pickle, by every protocol."""
    for protocol in range(6):
        yield f"os.system, protocol {protocol}", {"a.pt": torch_zip(pickle.dumps({"w": _Shell()}, protocol))}
    magic = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2) + pickle.dumps({}, 2)
    yield "os.system, legacy", {"a.pt": magic + pickle.dumps(_Shell(), 2) + pickle.dumps([], 2)}
    yield "os.system, .metadata", {".metadata": pickle.dumps(_Shell(), 2), "__0_0.distcp": b"x"}
    yield "os.system, bare", {"a.pkl": pickle.dumps(_Shell(), 2)}
    yield (
        "os.system, index file",
        {
            "pytorch_model-00001-of-00001.bin": torch_zip(pickle.dumps(_Shell(), 2)),
            "pytorch_model.bin.index.json": b'{"weight_map": {"w": "pytorch_model-00001-of-00001.bin"}}',
        },
    )
    yield "os.system, rank file", {"model_world_size_1_rank_0.pt": torch_zip(pickle.dumps(_Shell(), 2))}
    yield "os.system, Megatron", {"iter_0000001/mp_rank_00/model_optim_rng.pt": torch_zip(pickle.dumps(_Shell(), 2))}
    yield "os.system, DeepSpeed", {"mp_rank_00_model_states.pt": torch_zip(pickle.dumps({"module": _Shell()}, 2))}
    yield "os.system, torch-checkpointing", {"metadata.pkl": pickle.dumps(_Shell(), 4), "model_0.pt": b"x"}
    yield "eval", {"a.pt": torch_zip(pickle.dumps(_Eval(), 4))}
    getattr_ = _global("__builtin__", "getattr")
    chain = getattr_ + _global("torch", "serialization") + _text("os") + b"\x86R"
    yield "getattr chain", {"a.pt": torch_zip(b"\x80\x02" + getattr_ + chain + _text("system") + b"\x86R.")}
    for name in ("_load_from_bytes", "_get_dtype_from_pickle_storage_type"):
        yield f"torch.storage.{name}", {"a.pt": torch_zip(b"\x80\x02" + _global("torch.storage", name) + b"(C\x01xtR.")}
    yield "INST", {"a.pt": torch_zip(b"(" + _text("true") + b"ios\nsystem\n.")}
    yield "OBJ", {"a.pt": torch_zip(b"\x80\x02(" + _global("os", "system") + _text("true") + b"o.")}
    slots = b"\x80\x02" + _global("torch", "nn.Module") + b")\x81" + b"(N}" + _text("__class__") + b"Ks\x86b."
    yield "BUILD with slots", {"a.pt": torch_zip(slots)}
    newobj = b"\x80\x04" + _global("subprocess", "Popen") + b")}" + b"\x92."
    yield "NEWOBJ_EX", {"a.pt": torch_zip(newobj)}
    yield "EXT1", {"a.pt": torch_zip(b"\x80\x02\x82\x01.")}
    yield "names of other types", {"a.pt": torch_zip(b"\x80\x04K\x01K\x02\x93.")}


# What runs code, reads or writes when it is called, directly or through what it returns.
CALLABLES = (
    ("posix", "system"), ("nt", "system"), ("os", "popen"), ("os", "execv"), ("os", "remove"), ("builtins", "exec"),
    ("builtins", "compile"), ("builtins", "__import__"), ("builtins", "open"), ("builtins", "getattr"),
    ("importlib", "import_module"), ("runpy", "run_path"), ("subprocess", "check_output"), ("types", "FunctionType"),
    ("types", "CodeType"), ("marshal", "loads"), ("ctypes", "CDLL"), ("webbrowser", "open"), ("pty", "spawn"),
    ("socket", "create_connection"), ("shutil", "rmtree"), ("pickle", "loads"), ("_pickle", "loads"), ("torch", "load"),
    ("torch.hub", "load"), ("operator", "attrgetter"), ("operator", "methodcaller"), ("functools", "partial"),
    ("code", "InteractiveInterpreter"), ("timeit", "timeit"), ("asyncio", "run"), ("multiprocessing", "Process"),
    ("torch.serialization", "os.system"), ("torch.utils.cpp_extension", "load_inline"), ("pip", "main"),
    ("sys", "modules"), ("pdb", "run"), ("doctest", "testfile"), ("builtins", "eval"), ("__builtin__", "apply"),
)  # fmt: skip


def _hidden() -> Iterator[tuple[str, Files]]:
    """Calls by every callable that is known for it, and one call in every place where a pickle can have one."""

    def named(module: str, name: str) -> bytes:
        return _short(module) + _short(name) + b"\x93"

    for module, name in CALLABLES:
        yield f"calls {module}.{name}", {"a.pt": torch_zip(b"\x80\x04" + named(module, name) + _text("x") + b"\x85R.")}
    call = named("os", "system") + _text("touch ckpt-was-here") + b"\x85R"
    ordered = _global("collections", "OrderedDict") + b")R"
    tensor = _tensor((2,), (1,), 2)[2:-1]
    storage = {"0": bytes(8)}
    places = {
        "a key": b"}(" + call + b"K\x01u.",
        "an item": b"](" + call + b"e.",
        "a set": b"\x8f(" + call + b"\x90.",
        "a frozen set": b"(" + call + b"\x91.",
        "a state": ordered + call + b"b.",
        "a state setter": named("os", "system") + ordered + b"}\x86R.",
        "arguments": _global("torch._utils", "_rebuild_tensor_v2") + b"(" + call + b"tR.",
        "a persistent id": b"(" + call + b"tQ.",
        "hooks": tensor[: tensor.rindex(b"ccollections")] + call + b"tR.",
        "what follows a tensor": b"}" + _text("w") + tensor + b"s" + _text("x") + call + b"s.",
        "a class": _global("torch._utils", "_rebuild_from_type_v2") + b"(" + call + call + b")" + b"NtR.",
        "the memo": call + b"\x940h\x00.",
        "what follows the end": b"}" + _text("w") + tensor + b"s." + call + b".",
        "a new object": _short("os") + _short("system") + b"\x93" + _text("true") + b"\x85\x81.",
    }
    for place, data in places.items():
        yield f"a call in {place}", {"a.pt": torch_zip(b"\x80\x04" + data, storage)}


def _short(value: str) -> bytes:
    raw = value.encode()
    return b"\x8c" + bytes([len(raw)]) + raw


def _resources() -> Iterator[tuple[str, Files]]:
    """Pickles that claim more than there is."""
    yield "memo bomb", {"a.pt": torch_zip(b"\x80\x02Nr\xff\xff\xff\x7f.")}
    yield "huge LONG4", {"a.pt": torch_zip(b"\x80\x02\x8b\xff\xff\xff\x7f\x01.")}
    yield "huge BINUNICODE8", {"a.pt": torch_zip(b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"x.")}
    yield "deep nesting", {"a.pt": torch_zip(b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b".")}
    laughs = b"]\x94" + b"".join(b"](h" + bytes([k]) * 1 + b"h" + bytes([k]) + b"e\x94" for k in range(200))
    yield "billion laughs", {"a.pt": torch_zip(b"\x80\x04" + laughs + b".")}
    yield "self-reference", {"a.pt": torch_zip(b"\x80\x02]q\x00h\x00a.")}
    yield "persistent id of text", {"a.pt": torch_zip(b"\x80\x02" + _text("../../etc/passwd") + b"Q.")}
    yield "persistent id by line", {"a.pt": torch_zip(b"P../../etc/passwd\n.")}
    yield (
        "persistent id, storage elsewhere",
        {"a.pt": torch_zip(_tensor((2,), (1,), 2, key="../../x"), {"0": bytes(8)})},
    )
    yield "tensor beyond its storage", {"a.pt": torch_zip(_tensor((1 << 40,), (1,), 2), {"0": bytes(8)})}
    yield "tensor of no storage", {"a.pt": torch_zip(_tensor((2,), (1,), 2), {})}
    yield "negative strides", {"a.pt": torch_zip(_tensor((2,), (-1,), 2), {"0": bytes(8)})}
    yield "negative sizes", {"a.pt": torch_zip(_tensor((-2,), (1,), 2), {"0": bytes(8)})}
    yield "expanded to 2**62", {"a.pt": torch_zip(_tensor((1 << 31, 1 << 31), (0, 0), 2), {"0": bytes(8)})}
    yield "storage of 2**62", {"a.pt": torch_zip(_tensor((2,), (1,), 1 << 62), {"0": bytes(8)})}


def _zips() -> Iterator[tuple[str, Files]]:
    plain = torch_zip(_tensor((2,), (1,), 2), {"0": bytes(8)})
    central = plain.index(b"PK\x01\x02")
    end = plain.rindex(b"PK\x05\x06")

    def patched(at: int, raw: bytes) -> bytes:
        return plain[:at] + raw + plain[at + len(raw) :]

    entries = [i for i in range(len(plain)) if plain[i : i + 4] == b"PK\x01\x02"]
    yield "overlapping members", {"a.pt": patched(entries[2] + 42, struct.pack("<I", 0))}
    yield "lying sizes", {"a.pt": patched(entries[2] + 20, struct.pack("<II", 1 << 31, 1 << 31))}
    yield "member count", {"a.pt": patched(end + 8, b"\xff\xff\xff\xff")}
    yield "zip64 without a record", {"a.pt": patched(entries[2] + 20, b"\xff" * 8)}
    saved = io.BytesIO()
    torch.save({"w": torch.zeros(2)}, saved)
    wide = bytearray(saved.getvalue())
    record = wide.rindex(b"PK\x06\x06")
    for name, at in (("members", 32), ("size", 40), ("offset", 48)):
        yield f"zip64 mismatch, {name}", {"a.pt": bytes(wide[: record + at]) + b"\x01" + bytes(wide[record + at + 1 :])}
    yield "zip64 record elsewhere", {"a.pt": bytes(wide).replace(b"PK\x06\x07\0\0\0\0", b"PK\x06\x07\0\0\0\0\x01")}
    yield "directory offset", {"a.pt": patched(end + 16, struct.pack("<I", central + 1))}
    twice = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(twice, "w") as archive:
        warnings.simplefilter("ignore")
        for data in (_tensor((2,), (1,), 2), pickle.dumps(_Shell(), 2)):
            archive.writestr("a/data.pkl", data)
        archive.writestr("a/data/0", bytes(8))
    yield "duplicate names", {"a.pt": twice.getvalue()}
    yield (
        "path traversal",
        {"a.pt": torch_zip(pickle.dumps({}, 2), others={"../../../tmp/x": b"1", "/etc/passwd": b"2"})},
    )
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        archive.writestr("a/data.pkl", _tensor((16 << 20,), (1,), 16 << 20))
        archive.writestr("a/data/0", bytes(64 << 20))
    yield "deflate bomb", {"a.pt": bomb.getvalue()}
    packed = zlib.compressobj(9, wbits=-15)
    raw = packed.compress(bytes(1 << 20)) + packed.flush()
    lying = io.BytesIO()
    with zipfile.ZipFile(lying, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", bytes(1 << 20))
    data = lying.getvalue()
    at = data.index(b"PK\x01\x02")
    yield "deflated to 2**32", {"a.pt": data[: at + 24] + struct.pack("<I", 0xFFFFFFF0) + data[at + 28 :]}
    yield "not deflate at all", {"a.pt": data.replace(raw[:64], bytes(64))}


def _headers() -> Iterator[tuple[str, Files]]:
    """Safetensors."""

    def file(header: bytes, payload: bytes = b"", length: int | None = None) -> Files:
        n = len(header) if length is None else length
        return {"m.safetensors": n.to_bytes(8, "little") + header + payload}

    def entry(name: str, low: int, high: int, shape: str = "[4]") -> bytes:
        return f'"{name}":{{"dtype":"U8","shape":{shape},"data_offsets":[{low},{high}]}}'.encode()

    yield "header of 2**63", file(b"{}", length=(1 << 63) - 1)
    yield "header of 2**64 - 1", file(b"{}", length=(1 << 64) - 1)
    yield "header of 100 MB that is not there", file(b"{}" + b" " * 50, length=100_000_000)
    yield "header of 100 MB", file(b'{"' + b"a" * 100_000_001 + b'":0}')
    yield "overlap", file(b"{" + entry("a", 0, 4) + b"," + entry("b", 2, 6) + b"}", bytes(6))
    yield "duplicate keys", file(b"{" + entry("a", 0, 4) + b"," + entry("a", 4, 8) + b"}", bytes(8))
    yield "negative", file(b"{" + entry("a", -4, 0) + b"}", bytes(4))
    yield "beyond the end", file(b"{" + entry("a", 0, 1 << 62, f"[{1 << 62}]") + b"}", bytes(4))
    yield "NaN", file(b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,4]}}', bytes(4))
    yield "infinite number", file(b'{"a":{"dtype":"U8","shape":[1e999],"data_offsets":[0,4]}}', bytes(4))
    yield "digits", file(b'{"a":{"dtype":"U8","shape":[' + b"9" * 50_000 + b'],"data_offsets":[0,4]}}', bytes(4))
    yield "nested JSON", file(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}")
    yield "product overflows", file(b"{" + entry("a", 0, 4, f"[{1 << 40},{1 << 40}]") + b"}", bytes(4))


def _paths() -> Iterator[tuple[str, Files]]:
    """Names of files that lead out of the folder; ``../secret`` is there."""
    good = b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
    shard = len(good).to_bytes(8, "little") + good + bytes(4)
    outside = {
        "parent": "../secret/m.safetensors",
        "absolute": "/etc/passwd",
        "in and out": "x/../../secret/m.safetensors",
    }
    for name, path in outside.items():
        index = json.dumps({"weight_map": {"a": path, "b": "m.safetensors"}}).encode()
        yield f"index, {name}", {"model.safetensors.index.json": index, "m.safetensors": shard}
    yield "link", {"m.safetensors": b"-> ../secret/m.safetensors", "config.json": b"{}"}
    yield "link to a folder", {"x": b"-> ../secret", "config.json": b"{}"}
    for name, path in (("parent", "../secret/m.safetensors"), ("absolute", "/etc/passwd")):
        yield f"DCP item, {name}", dcp_that_names(path)


def dcp_that_names(path: str) -> Files:
    """A DCP checkpoint of one tensor, whose metadata says that it lies in another file."""
    made = Checkpoint()
    made.tensor("w", [4], [(0, [0], torch.zeros(4))])
    files = dict(made.files())
    made.change(0, path=path)
    return {**files, ".metadata": made.metadata()}


ATTACKS: tuple[Callable[[], Iterator[tuple[str, Files]]], ...] = (
    _commands,
    _hidden,
    _resources,
    _zips,
    _headers,
    _paths,
)


def placed(folder: Path, files: Files) -> Path:
    """The attack on disk; what to give to a command."""
    folder.mkdir(parents=True)
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if data.startswith(b"-> "):
            path.symlink_to(data[3:].decode())
        else:
            path.write_bytes(data)
    return folder / next(iter(files)) if len(files) == 1 and "/" not in next(iter(files)) else folder


def attempt(target: Path, words: list[str], watch: Watch) -> dict[str, Any]:
    """One command: how it ended, what it said, what it did."""
    out, talk = io.StringIO(), io.StringIO()
    watch.seen.clear()
    status: int | str
    try:
        with limited(watch), contextlib.redirect_stdout(out), contextlib.redirect_stderr(talk):
            status = main([words[0], str(target), *words[1:]])
    except BaseException as error:  # noqa: BLE001 - that none gets out is what is tested
        status = repr(error)[:300]
    return {"status": status, "text": (out.getvalue() + talk.getvalue())[:2000], "ran": list(watch.seen)}


def run(base: Path) -> None:
    """All attacks."""
    look_up_the_c_library()
    watch = Watch()
    good = b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
    secret = base / "work/secret"
    secret.mkdir(parents=True)
    (secret / "m.safetensors").write_bytes(len(good).to_bytes(8, "little") + good + bytes(4))
    number = 0
    for group in ATTACKS:
        for name, files in group():
            number += 1
            target = placed(base / f"work/{number}", files)
            results = {
                " ".join(words[:2]): attempt(target, words, watch)
                for words in (["inspect"], ["verify", "--full"], ["verify", "--salvage", str(base / f"out{number}")])
            }
            print(json.dumps({"name": name, "results": results}))


if __name__ == "__main__":
    limit_memory(MEMORY_BYTES)
    os.environ["COLUMNS"] = "200"
    os.chdir(sys.argv[1])
    run(Path(sys.argv[1]))
