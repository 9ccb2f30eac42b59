"""Shards of torch's Hugging Face writer: what their names and offsets tell, and what they cannot."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from ckpt_tool.checks.extents import measure
from ckpt_tool.checks.structure import structure_findings
from ckpt_tool.errors import FormatError, NotFound
from ckpt_tool.formats.safetensors import dcp_hf, single
from ckpt_tool.manifest.finding import Severity
from tests.formats.safetensors.places import file_bytes, model_bytes, source_and_store

READER = dcp_hf.READER


def name(shard: int, number: int = 1, count: int = 1) -> str:
    """As torch names them."""
    return f"shard-{shard:05d}-model-{number:05d}-of-{count:05d}.safetensors"


def shard(tensors: Mapping[str, tuple[int, bytes]], **metadata: str) -> bytes:
    """A file of U8 vectors that start at the given offsets of their global tensors."""
    info = {fqn: {"saved_offsets": [offset]} for fqn, (offset, _) in tensors.items()}
    stated = {"DCP_SHARDING_INFO": json.dumps(info), "DCP_VERSION": "1.0", "format": "pt", **metadata}
    return model_bytes({fqn: data for fqn, (_, data) in tensors.items()}, stated)


def test_global_shapes_are_the_furthest_ends() -> None:
    """Boxes lie where ``saved_offsets`` say, of the rank that the name says; a note says that shapes are inferred."""
    files = {name(1): shard({"w": (0, b"ab")}), name(2): shard({"w": (2, b"c"), "v": (0, b"xy")})}
    manifest = READER.read(source_and_store(files)[0])
    chunks = manifest.chunks
    assert {m.fqn: m.shape for m in manifest.tensors} == {"w": (3,), "v": (2,)}
    assert (chunks.offsets[:, 0].tolist(), chunks.sizes[:, 0].tolist(), chunks.rank.tolist()) == (
        [0, 2, 0],
        [2, 1, 2],
        [0, 1, 1],
    )
    assert manifest.info["metadata"] == {"DCP_VERSION": "1.0", "format": "pt"}
    assert any("a last shard that is missing cannot be noticed" in note for note in manifest.notes)


def test_a_number_missing_among_the_shards_is_suspicious() -> None:
    """A rank that saved nothing writes no file, so it is a warning; the hole in a tensor shows by itself."""
    source, _ = source_and_store({name(1): shard({"w": (0, b"ab")}), name(3): shard({"w": (4, b"ef")})})
    manifest = READER.read(source)
    finding, unproven = READER.check(source, manifest)
    assert (finding.kind, finding.severity) == ("missing-shard", Severity.WARNING)
    assert (unproven.kind, unproven.severity) == ("unproven-shape", Severity.WARNING)
    assert finding.message.startswith("no file of shard 00002, though there is one of shard 00003")
    assert finding.message in manifest.notes
    assert manifest.tensor("w").shape == (6,)


def test_a_part_of_the_model_that_no_rank_has_is_an_error() -> None:
    """Files are numbered twice: by rank and by part of the model."""
    source, _ = source_and_store({name(1, 1, 3): shard({"w": (0, b"a")}), name(1, 3, 3): shard({"v": (0, b"b")})})
    found = list(READER.check(source, READER.read(source)))
    assert [(f.kind, f.severity, f.message) for f in found if f.kind != "unproven-shape"] == [
        ("missing-file", Severity.ERROR, "no rank has a file model-00002-of-00003")
    ]


@pytest.mark.parametrize(
    ("info", "said"),
    [
        (None, "expected DCP_SHARDING_INFO in its __metadata__"),
        ("[", "DCP_SHARDING_INFO is not JSON"),
        ("[]", "expected DCP_SHARDING_INFO"),
        ("{}", r"'w': expected 1 saved_offsets, got None"),
        ('{"w":{"saved_offsets":[0,0]}}', "'w': expected 1 saved_offsets"),
        ('{"w":{"saved_offsets":[-1]}}', "'w': expected 1 saved_offsets"),
        ('{"w":{"saved_offsets":[1e3]}}', "'w': expected 1 saved_offsets"),
        ('{"w":3}', "'w': expected 1 saved_offsets, got 3"),
    ],
)
def test_shards_that_do_not_say_where_they_belong(info: Any, said: str) -> None:
    """Without offsets a shard cannot be placed, and nothing is guessed."""
    metadata = {"format": "pt"} | ({} if info is None else {"DCP_SHARDING_INFO": info})
    with pytest.raises(FormatError, match=said) as caught:
        READER.read(source_and_store({name(1): model_bytes({"w": b"a"}, metadata)})[0])
    assert caught.value.where == name(1)


def test_a_folder_without_shards() -> None:
    """Says what it looked for."""
    source, _ = source_and_store({"x.safetensors": model_bytes({"w": b"a"})})
    assert READER.probe(source).confidence == 0.0
    with pytest.raises(NotFound, match=r"no shard-NNNNN-model-NNNNN-of-NNNNN.safetensors"):
        READER.read(source)


def test_shards_in_sharded_are_read_while_nothing_lies_above() -> None:
    """Consolidation that never ran leaves only ``sharded/``."""
    files = {"sharded/" + name(1): shard({"w": (0, b"ab")}), "sharded/" + name(2): shard({"w": (2, b"c")})}
    source, _ = source_and_store(files)
    assert READER.probe(source).confidence > 0.5
    assert READER.read(source).files.paths == tuple(files)


def test_shards_that_disagree_about_dimensions() -> None:
    """One name cannot be a vector here and a scalar there."""
    scalar = {"w": {"dtype": "U8", "shape": [], "data_offsets": [0, 1]}}
    stated = {"DCP_SHARDING_INFO": '{"w":{"saved_offsets":[]}}'}
    files = {name(1): shard({"w": (0, b"ab")}), name(2): file_bytes({"__metadata__": stated, **scalar}, b"c")}
    with pytest.raises(FormatError, match="'w' has 0 dimensions here and 1 in another shard"):
        READER.read(source_and_store(files)[0])


def test_a_shard_under_another_name_is_read_with_a_warning() -> None:
    """Its metadata says that its tensors may be parts."""
    source, _ = source_and_store({"part.safetensors": shard({"w": (0, b"ab")})})
    assert any("may hold only parts of its tensors" in note for note in single.READER.read(source).notes)


def joined(tensors: Mapping[str, tuple[list[int], bytes]]) -> bytes:
    """A file of whole tensors of bytes."""
    at = 0
    listed: dict[str, Any] = {}
    for fqn, (shape, data) in tensors.items():
        listed[fqn] = {"dtype": "U8", "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    return file_bytes(listed, b"".join(data for _, data in tensors.values()))


WHOLE = "model-00001-of-00001.safetensors"


def test_joined_files_beside_shards_tell_the_shapes() -> None:
    """What ``enable_consolidation`` leaves (torch 2.13): a missing last shard is seen, and what it alone held."""
    files = {
        name(1): shard({"w": (0, b"ab")}),
        name(2): shard({"w": (2, b"c"), "v": (0, b"xy")}),
        WHOLE: joined({"w": ([3], b"abc"), "v": ([2], b"xy")}),
        "adapter.safetensors": joined({"other": ([1], b"z")}),
    }
    source, _ = source_and_store(files)
    manifest = READER.read(source)
    assert list(READER.check(source, manifest)) == []
    assert manifest.info["left_out"] == [WHOLE]
    assert manifest.notes == (
        f"{WHOLE}: the same tensors whole, which tell their shapes; left out, as shards are here",
    )
    source, _ = source_and_store({path: data for path, data in files.items() if path != name(2)})
    manifest = READER.read(source)
    assert {m.fqn: m.shape for m in manifest.tensors} == {"w": (3,), "v": (2,)}
    assert manifest.chunks.tensor.tolist() == [0]
    found = structure_findings(manifest, source.listing, measure(manifest, source.listing))
    assert {f.fqn for f in found if f.kind == "gap"} == {"w", "v"}


def test_joined_files_that_contradict_shards() -> None:
    """An older joined file that is shorter, and the zeros that torch's consolidation writes for scalars."""
    files = {
        name(1): shard({"w": (0, b"abc")}),
        name(2): file_bytes(
            {
                "__metadata__": {"DCP_SHARDING_INFO": '{"s": {"saved_offsets": []}}'},
                "s": {"dtype": "U8", "shape": [], "data_offsets": [0, 1]},
            },
            b"5",
        ),
        WHOLE: joined({"w": ([2], b"ab"), "s": ([], b"\0")}),
    }
    source, _ = source_and_store(files)
    manifest = READER.read(source)
    assert manifest.tensor("w").shape == (3,)
    scalar, shape = READER.check(source, manifest)
    assert (scalar.kind, scalar.fqn, shape.kind, shape.fqn) == ("differs-from-shard", "s", "differs-from-shard", "w")
    assert shape.message == f"'w' is [2] in {WHOLE}, and its shards reach to [3]"
    assert scalar.message.startswith(f"'s' is 00 in {WHOLE} and 35 in {name(2)}")
