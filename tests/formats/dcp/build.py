"""DCP checkpoints made for tests: items by ``torch.save``, metadata record by record, so that each can be wrong."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ckpt_tool.formats._pickle.dump import dump_pickle
from ckpt_tool.formats._pickle.nodes import Global, Size, Stub
from ckpt_tool.formats.base import Source
from ckpt_tool.storage.memory import MemoryStore
from ckpt_tool.storage.store import ReadCost
from tests.storage.recording import RecordingStore

METADATA = "torch.distributed.checkpoint.metadata"
FILESYSTEM = "torch.distributed.checkpoint.filesystem"
NO_GAP = ReadCost(max_gap_bytes=-1, max_read_bytes=1 << 20, concurrency=1)
"""Nothing is read together."""


def record(name: str, state: Any, module: str = METADATA) -> Stub:
    """An object of torch's class ``name`` in that state."""
    made = Stub.__new__(Global(module, name))  # type: ignore[arg-type]  # its metaclass
    made.state = state
    return made


@dataclass(frozen=True)
class Item:
    """A chunk, or an object where ``offsets`` is None: its record of storage, and its box."""

    fqn: str
    offsets: Any
    sizes: Any
    path: Any
    offset: Any
    length: Any
    transforms: Any = None


@dataclass
class Checkpoint:
    """Files and records, put together by ``files``."""

    content: dict[str, bytearray] = field(default_factory=dict)
    items: list[Item] = field(default_factory=list)
    shapes: dict[str, Any] = field(default_factory=dict)
    dtypes: dict[str, Any] = field(default_factory=dict)
    planner_data: Any = None

    def tensor(self, fqn: str, shape: Sequence[int], chunks: Sequence[tuple[int, Sequence[int], torch.Tensor]]) -> None:
        """Add a tensor; a chunk is the rank that stores it, its offsets and its elements."""
        self.shapes[fqn] = Size(shape)
        for rank, offsets, elements in chunks:
            self.dtypes[fqn] = Global("torch", str(elements.dtype).removeprefix("torch."))
            self.stored(fqn, rank, Size(offsets), Size(elements.shape), saved(elements))

    def stored(self, fqn: str, rank: int, offsets: Any, sizes: Any, data: bytes) -> None:
        """Add an item of these bytes to the file of ``rank``."""
        path = f"__{rank}_0.distcp"
        content = self.content.setdefault(path, bytearray())
        self.items.append(Item(fqn, offsets, sizes, path, len(content), len(data)))
        content += data

    def change(self, number: int, **changes: Any) -> None:
        """Make one record of an item say something else."""
        self.items[number] = replace(self.items[number], **changes)

    def metadata(self, *, listed: Sequence[Item] | None = None) -> bytes:
        """The ``.metadata``; ``listed`` are the items that the state dict's records name, all by default."""
        layout = Global("torch.serialization", "_get_layout")("torch.strided")
        memory = Global(METADATA, "_MEM_FORMAT_ENCODING")(0)
        entries: dict[str, Any] = {}
        for item in self.items if listed is None else listed:
            if item.offsets is None:
                entries[item.fqn] = record("BytesStorageMetadata", None)
                continue
            properties = record("TensorProperties", (self.dtypes[item.fqn], layout, False, memory, False))
            empty = {"properties": properties, "size": self.shapes[item.fqn], "chunks": []}
            entry = entries.setdefault(item.fqn, record("TensorStorageMetadata", empty))
            entry.state["chunks"].append(record("ChunkStorageMetadata", {"offsets": item.offsets, "sizes": item.sizes}))
        storage = {}
        for item in self.items:
            index = {"fqn": item.fqn, "index": None, **({} if item.offsets is None else {"offset": item.offsets})}
            where = {"relative_path": item.path, "offset": item.offset, "length": item.length}
            where |= {} if item.transforms is None else {"transform_descriptors": item.transforms}
            storage[record("MetadataIndex", index)] = record("_StorageInfo", where, FILESYSTEM)
        state = {"state_dict_metadata": entries, "planner_data": self.planner_data, "storage_data": storage}
        return dump_pickle(record("Metadata", state), protocol=4)

    def files(self) -> dict[str, bytes]:
        """All files by path."""
        return {".metadata": self.metadata(), **{path: bytes(data) for path, data in self.content.items()}}


def saved(value: Any) -> bytes:
    """What ``torch.save`` writes into a stream."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def source(files: Mapping[str, bytes], cost: ReadCost = NO_GAP) -> Source:
    """A source over files in memory that records its requests."""
    store = RecordingStore(MemoryStore(files, cost=cost))
    return Source(store, store.listing())


def row_cut(fqn: str = "w", rows: Sequence[int] = (2, 2, 2), width: int = 3) -> Checkpoint:
    """One float32 tensor of counting numbers, cut along its rows, a rank for each part."""
    whole = torch.arange(sum(rows) * width, dtype=torch.float32).reshape(-1, width)
    made = Checkpoint()
    starts = [sum(rows[:i]) for i in range(len(rows))]
    parts = [
        (rank, (start, 0), whole[start : start + n]) for rank, (start, n) in enumerate(zip(starts, rows, strict=True))
    ]
    made.tensor(fqn, whole.shape, [(rank, start, part.clone()) for rank, start, part in parts])
    return made
