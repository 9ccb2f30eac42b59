"""GGUF, written: read back here, and by the package of llama.cpp's own converter."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.api.convert.export import export
from ckpt_tool.api.trust.verify import verify
from ckpt_tool.dtypes import DTYPES
from ckpt_tool.errors import LayoutError, Unsupported, UsageError
from ckpt_tool.formats.gguf.writer import WRITER
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.model import Blob
from tests.formats.conformance import FIXTURES
from tests.formats.torch_save.laid_out import request_of
from tests.formats.zoo import CHECKPOINTS
from tests.reports.made import as_bytes

KINDS = ["float64", "float32", "float16", "bfloat16", "int8", "int16", "int32", "int64"]


@pytest.mark.parametrize("name", ["gguf_mixed", "gguf_split", "gguf_big"])
def test_one_file_of_what_gguf_wrote(name: str, tmp_path: Path) -> None:
    """Plain and quantised tensors, parts of a split, big-endian ones: the same bytes and the same pairs."""
    source = CHECKPOINTS / name / "ckpt"
    export(source, tmp_path / "m.gguf", everything=True, names="source", durable=False)
    assert as_bytes(tmp_path / "m.gguf") == as_bytes(source)
    assert verify(tmp_path / "m.gguf", level="full").is_ok
    with open_checkpoint(source) as one, open_checkpoint(tmp_path / "m.gguf") as other:
        said = {k: v for k, v in one.manifest.info["metadata"].items() if not k.startswith("split.")}
        assert other.manifest.info["metadata"] == said
        assert other.objects() == one.objects()


def test_every_plain_type(tmp_path: Path) -> None:
    """Matrices, vectors, single elements and empty tensors, each at a multiple of 32 bytes."""
    shapes = {"matrix": (3, 5), "vector": (7,), "scalar": (), "empty": (0, 4), "four": (2, 1, 3, 2)}
    state = {f"{kind}.{name}": torch.arange(int(np.prod(shape))).reshape(shape).to(getattr(torch, kind))
             for kind in KINDS for name, shape in shapes.items()}  # fmt: skip
    torch.save(state, tmp_path / "state.pt")
    export(tmp_path / "state.pt", tmp_path / "m.gguf", names="source", durable=False)  # the name tells the format
    assert as_bytes(tmp_path / "m.gguf") == as_bytes(tmp_path / "state.pt")
    with open_checkpoint(tmp_path / "m.gguf") as found:
        assert not (found.manifest.chunks.offset % 32).any()
        assert found.manifest.info["metadata"] == {"general.architecture": "unknown"}


def test_what_it_cannot_hold_is_refused(tmp_path: Path) -> None:
    """Types, dimensions, objects, cut tensors, names that are no file's."""
    kind, whole = DTYPES["float32"], [(0, Box.whole((4,)), 0)]
    with pytest.raises(Unsupported, match=r"GGUF has no elements of float8_e4m3fn"):
        WRITER.lay_out(request_of({("w",): (DTYPES["float8_e4m3fn"], (4,))}, whole))
    with pytest.raises(Unsupported, match="5 dimensions"):
        WRITER.lay_out(request_of({("w",): (kind, (1,) * 5)}, [(0, Box.whole((1,) * 5), 0)]))
    for value in ({"a": 1}, [1, "a"], 1 << 80, None):
        with pytest.raises(Unsupported, match="a pair of GGUF is text, a number"):
            WRITER.lay_out(request_of({("w",): (kind, (4,))}, whole, blobs=[Blob("lr", "value", None, value)]))
    with pytest.raises(LayoutError, match="one whole box"):
        WRITER.lay_out(request_of({("w",): (kind, (4,))}, [(0, Box((0,), (2,)), 0)]))
    with pytest.raises(UsageError, match="no name for a GGUF file"):
        export(FIXTURES / "torch/hf_single/ckpt", tmp_path / "model.pt", to="gguf", include=["model.norm.weight"])


READ = """
import json, sys
from gguf import GGUFReader
reader = GGUFReader(sys.argv[1])
rows = {t.name: [t.tensor_type.name, [int(n) for n in t.shape], t.data.tobytes().hex()] for t in reader.tensors}
print(json.dumps([rows, {k: f.contents() for k, f in reader.fields.items()}]))
"""


@pytest.mark.peer
def test_gguf_reads_it(tmp_path: Path) -> None:
    """``CKPT_PEER_GGUF`` names the python of an environment with gguf (0.19.0 when this was written)."""

    def read(path: Path) -> tuple[dict[str, object], dict[str, object]]:
        command = [os.environ["CKPT_PEER_GGUF"], "-c", READ, str(path)]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        rows, pairs = json.loads(run.stdout)
        return rows, {key: value for key, value in pairs.items() if not key.startswith("GGUF.")}

    (source,) = (CHECKPOINTS / "gguf_mixed/ckpt").iterdir()
    export(source, tmp_path / "m.gguf", everything=True, names="source", durable=False)
    assert read(tmp_path / "m.gguf") == read(source)
