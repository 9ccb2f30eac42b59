"""Orbax and we read the same of what Orbax saved, and Orbax restores what was written here.

Trees of odd shapes, sharded over eight virtual devices; compressions that only zarr's own libraries write.

``CKPT_PEER_ORBAX`` names the python of an environment with orbax-checkpoint and jax (CPU); run with ``-m peer``.
"""

from __future__ import annotations

import os
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.api.convert.export import export
from ckpt_tool.api.convert.reshard import reshard
from ckpt_tool.api.trust.verify import verify
from tests.reports.made import as_bytes

pytestmark = pytest.mark.peer

JOB = """
import os, sys
os.environ["XLA_FLAGS"], os.environ["JAX_PLATFORMS"] = "--xla_force_host_platform_device_count=8", "cpu"
import jax, jax.numpy as jnp, numpy as np, orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
folder, seed, ocdbt, zarr3, chunk = sys.argv[1], *map(int, sys.argv[2:])
rng = np.random.default_rng(seed)
mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
specs = [P(), P("a"), P(None, "b"), P("b", "a"), P(("a", "b"))]
def leaf():
    ndim = int(rng.integers(0, 4))
    shape = tuple(int(n) * 8 for n in rng.integers(1, 4, ndim))
    dtype = ["float32", "bfloat16", "float16", "int8", "uint32", "bool", "float8_e4m3fn"][rng.integers(7)]
    spec = specs[rng.integers(len(specs))] if ndim > 1 else P()
    return jax.device_put(jnp.asarray(rng.standard_normal(shape) * 3).astype(dtype), NamedSharding(mesh, spec))
tree = {f"k{i}": {f"v.{j}": leaf() for j in range(4)} for i in range(5)}
args = ocp.args.PyTreeSave(tree, save_args=jax.tree.map(lambda x: ocp.SaveArgs(chunk_byte_size=chunk or None), tree))
with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=bool(ocdbt), use_zarr3=bool(zarr3))) as c:
    c.save(folder + "/1", args=args)
    found = c.restore(folder + "/1", args=ocp.args.PyTreeRestore(
        restore_args=jax.tree.map(lambda x: ocp.RestoreArgs(restore_type=np.ndarray), tree)))
flat = {f"{k}.{j}": np.asarray(v) for k, inner in found.items() for j, v in inner.items()}
raw = {fqn: np.frombuffer(array.tobytes(), np.uint8) for fqn, array in flat.items()}
np.savez(folder + "/truth.npz", **raw)
"""
CODINGS = """
import sys, numpy as np, tensorstore as ts
folder = sys.argv[1]
rng = np.random.default_rng(0)
small, wide = rng.integers(0, 9, (37, 50)).astype("int32"), rng.standard_normal((300, 257)).cumsum(0).astype("float32")
names = ("lz4", "lz4hc", "zlib", "zstd", "blosclz")
bloscs = [{"cname": n, "clevel": 5, "shuffle": s} for n in names for s in (0, 1, 2)]
two = [{"compressor": {"id": "blosc", "blocksize": 0, **b}} for b in bloscs]
two += [{"compressor": {"id": "bz2", "level": 5}}, {"order": "F"}, {"order": "F", "compressor": {"id": "zlib"}}]
names = ["noshuffle", "shuffle", "bitshuffle"]
three = [[{"name": "blosc", "configuration": {**b, "shuffle": names[b["shuffle"]]}}] for b in bloscs]
order = [{"name": "transpose", "configuration": {"order": [1, 0]}}, {"name": "bytes"}]
chains = [[{"name": "bytes"}, *c] for c in three] + [order, [*order, {"name": "gzip"}]]
inner = {"chunk_shape": [25, 20], "codecs": [{"name": "bytes"}, *three[4]]}
chains.append([{"name": "sharding_indexed", "configuration": inner}])
for number, settings in enumerate([*two, *chains]):
    driver = "zarr" if number < len(two) else "zarr3"
    more = settings if driver == "zarr" else {"codecs": settings}
    for name, array in (("small", small), ("wide", wide)):
        chunk = {"chunks": [50, 60]} if driver == "zarr" else {
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [50, 60]}}}
        path = f"{folder}/1/{name}{number}/"
        kind = {"kvstore": {"driver": "file", "path": path}, "driver": driver, "dtype": str(array.dtype)}
        found = ts.open({**kind, "metadata": {"shape": array.shape, **chunk, **more}, "create": True}).result()
        found.write(array).result()
np.savez(folder + "/truth.npz", small=small, wide=wide)
"""
RESTORE = """
import os, sys
os.environ["XLA_FLAGS"], os.environ["JAX_PLATFORMS"] = "--xla_force_host_platform_device_count=8", "cpu"
import jax, numpy as np, orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
folder = sys.argv[1]
def leaves(tree):
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {".".join(str(getattr(k, "key", getattr(k, "idx", None))) for k in path): leaf for path, leaf in flat}
mesh = Mesh(np.array(jax.devices()), ("x",))
def wanted(leaf):
    is_array = hasattr(leaf, "shape") and len(leaf.shape) and leaf.shape[0] % 8 == 0
    placed = NamedSharding(mesh, P("x") if is_array else P())
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed)
with ocp.StandardCheckpointer() as c:
    plain = c.restore(folder + "/run/5/default")
    arrays = {k: v for k, v in plain.items() if k == "params"}
    target = jax.tree.map(wanted, arrays)
with ocp.PyTreeCheckpointer() as c:
    how = ocp.checkpoint_utils.construct_restore_args(target)
    args = ocp.args.PyTreeRestore(target, restore_args=how, partial_restore=True)
    sharded = c.restore(folder + "/run/5/default", args=args)
with ocp.CheckpointManager(folder + "/run") as manager:
    assert manager.latest_step() == 5, manager.all_steps()
    managed = manager.restore(5, args=ocp.args.StandardRestore())
assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(sharded))
assert any(len(x.sharding.device_set) == 8 for x in jax.tree.leaves(sharded))
out = {}
for name, tree in (("plain", plain), ("sharded", sharded), ("managed", managed)):
    for key, value in leaves(tree).items():
        if not isinstance(value, str):
            out[f"{name}/{key}"] = np.frombuffer(np.asarray(value).tobytes(), np.uint8)
np.savez(folder + "/restored.npz", **out)
assert plain["opt"]["name"] == "adam" and plain["opt"]["groups"][1]["lr"] == 0.25, plain["opt"]
assert type(plain["opt"]["groups"]) is list and plain["opt"]["nothing"] is None
"""


