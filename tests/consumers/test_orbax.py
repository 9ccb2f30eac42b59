"""Orbax and we read the same of what Orbax saved: trees of odd shapes, sharded over eight virtual devices.

``CKPT_PEER_ORBAX`` names the python of an environment with orbax-checkpoint and jax (CPU); run with ``-m peer``.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from ckpt_tool.api.checkpoint import open_checkpoint
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


@pytest.mark.parametrize("chunk_nbytes", [0, 256])
@pytest.mark.parametrize(("ocdbt", "zarr3"), [(0, 0), (1, 0), (1, 1)])
@pytest.mark.parametrize("seed", [1, 2])
def test_orbax_restores_the_same(seed: int, ocdbt: int, zarr3: int, chunk_nbytes: int, tmp_path: Path) -> None:
    """Every leaf, byte for byte; nothing is missing and nothing damaged."""
    (tmp_path / "job.py").write_text(JOB, "utf-8")
    numbers = [str(number) for number in (seed, ocdbt, zarr3, chunk_nbytes)]
    command = [os.environ["CKPT_PEER_ORBAX"], str(tmp_path / "job.py"), str(tmp_path), *numbers]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    ours = as_bytes(tmp_path / "1")
    with np.load(tmp_path / "truth.npz") as truth:
        assert {fqn: data for fqn, (_, _, data) in ours.items()} == {fqn: truth[fqn].tobytes() for fqn in truth.files}
    assert verify(tmp_path / "1", level="full").is_ok
    with open_checkpoint(tmp_path / "1") as checkpoint:
        assert checkpoint.manifest.mesh is not None
