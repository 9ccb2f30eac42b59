"""The reader of HDF5 on what Keras and h5py wrote, and on damage."""

from __future__ import annotations

import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.api.convert.export import export
from ckpt_tool.api.trust.verify import verify
from ckpt_tool.errors import CkptError, FormatError, Unsupported
from ckpt_tool.formats.hdf5.reader import READER
from ckpt_tool.storage.memory import MemoryStore
from tests.formats.conformance import Case, ReaderTests, assemble, source_of, stored_bytes
from tests.formats.zoo import CHECKPOINTS, case
from tests.reports.made import as_bytes


def dotted(name: str) -> str:
    """Groups are joined by dots."""
    return name.replace("/", ".")


class TestHdf5(ReaderTests):
    """Keras' three kinds of files; chunks, filters and odd types."""

    reader = READER
    reader_import = "ckpt_tool.formats.hdf5.reader:READER"
    cases = tuple(
        case(name, rename=dotted, max_read_requests=6, max_resolve_requests=0)
        for name in ("keras_h5", "keras_weights", "keras_v3", "hdf5_odd")
    )

    def test_damage_is_reported_as_such(self, case: Case) -> None:
        """Cut files, in pieces of a tenth."""
        ((path, data),) = stored_bytes(case.location).items()
        for tenth in range(10):
            source = source_of(MemoryStore({path: data[: len(data) * tenth // 10]}))
            with pytest.raises(CkptError):
                self.reader.read(source)


def test_configurations_are_objects() -> None:
    """Keras keeps the model's configuration in an attribute."""
    with open_checkpoint(CHECKPOINTS / "keras_h5/ckpt") as checkpoint:
        assert checkpoint.manifest.info["attributes"]["keras_version"] == "3.15.1"
        assert checkpoint.objects()["model_config"]["class_name"] == "Sequential"
        assert checkpoint.manifest.tensor("optimizer_weights.adam.iteration").section == "optimizer"


def test_text_is_an_object_and_links_are_not_followed() -> None:
    """Also chunks that nothing was written to: zeros, with a note, and sound."""
    with open_checkpoint(CHECKPOINTS / "hdf5_odd/ckpt") as checkpoint:
        assert checkpoint.objects() == {"name": "text", "names": ["a", "bc"]}
        assert "link" not in checkpoint
        assert checkpoint.manifest.notes == ("'never_written': 4 of 4 chunks were never written: zeros",)
    assert verify(CHECKPOINTS / "hdf5_odd/ckpt", level="full").is_ok


def test_export(tmp_path: Path) -> None:
    """Weights as safetensors."""
    export(CHECKPOINTS / "keras_v3/ckpt", tmp_path / "m.safetensors", names="source", durable=False)
    ours, truth = as_bytes(tmp_path / "m.safetensors"), as_bytes(CHECKPOINTS / "keras_v3/ckpt")
    assert ours == {fqn: truth[fqn] for fqn in truth if not fqn.startswith("optimizer")}


def test_filters(tmp_path: Path) -> None:
    """Checksums behind chunks, and chunks that skipped a filter; others are named."""
    values = np.arange(200, dtype=np.int32).reshape(20, 10)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("f", data=values, chunks=(6, 4), fletcher32=True, compression="gzip", shuffle=True)
        raw = file.create_dataset("skipped", (4,), "<i4", chunks=(4,), compression="gzip")
        raw.id.write_direct_chunk((0,), values[0, :4].tobytes(), filter_mask=1)
    with open_checkpoint(tmp_path / "a.h5") as checkpoint:
        assert np.array_equal(checkpoint["f"][:], values)
        assert np.array_equal(checkpoint["skipped"][:], values[0, :4])
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file.create_dataset("x", data=values, compression="lzf")
    with pytest.raises(Unsupported, match=r"filter 32000 \(lzf\)"):
        open_checkpoint(tmp_path / "b.h5")


def test_what_lies_elsewhere_is_refused(tmp_path: Path) -> None:
    """External files could be any; a fill value other than zero is stored nowhere."""
    (tmp_path / "secret").write_bytes(bytes(16))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", (4,), "<f4", external=[(str(tmp_path / "secret"), 0, 16)])
    with pytest.raises(Unsupported, match="in other files"):
        open_checkpoint(tmp_path / "a.h5")
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file.create_dataset("x", (4,), "<f4", chunks=(2,), fillvalue=7)
    with pytest.raises(Unsupported, match="not stored"):
        open_checkpoint(tmp_path / "b.h5")
    with h5py.File(tmp_path / "c.h5", "w") as file:
        file["x"] = h5py.ExternalLink(str(tmp_path / "b.h5"), "/x")
    with open_checkpoint(tmp_path / "c.h5") as checkpoint:
        assert len(checkpoint) == 0


def test_a_small_dataset_inside_of_its_header(tmp_path: Path) -> None:
    """Compact layout: the bytes are where the header is."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_layout(h5py.h5d.COMPACT)
        space = h5py.h5s.create_simple((3,))
        found = h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_INT32, space, properties)
        found.write(h5py.h5s.ALL, h5py.h5s.ALL, np.array([7, 8, 9], np.int32))
    source = source_of(MemoryStore({"a.h5": (tmp_path / "a.h5").read_bytes()}))
    manifest = READER.read(source)
    assert assemble(source.store, manifest, manifest.chunks, "x").data == np.array([7, 8, 9], np.int32).tobytes()


def test_without_h5py(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install."""
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(Unsupported, match="need the package h5py") as caught:
        open_checkpoint(CHECKPOINTS / "keras_h5/ckpt")
    assert caught.value.hint == "pip install 'ckpt-tool[h5]'"


@pytest.mark.parametrize("seed", range(60))
def test_flipped_bytes(seed: int) -> None:
    """Damaged structure is an error or another structure, never a stray exception."""
    data = bytearray((CHECKPOINTS / "hdf5_odd/ckpt/odd.h5").read_bytes())
    for at in np.random.default_rng(seed).integers(0, 6000, 6):
        data[at] ^= 1 << (seed % 8)
    try:
        READER.read(source_of(MemoryStore({"a.h5": bytes(data)})))
    except CkptError as error:
        assert error.message  # noqa: PT017 - whether it raises depends on the bytes


def test_another_zip_named_keras() -> None:
    """A zip without weights is no model."""
    with pytest.raises(FormatError):
        READER.read(source_of(MemoryStore({"a.keras": b"PK\3\4" + bytes(100)})))
