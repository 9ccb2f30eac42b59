"""What can happen to the files of a checkpoint, and which findings then say so: tables, and the changes themselves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.api.convert.reshard import reshard
from ckpt_tool.api.digest import take_digests
from ckpt_tool.api.trust.verify import verify
from ckpt_tool.errors import CkptError
from ckpt_tool.manifest.digest import ContentDigest
from ckpt_tool.manifest.finding import Severity
from tests.hostile.fuzz import SMALL, checkpoint_in, placed

__all__ = [
    "DAMAGES", "EXPECTED", "FORMATS", "LIMITS", "MADE", "MORE", "TOLD", "UNKNOWABLE", "UNTOLD", "Outcome", "damaged",
    "outcome", "truth",
]  # fmt: skip

FORMATS = SMALL
MORE = (
    "deepspeed/accelerate_fsdp2", "megatron/dpr_vpp_p2", "megatron/legacy_t2p2", "megatron/old012_zarr_t2p1d1",
    "nanotron/tp2_pp2_dp3", "torch/pt_files/odd_zip.pt", "torch/pt_files/train_namespace_legacy.pt", "vescale/dp3",
    "zoo/consolidated_llama2", "zoo/flax_parts", "zoo/flax_pieces", "zoo/flax_state", "zoo/gguf_mixed",
    "zoo/gguf_split", "zoo/hdf5_odd", "zoo/keras_h5", "zoo/keras_v3", "zoo/keras_weights", "zoo/npz_deflated",
    "zoo/npz_plain", "zoo/ocdbt_raw", "zoo/orbax_default", "zoo/orbax_files", "zoo/torchsnapshot_files",
)  # fmt: skip
"""Fixtures of the other kinds: those in archives, larger ones, single files."""
MADE = {"deepspeed-universal": "deepspeed/ds_z1_fp32", "safetensors-ranks": "torch/hf_single"}
"""Formats that no fixture has, and what is converted, or whose file each rank gets."""
N_RANKS = 3
LIMITS = {"deepspeed-universal": 60, "megatron/old012_zarr_t2p1d1": 60, "nanotron/tp2_pp2_dp3": 60}
"""How many places of each kind of damage are tried in hundreds of like files."""


@dataclass(frozen=True)
class Outcome:
    """What a verification of every byte says."""

    error: str | None
    """Kind of the exception, where there is no report."""
    errors: frozenset[str]
    """Kinds of findings that are errors."""
    others: frozenset[str]

    @property
    def is_whole(self) -> bool:
        """Whether nothing is said to be wrong."""
        return self.error is None and not self.errors


def outcome(folder: Path) -> Outcome:
    """Of a verification."""
    try:
        report = verify(folder, level="full")
    except CkptError as error:
        return Outcome(type(error).__name__, frozenset(), frozenset())
    errors = {finding.kind for finding in report.findings if finding.severity is Severity.ERROR}
    others = {finding.kind for finding in report.findings} - errors
    return Outcome(None, frozenset(errors), frozenset(others))


def truth(folder: Path) -> dict[str, ContentDigest]:
    """Digests of what can be read."""
    with open_checkpoint(folder) as checkpoint:
        rows = range(len(checkpoint.manifest.tensors))
        taken = take_digests(checkpoint, list(rows), wide=False, files="none", memory_budget_bytes=1 << 26, n_workers=1)
    return taken.table.tensors


def payload_files(folder: Path) -> list[Path]:
    """Files that hold tensors."""
    if folder.is_file():
        return [folder]
    with open_checkpoint(folder) as checkpoint:
        root = Path(checkpoint.source.listing.url)
        paths = {entry.path if entry.part is None else entry.part.path for entry in checkpoint.manifest.files}
        held = {checkpoint.manifest.files.paths[row] for row in checkpoint.manifest.chunks.file.tolist()}
        parts = {e.path: e.part.path for e in checkpoint.manifest.files if e.part is not None}
        used = {parts.get(path, path) for path in held} & paths
    below = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return [path for path in below if str(path.relative_to(folder)) in used or str(path.relative_to(root)) in used]


def metadata_files(folder: Path) -> list[Path]:
    """Files that say what the others hold."""
    names = (".metadata", "metadata.pkl", ".index.json", "ckpt_layout.json")
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name.endswith(names)]


def _missing(folder: Path) -> Iterator[str]:
    for path in payload_files(folder):
        raw = path.read_bytes()
        path.unlink()
        yield path.name
        path.write_bytes(raw)


def _changed(
    folder: Path, change: Callable[[bytes], Iterator[bytes]], files: Callable[[Path], list[Path]]
) -> Iterator[str]:
    for path in files(folder):
        raw = path.read_bytes()
        for number, data in enumerate(change(raw)):
            if data != raw:
                path.write_bytes(data)
                yield f"{path.name} {number}"
        path.write_bytes(raw)


def _empty(folder: Path) -> Iterator[str]:
    yield from _changed(folder, lambda raw: iter([b""]), payload_files)


def _truncated(folder: Path) -> Iterator[str]:
    yield from _changed(folder, lambda raw: (raw[: len(raw) * k // 20] for k in range(20)), payload_files)


def _flips(raw: bytes, places: Iterator[int]) -> Iterator[bytes]:
    for at in places:
        yield raw[:at] + bytes([raw[at] ^ 0x10]) + raw[at + 1 :]


def _header(folder: Path) -> Iterator[str]:
    """A bit among the first bytes of each file."""
    yield from _changed(
        folder, lambda raw: _flips(raw, iter([k for k in (0, 2, 9, 30, 60) if k < len(raw)])), payload_files
    )


def _metadata(folder: Path) -> Iterator[str]:
    """A bit of the file that describes the others."""
    yield from _changed(
        folder, lambda raw: _flips(raw, iter(range(0, len(raw), max(len(raw) // 8, 1)))), metadata_files
    )


def _payload(folder: Path) -> Iterator[str]:
    """A bit of the first and the last tensor of each file."""
    with open_checkpoint(folder) as checkpoint:
        manifest = checkpoint.resolve()
        root = Path(checkpoint.source.listing.url)
        chunks = [manifest.chunks.record(row, manifest.tensors, manifest.files) for row in range(len(manifest.chunks))]
    by_file: dict[str, list[int]] = {}
    for chunk in chunks:
        if chunk.where.length and manifest.files.entries[manifest.files.index[chunk.where.path]].codec is None:
            by_file.setdefault(chunk.where.path, []).append(chunk.where.offset + chunk.where.length // 2)
    for name, places in by_file.items():
        path = root / name
        raw = path.read_bytes()
        for at in {min(places), max(places)}:
            path.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
            yield f"{name}:{at}"
        path.write_bytes(raw)


def _swapped(folder: Path) -> Iterator[str]:
    """Two files of tensors under each other's names."""
    files = [path for path in payload_files(folder) if path.parent == payload_files(folder)[0].parent]
    for first, second in pairwise(files):
        one, two = first.read_bytes(), second.read_bytes()
        if one != two and first.suffix == second.suffix:
            first.write_bytes(two)
            second.write_bytes(one)
            yield f"{first.name} and {second.name}"
            first.write_bytes(one)
            second.write_bytes(two)


