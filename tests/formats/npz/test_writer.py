"""``.npz`` written from a layout: numpy reads it, and so does our reader."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from ckpt_tool.api.convert.export import export
from ckpt_tool.dtypes import DTYPES, DType
from ckpt_tool.errors import LayoutError, Unsupported, UsageError
from ckpt_tool.formats.npz.writer import WRITER
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.model import Blob, KeyPath
from tests.formats.conformance import FIXTURES
from tests.formats.torch_save.laid_out import filled, request_of
from tests.reports.made import as_bytes

KINDS = [kind for kind in DTYPES.values() if kind.bits % 8 == 0 and kind.kind not in ("quantized", "opaque")]
SHAPES = {"matrix": (3, 5), "scalar": (), "empty": (0, 4), "vector": (70,)}


@pytest.mark.parametrize("is_sealed", [True, False], ids=["sealed", "not sealed"])
def test_numpy_reads_every_dtype(is_sealed: bool) -> None:
    """Each type and shape comes back bit for bit; checksums are right where the target could go back for them."""
    tensors: dict[KeyPath, tuple[DType, tuple[int, ...]]] = {
        (f"{kind.name}/{name}",): (kind, shape) for kind in KINDS for name, shape in SHAPES.items()
    }
    boxes = [(row, Box.whole(shape), 0) for row, (_, shape) in enumerate(tensors.values()) if Box.whole(shape).volume]
    request = request_of(tensors, boxes)
    rng = np.random.default_rng(0)
    payload = {meta.fqn: rng.integers(0, 2, meta.nbytes, dtype=np.uint8).tobytes() for meta in request.tensors}
    (data,) = filled(WRITER.lay_out(request), payload, is_sealed=is_sealed).values()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert (archive.testzip() is None) == is_sealed
    if not is_sealed:
        return
    with np.load(io.BytesIO(data), allow_pickle=False) as found:
        assert found.files == list(request.tensors.fqns)
        for meta in request.tensors:
            array = found[meta.fqn]
            assert (array.shape, array.tobytes()) == (meta.shape, payload[meta.fqn]), meta
            if meta.dtype.numpy in {"float32", "int8", "bool", "complex64", "uint64"}:
                assert array.dtype == np.dtype(meta.dtype.numpy)


def test_export_and_back(tmp_path: Path) -> None:
    """A model of Hugging Face as ``.npz``: numpy reads the values, and our reader the same bytes."""
    source = FIXTURES / "torch/hf_single/ckpt"
    result = export(source, tmp_path / "model.npz", durable=False)  # the name tells the format
    truth, ours = as_bytes(source), as_bytes(tmp_path / "model.npz")
    assert {fqn: (shape, data) for fqn, (_, shape, data) in ours.items()} == {
        fqn: (shape, data) for fqn, (_, shape, data) in truth.items()
    }
    assert "which numpy has no name for" in result.notes[-1]
    with np.load(tmp_path / "model.npz") as found:
        fqn = next(fqn for fqn, (dtype, _, _) in truth.items() if dtype == "bfloat16")
        assert found[fqn].view(ml_dtypes.bfloat16).tobytes() == truth[fqn][2]


def test_what_it_cannot_hold_is_refused() -> None:
    """Objects, cut tensors, and names that are no file's."""
    kind = DTYPES["float32"]
    whole = [(0, Box.whole((4,)), 0)]
    with pytest.raises(Unsupported, match=r"holds arrays only.*'lr'"):
        WRITER.lay_out(request_of({("w",): (kind, (4,))}, whole, blobs=[Blob("lr", "value", None, 1)]))
    with pytest.raises(LayoutError, match="one whole box"):
        WRITER.lay_out(request_of({("w",): (kind, (4,))}, [(0, Box((0,), (2,)), 0)]))


def test_the_target_must_be_called_npz(tmp_path: Path) -> None:
    """numpy.load goes by content, people by name."""
    with pytest.raises(UsageError, match=r"no name for an \.npz file"):
        export(FIXTURES / "torch/hf_single/ckpt", tmp_path / "model.pt", to="npz")
