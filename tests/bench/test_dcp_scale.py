"""DCP metadata of 200,000 chunks: laid out, read, and resolved, each in a process of its own."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.measure import Figure, report

pytestmark = pytest.mark.bench

N_TENSORS = 25_000
N_RANKS = 8
PICKLE = "the pickle"

LAY_OUT = f"""
import json, resource, sys, time
import numpy as np
from ckpt_tool.dtypes import DTYPES
from ckpt_tool.formats.base import BoxTable, WriteRequest
from ckpt_tool.formats.dcp.writer import WRITER
from ckpt_tool.manifest.tables import TensorTable

n, ranks = {N_TENSORS}, {N_RANKS}
pattern = "optimizer.state.model.layers.%d.mlp.experts.%d.down_proj.weight.exp_avg"
fqns = tuple(pattern % (i // 12, i % 12) for i in range(n))
shape = np.array([(1024, 64 + i % 3 * 32) for i in range(n)], dtype=np.int64)
tensors = TensorTable(fqns, (DTYPES["float32"],) * n, shape, np.full(n, 2, np.int8), np.ones(n, np.int8))
offsets = np.zeros((n * ranks, 2), np.int64)
offsets[:, 0] = np.tile(np.arange(ranks) * (1024 // ranks), n)
sizes = np.repeat(shape, ranks, axis=0)
sizes[:, 0] = 1024 // ranks
tensor, rank = np.repeat(np.arange(n, dtype=np.int32), ranks), np.tile(np.arange(ranks, dtype=np.int32), n)
request = WriteRequest(tensors, BoxTable(tensor, offsets, sizes, rank), ranks)
started = time.process_time()
layout = WRITER.lay_out(request)
laid_out = time.process_time()
n_late = sum(1 for _ in layout.seal(np.zeros(n * ranks, np.uint32)))
sealed = time.process_time()
for segment in layout.segments[-2:]:
    open(sys.argv[1] + segment.path, "wb").write(segment.data)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
print(json.dumps({{"lay_out_s": laid_out - started, "seal_s": sealed - laid_out, "peak_mib": peak}}))
"""

READ = """
import json, resource, sys, time
from ckpt_tool.formats.base import Source
from ckpt_tool.formats.dcp.reader import READER
from ckpt_tool.storage.memory import MemoryStore
from ckpt_tool.storage.store import Listing

files = {name: open(sys.argv[1] + name, "rb").read() for name in sys.argv[2:]}
# Where the sidecar is looked at, so are the lengths of files: of the same lengths, and empty.
store = MemoryStore(files)
sizes = store.listing().sizes
if len(files) > 1:
    import pyarrow as pa

    stream = pa.BufferReader(files[".metadata.arrow"])
    pa.ipc.open_stream(stream).read_all()
    table = pa.ipc.open_stream(stream).read_all()
    sizes.update(zip(table["path"].to_pylist(), table["nbytes"].to_pylist()))
started = time.process_time()
manifest = READER.read(Source(store, Listing("memory:", sizes)))
read = time.process_time()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
figures = {"read_s": read - started, "peak_mib": peak, "n": len(manifest.chunks), "torch": "torch" in sys.modules}
print(json.dumps(figures))
"""


def measured(script: str, *argv: str) -> dict[str, float]:
    """What a script prints, run in a process of its own."""
    done = subprocess.run([sys.executable, "-c", script, *argv], check=True, capture_output=True, text=True)
    print(done.stdout.strip())
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def test_two_hundred_thousand_chunks(tmp_path: Path) -> None:
    """They are laid out within seconds, and read in 2 s of processor time and 500 MB, without torch (R26)."""
    path = str(tmp_path / "job")
    measured(LAY_OUT, path)
    rounds: dict[str, list[dict[str, float]]] = {PICKLE: [], "with its sidecar": []}
    for _ in range(3):
        rounds[PICKLE].append(measured(READ, path, ".metadata"))
        rounds["with its sidecar"].append(measured(READ, path, ".metadata", ".metadata.arrow"))
    figures = {
        name: Figure(
            name, min(f["read_s"] for f in found), statistics.median(f["read_s"] for f in found),
            max(f["read_s"] for f in found), max(f["peak_mib"] for f in found) * 1.048576,
        )
        for name, found in rounds.items()
    }  # fmt: skip
    report("dcp-metadata: 200,000 chunks, processor seconds", list(figures.values()), peer=PICKLE)
    assert all(f["n"] == N_TENSORS * N_RANKS and not f["torch"] for found in rounds.values() for f in found)
    assert figures[PICKLE].min_s <= 2
    assert figures[PICKLE].peak_mb <= 500
    assert figures["with its sidecar"].min_s <= figures[PICKLE].min_s / 3