def _doubled(folder: Path) -> Iterator[str]:
    """A stretch of a file is there twice, so that all behind it has moved."""
    yield from _changed(folder, lambda raw: iter([raw[: len(raw) // 2] + raw[len(raw) // 4 :]]), payload_files)


def _dropped(folder: Path) -> Iterator[str]:
    """A stretch of a file is not there, and all behind it has moved."""
    yield from _changed(folder, lambda raw: iter([raw[: len(raw) // 3] + raw[len(raw) // 2 :]]), payload_files)


def _longer(folder: Path) -> Iterator[str]:
    """Something else behind a file."""
    yield from _changed(folder, lambda raw: iter([raw + b"left by an earlier save " * 99]), payload_files)


def _stale(folder: Path) -> Iterator[str]:
    """An index that names other files than those that are here."""

    def renamed(raw: bytes) -> Iterator[bytes]:
        index = json.loads(raw)
        if "weight_map" in index:
            yield json.dumps({**index, "weight_map": {k: f"old-{v}" for k, v in index["weight_map"].items()}}).encode()

    def indexes(folder: Path) -> list[Path]:
        return [path for path in metadata_files(folder) if path.suffix == ".json"]

    yield from _changed(folder, renamed, indexes)


DAMAGES: dict[str, Callable[[Path], Iterator[str]]] = {
    "missing": _missing,
    "empty": _empty,
    "truncated": _truncated,
    "header": _header,
    "metadata": _metadata,
    "payload": _payload,
    "swapped": _swapped,
    "doubled": _doubled,
    "dropped": _dropped,
    "longer": _longer,
    "stale index": _stale,
}

# Of the errors that a damage brings, at least one is of these kinds, or the file is refused as a whole (an exception).
_REFUSED = {
    "unreadable-file",
    "item-mismatch",
    "checksum-unreadable",
    "container-damage",
    "damaged-object",
    "unreadable",
}
EXPECTED: dict[str, set[str]] = {
    "missing": {"missing-file", "gap", "missing-tensor", "absent-weight"},
    "empty": {"empty-file", "unreadable-file", "missing-chunk"},
    "truncated": {"truncated-file", "empty-file", "missing-chunk", *_REFUSED},
    "header": {"index-ghost-tensor", "crc-mismatch", "different-replicas", "mixed-steps", *_REFUSED},
    "metadata": {"missing-file", "index-ghost-tensor", "gap", "missing-metadata", "crc-mismatch", *_REFUSED},
    "payload": {"crc-mismatch", "different-replicas", "mixed-steps", "nan"},
    "swapped": {"wrong-rank", "mixed-steps", "index-wrong-file", "missing-tensor", "truncated-file", "gap", *_REFUSED},
    "doubled": {"nan", "crc-mismatch", "gap", "missing-tensor", *_REFUSED},
    "dropped": {"truncated-file", "gap", "nan", "missing-tensor", "crc-mismatch", *_REFUSED},
    "longer": {"missing-tensor", "gap", *_REFUSED},
    "stale index": {"stale-index"},
}
# These bring bytes that belong to nothing, which is to be told though every tensor may be what it was.
TOLD: dict[str, set[str]] = {
    "doubled": {"unowned-bytes", "container-odd"},
    "longer": {"unowned-bytes", "container-odd"},
}

_OLD_NODES = "nodes that no version refers to any more stay in the files of a database"
UNTOLD: dict[tuple[str, str], str] = {
    ("zoo/ocdbt_raw", "doubled"): _OLD_NODES,
    ("zoo/ocdbt_raw", "longer"): _OLD_NODES,
    ("zoo/orbax_default", "longer"): _OLD_NODES,
}
"""Bytes that belong to nothing where that is no damage, with the reason."""

# What nothing in these files can tell, with the reason.
UNKNOWABLE: dict[tuple[str, str], str] = {
    ("torch/hf_dcp_sharded", "missing"): "no file records global shapes; said by unproven-shape",
    ("torch_checkpointing/plain_odd", "missing"): "no file lists the items of a checkpoint of one rank",
    ("torch/dcp_old_t2.1.2", "swapped"): "items of one shape, and none knows its name",
    ("torch/dcp_no_collectives", "swapped"): "items of one shape, and none knows its name",
    ("deepspeed/ds_z1_fp32", "swapped"): "partitions of one size, and none knows its rank",
    ("deepspeed/ds_z3_sub", "swapped"): "partitions of one size, and none knows its rank",
    ("zoo/consolidated_llama2", "swapped"): "only their names number the parts",
    ("vescale/dp3", "doubled"): "items of one shape, and none knows its name; said by unowned-bytes",
    ("bytecheckpoint/ddp_2r", "missing"): "a rank's own objects; said by missing-file as a warning",
}


def damaged(name: str, base: Path) -> Path:
    """A copy of a fixture to be damaged, or one of ``MADE``."""
    if name == "safetensors-ranks":
        (base / name).mkdir(parents=True)
        (whole,) = payload_files(checkpoint_in(placed(MADE[name], base)))
        for rank in range(N_RANKS):
            shutil.copyfile(whole, base / name / f"rank{rank}.safetensors")
        (base / name / "config.json").write_text(json.dumps({"mapping": {"world_size": N_RANKS}}))
        return base / name
    if name in MADE:
        reshard(placed(MADE[name], base), base / name, to=name, durable=False)
        return base / name
    return checkpoint_in(placed(name, base))
