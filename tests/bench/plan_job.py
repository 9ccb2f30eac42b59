"""python plan_job.py WHAT ...: planning for one large job in a process of its own; prints one JSON line of figures.

    write MODEL FOLDER          a checkpoint of the job, its data files sparse: metadata, sidecar and lengths are real
    plan MODEL FOLDER           from that folder to another layout, through the product's path; sequential, one thread
    rank MODEL FOLDER           one rank's own share of the other layout, metadata read included
    dcp RANKS TENSORS           torch's planners on RANKS x TENSORS fully sharded boxes
    ours RANKS TENSORS          the same boxes through ours: places of all items, and the same metadata
    fsdp RANKS                  FSDP2 of 405B in bf16 on RANKS, to half of them

Seconds are processor seconds; making the job's own boxes and importing this package belong to no figure.
"""

from __future__ import annotations

import json
import pickle
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ckpt_tool.api.checkpoint import open_checkpoint, plan_limits
from ckpt_tool.formats._dcp.placed_items import GrowingFiles, place_boxes, written_tensors
from ckpt_tool.formats.base import BoxTable, WriteRequest
from ckpt_tool.formats.dcp.metadata_pickle import metadata_pickle
from ckpt_tool.formats.dcp.writer import WRITER
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.plan.build import make_plan
from ckpt_tool.plan.model import Plan
from tests.bench.layouts import Job, fsdp_job, llama_405b, megatron_job, moe_2t

MEMORY = 1 << 30


def jobs(model: str) -> tuple[Job, Job]:
    """Source and target of one comparison."""
    if model == "405b":
        llama = llama_405b()
        return megatron_job(llama, tp=8, pp=16, dp=70), megatron_job(llama, tp=4, pp=32, dp=70)
    moe = moe_2t()
    return (
        megatron_job(moe, tp=4, pp=26, dp=960, ep=64),
        megatron_job(moe, tp=8, pp=13, dp=960, ep=32),
    )


def laid_out(job: Job) -> Manifest:
    """Every byte's place in a DCP checkpoint of the job."""
    return WRITER.lay_out(WriteRequest(job.tensors, job.boxes, job.world_size)).manifest


def planned(source: Manifest, target: Manifest) -> Plan:
    """The plan that ``ckpt plan`` makes."""
    limits = plan_limits(MEMORY, 2, int(source.tensors.nbytes.sum()))
    return make_plan(source, target.replace(root="memory://plan"), limits=limits)


def balance(load: np.ndarray[Any, Any]) -> float:
    """The largest share against the mean."""
    return float(load.max() / load.mean())


def write(model: str, folder: str) -> dict[str, Any]:
    """Metadata, sidecar, and files that have their length and nothing in them."""
    source, _ = jobs(model)
    root = Path(folder)
    root.mkdir(parents=True)
    started = time.process_time()
    layout = WRITER.lay_out(WriteRequest(source.tensors, source.boxes, source.world_size))
    seconds = time.process_time() - started
    for entry in layout.manifest.files:
        with (root / entry.path).open("wb") as file:
            file.truncate(entry.nbytes)
    for segment in layout.segments:
        if segment.path.startswith(".metadata"):
            (root / segment.path).write_bytes(segment.data)
    nbytes = {name: (root / name).stat().st_size for name in (".metadata", ".metadata.arrow")}
    return {"lay_out_s": seconds, "n_chunks": len(source.boxes), "n_ranks": source.world_size, **nbytes}