def run_there(script: str, folder: Path, *arguments: object) -> None:
    """A script in the environment of Orbax."""
    (folder / "job.py").write_text(script, "utf-8")
    command = [os.environ["CKPT_PEER_ORBAX"], str(folder / "job.py"), str(folder), *map(str, arguments)]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]


@pytest.mark.parametrize("chunk_nbytes", [0, 256])
@pytest.mark.parametrize(("ocdbt", "zarr3"), [(0, 0), (1, 0), (1, 1)])
@pytest.mark.parametrize("seed", [1, 2])
def test_orbax_restores_the_same(seed: int, ocdbt: int, zarr3: int, chunk_nbytes: int, tmp_path: Path) -> None:
    """Every leaf, byte for byte; nothing is missing and nothing damaged."""
    run_there(JOB, tmp_path, seed, ocdbt, zarr3, chunk_nbytes)
    ours = as_bytes(tmp_path / "1")
    with np.load(tmp_path / "truth.npz") as truth:
        assert {fqn: data for fqn, (_, _, data) in ours.items()} == {fqn: truth[fqn].tobytes() for fqn in truth.files}
    assert verify(tmp_path / "1", level="full").is_ok
    with open_checkpoint(tmp_path / "1") as checkpoint:
        assert checkpoint.manifest.mesh is not None


def test_codings_of_tensorstore(tmp_path: Path) -> None:
    """Blosc with each of its shuffles, bz2, columns first; in zarr 2, in zarr 3, and inside of shards."""
    (tmp_path / "1").mkdir()
    run_there(CODINGS, tmp_path)
    ours = as_bytes(tmp_path / "1")
    with np.load(tmp_path / "truth.npz") as truth:
        whole = {name: truth[name].tobytes() for name in ("small", "wide")}
    assert len(ours) == 2 * (18 + 18)
    assert [fqn for fqn, (_, _, data) in ours.items() if data != whole[fqn.rstrip("0123456789")]] == []


@pytest.mark.parametrize("mesh", [None, "dp=4"])
def test_orbax_restores_what_was_written(mesh: str | None, tmp_path: Path) -> None:
    """As numpy arrays, as arrays of JAX over eight devices, and by its manager: every leaf, byte for byte."""
    kinds = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.float8_e4m3fn, torch.int32]
    values = torch.randint(0, 2, (len(kinds), 16, 6), generator=torch.Generator().manual_seed(0))
    state = {
        "params": {f"mlp/~/{kind}": {"w.0": values[row].to(kind)} for row, kind in enumerate(kinds)},
        "step": torch.tensor(7),
        "opt": {"name": "adam", "groups": [{"lr": 0.5}, {"lr": 0.25}], "nothing": None},
    }
    torch.save(state, tmp_path / "state.pt")
    target = tmp_path / "run/5/default"
    if mesh is None:
        export(tmp_path / "state.pt", target, to="orbax", everything=True, names="source", digest=None)
    else:
        reshard(tmp_path / "state.pt", target, to="orbax", mesh=mesh, default="shard0", digest=None)
    run_there(RESTORE, tmp_path)
    truth = {fqn: data for fqn, (_, _, data) in as_bytes(tmp_path / "state.pt").items()}
    parameters = {fqn: data for fqn, data in truth.items() if fqn.startswith("params.")}
    numbers = {f"opt.groups.{row}.lr": struct.pack("<d", lr) for row, lr in enumerate((0.5, 0.25))}
    with np.load(tmp_path / "restored.npz") as found:
        restored = {key: found[key].tobytes() for key in found.files}
    expected = {"plain": truth | numbers, "managed": truth | numbers, "sharded": parameters}
    assert restored == {f"{how}/{fqn}": data for how, held in expected.items() for fqn, data in held.items()}