def plan(model: str, folder: str) -> dict[str, Any]:
    """Everything between a folder and a plan."""
    _, target = jobs(model)
    started = time.process_time()
    with open_checkpoint(folder, memory_budget_bytes=MEMORY) as checkpoint:
        source = checkpoint.resolve()
    read = time.process_time()
    other = laid_out(target)
    placed = time.process_time()
    made = planned(source, other)
    done = time.process_time()
    unit_of_tile = np.repeat(np.arange(made.tiles.n_units), np.diff(made.tiles.unit_bounds))
    tile_nbytes = made.tiles.nbytes.astype(np.float64)
    share = np.bincount(unit_of_tile * 64 // made.tiles.n_units, weights=tile_nbytes, minlength=64)
    return {
        "read_s": read - started, "lay_out_s": placed - read, "plan_s": done - placed, "all_s": done - started,
        "n_chunks": len(source.chunks) + len(other.chunks), "n_tiles": len(made.tiles), "n_reads": len(made.reads),
        "n_writes": len(made.writes), "read_per_needed": made.stats.read_nbytes / made.stats.needed_nbytes,
        "balance_of_64": balance(share),
    }  # fmt: skip


def rank(model: str, folder: str) -> dict[str, Any]:
    """Boxes of one rank in the middle, from the folder to byte ranges."""
    _, target = jobs(model)
    boxes = target.boxes
    own = np.flatnonzero(boxes.rank == target.world_size // 2 + 1)
    names = np.unique(boxes.tensor[own]).astype(np.int64)
    row = np.searchsorted(names, boxes.tensor[own]).astype(np.int32)
    tensors = target.tensors.take(names)
    width = tensors.shape.shape[1]
    mine = BoxTable(row, boxes.offsets[own][:, :width], boxes.sizes[own][:, :width], np.zeros(len(own), np.int32))
    started = time.process_time()
    with open_checkpoint(folder, memory_budget_bytes=MEMORY) as checkpoint:
        source = checkpoint.resolve()
    read = time.process_time()
    made = planned(source, laid_out(Job(tensors, mine, 1)))
    done = time.process_time()
    return {"read_s": read - started, "all_s": done - started, "n_boxes": len(own), "n_reads": len(made.reads)}


def ours(n_ranks: str, n_tensors: str) -> dict[str, Any]:
    """What the peer's coordinator makes, for the same boxes: everyone's places, and the metadata."""
    ranks, tensors = int(n_ranks), int(n_tensors)
    job = _rows(tensors, 4 * ranks, ranks)
    names = [(fqn, tuple(fqn.split("."))) for fqn in job.tensors.fqns]
    started = time.process_time()
    placed = place_boxes(job.tensors, job.boxes, GrowingFiles(), lambda rank: f"__{rank}_0.distcp")
    written, chunks = written_tensors(job.tensors, job.boxes, placed, names)
    data = metadata_pickle(written, chunks, [], save_id="").finished()
    return {"all_s": time.process_time() - started, "metadata_mb": len(data) / 1e6}


def _rows(n_tensors: int, n_rows: int, n_ranks: int) -> Job:
    from ckpt_tool.dtypes import DTYPES
    from ckpt_tool.manifest.tables import TensorTable

    table = TensorTable(
        fqns=tuple(f"model.layers.{i}.w" for i in range(n_tensors)),
        dtypes=(DTYPES["bfloat16"],) * n_tensors,
        shape=np.tile(np.array([[n_rows, 8]]), (n_tensors, 1)),
        ndim=np.full(n_tensors, 2, dtype=np.int8),
        section=np.zeros(n_tensors, dtype=np.int8),
    )
    tensor = np.repeat(np.arange(n_tensors, dtype=np.int32), n_ranks)
    rank = np.tile(np.arange(n_ranks, dtype=np.int32), n_tensors)
    per_rank = n_rows // n_ranks
    offsets = np.column_stack([rank.astype(np.int64) * per_rank, np.zeros(len(rank), dtype=np.int64)])
    sizes = np.tile(np.array([[per_rank, 8]]), (len(rank), 1))
    return Job(table, BoxTable(tensor, offsets, sizes, rank), n_ranks)


def dcp(n_ranks: str, n_tensors: str) -> dict[str, Any]:
    """What torch's coordinator does: takes pickled plans, makes the global one, pickles it and the metadata."""
    import torch
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    ranks, tensors = int(n_ranks), int(n_tensors)
    properties, shape = TensorProperties(dtype=torch.bfloat16), torch.Size((4 * ranks, 8))
    blobs = []
    for number in range(ranks):
        offset = torch.Size((4 * number, 0))
        chunk = ChunkStorageMetadata(offset, torch.Size((4, 8)))
        names = [f"model.layers.{i}.w" for i in range(tensors)]
        items = [
            WriteItem(
                MetadataIndex(name, offset, 0), WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=shape),
            )
            for name in names
        ]  # fmt: skip
        blobs.append(pickle.dumps(SavePlan(items, planner_data={name: tuple(name.split(".")) for name in names})))
    started = time.process_time()
    plans = [pickle.loads(blob) for blob in blobs]
    global_plan, metadata = DefaultSavePlanner().create_global_plan(plans)
    pickle.dumps(global_plan)
    # As FileSystemWriter.finish does, with what the ranks report of each item.
    metadata.storage_data = {
        item.index: _StorageInfo(f"__{number}_0.distcp", 0, 64)
        for number, one in enumerate(global_plan)
        for item in one.items
    }
    data = pickle.dumps(metadata)
    return {"all_s": time.process_time() - started, "metadata_mb": len(data) / 1e6}


def fsdp(n_ranks: str) -> dict[str, Any]:
    """Chunks grow with ranks; seconds should as they do."""
    model = llama_405b()
    source, target = (fsdp_job(model, world_size=count) for count in (int(n_ranks), int(n_ranks) // 2))
    started = time.process_time()
    before, after = laid_out(source), laid_out(target)
    made = planned(before, after)
    n_chunks = len(before.chunks) + len(after.chunks)
    return {"all_s": time.process_time() - started, "n_chunks": n_chunks, "n_reads": len(made.reads)}


COMMANDS: dict[str, Callable[..., dict[str, Any]]] = {
    "write": write,
    "plan": plan,
    "rank": rank,
    "ours": ours,
    "dcp": dcp,
    "fsdp": fsdp,
}

if __name__ == "__main__":
    figures = COMMANDS[sys.argv[1]](*sys.argv[2:])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    print(json.dumps({**figures, "peak_mb": peak}))
