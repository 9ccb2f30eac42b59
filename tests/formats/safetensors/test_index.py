"""An index that contradicts the files beside it: each way is reported with the tensor and both files."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

import pytest

from ckpt_tool.errors import FormatError, NotFound
from ckpt_tool.formats._hf_index import homes_of, parse_index, write_index
from ckpt_tool.formats.base import Source
from ckpt_tool.formats.safetensors import index_file, single
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.storage.memory import MemoryStore
from ckpt_tool.storage.store import Listing
from tests.formats.safetensors.places import file_bytes, index_bytes, model_bytes, source_and_store

A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
SOUND = {A: model_bytes({"w": b"1234", "v": b"56"}), B: model_bytes({"u": b"7"})}
MAP = {"w": A, "v": A, "u": B}
READER = index_file.READER


def judged(files: Mapping[str, bytes]) -> tuple[Manifest, dict[str, Finding]]:
    """The manifest, and findings by kind."""
    source, _ = source_and_store(files)
    manifest = READER.read(source)
    return manifest, {f.kind: f for f in READER.check(source, manifest)}


def test_a_sound_index_gives_no_finding() -> None:
    """Headers and index that agree are silent."""
    manifest, found = judged({**SOUND, INDEX: index_bytes(MAP, 7)})
    assert (found, manifest.notes) == ({}, ())
    assert manifest.tensors.fqns == ("w", "v", "u")
    assert manifest.info["index"] == INDEX


def test_a_ghost_is_reported_and_its_neighbours_are_kept() -> None:
    """R34: an index naming one absent tensor in a file of three leaves the three readable."""
    files = {A: model_bytes({"a": b"1", "b": b"2", "c": b"3"}), INDEX: index_bytes(dict.fromkeys("abcx", A), 3)}
    manifest, found = judged(files)
    assert manifest.tensors.fqns == ("a", "b", "c")
    assert (found["index-ghost-tensor"].fqn, found["index-ghost-tensor"].severity) == ("x", Severity.ERROR)
    assert found["index-ghost-tensor"].message == (
        f"{INDEX} puts 'x' into {A}, which lacks it, and so does every other file"
    )


def test_a_tensor_in_another_file_than_the_index_says() -> None:
    """R91: the header's place is taken, and both files are named."""
    manifest, found = judged({**SOUND, INDEX: index_bytes({**MAP, "u": A}, 7)})
    finding = found["index-wrong-file"]
    assert finding.message == f"{INDEX} puts 'u' into {A}, which lacks it; it is in {B}"
    assert manifest.files.paths == (A, B)
    assert f"where {INDEX} and the headers of the files differ, the headers were followed" in manifest.notes


def test_an_absent_file_is_an_error_and_the_rest_is_readable() -> None:
    """R91: what is lost is counted, what is there is read, and ``info`` names the file."""
    manifest, found = judged({A: SOUND[A], INDEX: index_bytes(MAP, 7)})
    assert manifest.tensors.fqns == ("w", "v")
    assert found["missing-file"].severity is Severity.ERROR
    assert found["missing-file"].message == (
        f"{B} is named by {INDEX} and is not here; 1 of its 1 tensor is in no other file: 'u'"
    )
    assert manifest.info["missing_files"] == [B]
    assert found["missing-file"].message in manifest.notes


def test_a_stale_index_is_told_from_a_cut_copy() -> None:
    """R91: an index of 30 files beside 2 others is one finding, and the files speak for themselves."""
    old = {f"t{i}": f"model-{i:05d}-of-00030.safetensors" for i in range(1, 31)}
    manifest, found = judged({**SOUND, INDEX: index_bytes(old, 7)})
    assert manifest.tensors.fqns == ("w", "v", "u")
    assert found["stale-index"].severity is Severity.ERROR
    assert found["stale-index"].message.startswith(f"{INDEX} names 30 files, of which none is here (")
    assert "missing-file" not in found


def test_a_stray_file_is_left_out() -> None:
    """R91: a file that the index does not name is not read, and said not to be."""
    copy = "model-00001-of-00002 (1).safetensors"
    manifest, found = judged({**SOUND, copy: SOUND[A], INDEX: index_bytes(MAP, 7)})
    assert copy not in manifest.files.paths
    assert found["stray-file"].message == f"{copy} is not named by {INDEX} and was left out"
    assert found["stray-file"].where is not None
    assert found["stray-file"].where.path == copy


@pytest.mark.parametrize(("place", "row"), [(A, 0), (B, 1)])
def test_a_tensor_in_two_files_is_taken_where_the_index_says(place: str, row: int) -> None:
    """R91: most loaders take the last; here the index decides, and both files are named."""
    files = {A: model_bytes({"w": b"old"}), B: model_bytes({"w": b"new!"})}
    manifest, found = judged({**files, INDEX: index_bytes({"w": place, "u": B, "v": A})})
    assert manifest.chunks.file.tolist() == [row]
    assert found["duplicate-tensor"].message == f"'w' is in {A} and in {B}; {place} was taken"
    assert found["duplicate-tensor"].fqn == "w"


def test_a_tensor_in_two_files_without_an_index_is_refused() -> None:
    """Nothing says which one counts, so nothing is chosen."""
    source, _ = source_and_store({"a.safetensors": model_bytes({"w": b"1"}), "b.safetensors": model_bytes({"w": b"2"})})
    with pytest.raises(FormatError, match=r"'w' is in a.safetensors and in b.safetensors, and no index says"):
        READER.read(source)


def test_a_tensor_that_the_index_does_not_list_is_read() -> None:
    """A loader that goes by the index loses it; the header has it."""
    manifest, found = judged({**SOUND, INDEX: index_bytes({"w": A, "u": B}, 7)})
    assert manifest.tensors.fqns == ("w", "v", "u")
    assert found["not-in-index"].message == f"{A} holds 1 tensor that {INDEX} does not list: 'v'"


def test_a_key_listed_twice_in_the_index() -> None:
    """R91: JSON readers drop the first silently; both files are named."""
    raw = f'{{"metadata": {{"total_size": 7}}, "weight_map": {{"w": "{B}", "v": "{A}", "u": "{B}", "w": "{A}"}}}}'
    manifest, found = judged({**SOUND, INDEX: raw.encode()})
    assert found["index-duplicate-key"].message == (
        f"{INDEX} lists 'w' twice: in {B} and in {A}; most loaders see the last"
    )
    assert len(manifest.tensors) == 3


def test_values_that_are_no_file_names() -> None:
    """R91: numbers, lists and null in the map are reported one by one."""
    raw = index_bytes({**MAP, "x": ["a"], "y": 3}, 7)
    source, _ = source_and_store({**SOUND, INDEX: raw})
    found = [f for f in READER.check(source, READER.read(source)) if f.kind == "index-bad-value"]
    assert [(f.fqn, f.message) for f in found] == [
        ("x", f"{INDEX} maps 'x' to a JSON list, expected the name of a file"),
        ("y", f"{INDEX} maps 'y' to a JSON int, expected the name of a file"),
    ]


@pytest.mark.parametrize(
    ("total_size", "severity", "said"),
    [
        (None, Severity.INFO, "has no metadata.total_size, expected 7"),
        (8, Severity.WARNING, "says total_size 8, expected the sum of the tensors' bytes, 7"),
        ("7", Severity.WARNING, "says total_size '7', expected"),
        (len(SOUND[A]) + len(SOUND[B]), Severity.WARNING, "(the sum of the file sizes), expected"),
    ],
)
def test_total_size_is_the_sum_of_tensor_bytes(total_size: object, severity: Severity, said: str) -> None:
    """R92: not of file sizes, and a number."""
    _, found = judged({**SOUND, INDEX: index_bytes(MAP, total_size)})
    assert list(found) == ["total-size"]
    assert found["total-size"].severity is severity
    assert said in found["total-size"].message


def test_two_names_of_the_same_bytes_are_an_error() -> None:
    """R89: both names are readable, and ``check`` says that other readers refuse the file."""
    fields = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}
    source, _ = source_and_store({"model.safetensors": file_bytes({"a": fields, "b": fields}, b"xy")})
    manifest = single.READER.read(source)
    [finding] = single.READER.check(source, manifest)
    assert manifest.chunks.offset.tolist() == [manifest.chunks.offset[0]] * 2
    assert (finding.kind, finding.severity, finding.fqn) == ("shared-bytes", Severity.ERROR, "b")
    assert finding.message in manifest.notes


@pytest.mark.parametrize(
    ("head", "config", "kind"),
    [
        (b"12", b'{"tie_word_embeddings": true}', "tied-but-different"),
        (b"ab", b'{"tie_word_embeddings": true}', "tied-stored-twice"),
        (b"12", b'{"thinker_config": {"text_config": {"tie_word_embeddings": true}}}', "tied-but-different"),
    ],
)
def test_tied_weights_stored_twice(head: bytes, config: bytes, kind: str) -> None:
    """R40: config (or its part about text) says tied and both are there: other bytes are a warning, else a remark."""
    files = {
        "model.safetensors": model_bytes({"model.embed_tokens.weight": b"ab", "lm_head.weight": head}),
        "config.json": config,
    }
    source, _ = source_and_store(files)
    [finding] = single.READER.check(source, single.READER.read(source))
    assert (finding.kind, finding.fqn) == (kind, "lm_head.weight")


def test_numbered_files_without_an_index_show_what_is_missing() -> None:
    """Names that end in -of-00003 tell how many there should be."""
    names = [f"m-0000{i}-of-00003.safetensors" for i in (1, 3)]
    manifest, found = judged({name: model_bytes({name[:7]: b"1"}) for name in names})
    assert found["missing-file"].severity is Severity.ERROR
    assert found["no-index"].severity is Severity.WARNING
    assert manifest.info["missing_files"] == ["m-00002-of-00003.safetensors"]


def test_an_index_alone_says_what_to_fetch() -> None:
    """Only the index was copied."""
    source, _ = source_and_store({INDEX: index_bytes(MAP)})
    with pytest.raises(NotFound, match=f"none of the 2 files that {INDEX} names is here"):
        READER.read(source)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"<!DOCTYPE html>", "the index is not JSON but an HTML page"),
        (b'{"weight_map": []}', "expected a JSON object with a weight_map"),
        (b"[]", "expected a JSON object with a weight_map"),
        (b"\xff", "the index is not JSON: "),
        (b"[" * 100_000, "the index is not JSON: "),
    ],
)
def test_what_is_no_index(raw: bytes, said: str) -> None:
    """The message says what it is instead."""
    with pytest.raises(FormatError, match=said):
        parse_index(raw, INDEX)


def test_paths_that_leave_the_folder_are_absent_files() -> None:
    """An index cannot make the reader open a file elsewhere."""
    source, store = source_and_store({**SOUND, INDEX: index_bytes({**MAP, "x": "../../etc/passwd"}, 7)})
    READER.read(source)
    assert {c.path for c in store.calls} == {A, B, INDEX}


def test_two_indexes_are_a_question() -> None:
    """Unless one is the usual one, the user has to name it."""
    files = {"a.safetensors.index.json": index_bytes(MAP), "b.safetensors.index.json": index_bytes(MAP), **SOUND}
    source, _ = source_and_store(files)
    with pytest.raises(FormatError, match=r"2 indexes: a.safetensors.index.json, b.safetensors"):
        READER.read(source)
    assert judged({**files, INDEX: index_bytes(MAP, 7)})[0].info["index"] == INDEX


def test_a_written_index_is_read_back() -> None:
    """``parse(write(map)) == map``."""
    index = parse_index(write_index(MAP, 7), INDEX)
    assert (dict(index.weight_map), index.total_size, index.faults) == (MAP, 7, ())


def test_homes_of_prefers_the_index() -> None:
    """Without a word of the index the last file wins."""
    held = {"a": {"w": 1, "v": 1}, "b": {"w": 1, "v": 1}}
    assert homes_of(held, {"w": "a", "v": "c"}) == {"w": "a", "v": "b"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"{nope", "config.json was left out: it is not JSON"),
        (b"[]", "config.json was left out: expected a JSON object, got list"),
        (b"{}" + b" " * (16 << 20), "config.json was left out: 16,777,218 bytes are no settings file"),
    ],
)
def test_a_broken_config_is_a_note(text: bytes, said: str) -> None:
    """Weights are readable without it."""
    source, _ = source_and_store({"model.safetensors": model_bytes({"w": b"1"}), "config.json": text})
    manifest = single.READER.read(source)
    assert "config" not in manifest.info
    assert any(note.startswith(said) for note in manifest.notes)


def test_probes_tell_one_file_from_several() -> None:
    """Exactly one reader takes each folder, and the other says why not."""
    one, two = {"a.safetensors": SOUND[A]}, {"a.safetensors": SOUND[A], "b.safetensors": SOUND[B]}
    for files, taken, left in (
        (one, single.READER, READER),
        (two, READER, single.READER),
        (SOUND, READER, single.READER),
    ):
        source, _ = source_and_store(files)
        assert taken.probe(source).confidence > 0.5 > left.probe(source).confidence
        with pytest.raises(NotFound) if left is single.READER else nullcontext():
            left.read(source)
    with_index, _ = source_and_store({**one, INDEX: index_bytes(MAP)})
    assert single.READER.probe(with_index).why == "an index lies beside the safetensors files"
    with pytest.raises(NotFound, match="no safetensors file"):
        READER.read(source_and_store({})[0])


def test_a_file_is_known_by_its_first_bytes_too() -> None:
    """Named without its suffix, a safetensors file is still one."""
    store = MemoryStore({"weights": SOUND[A], "other": b"x" * 40})
    for name, is_taken in (("weights", True), ("other", False)):
        source = Source(store, Listing(store.url, store.listing().sizes, entry=name))
        assert (single.READER.probe(source).confidence > 0.5) == is_taken
    source = Source(store, Listing(store.url, store.listing().sizes, entry="weights"))
    assert single.READER.read(source).tensors.fqns == ("w", "v")


def test_a_long_header_is_a_warning() -> None:
    """R85: readable here, refused by the reference reader."""
    entry = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    source, _ = source_and_store({"model.safetensors": file_bytes(entry + b" " * 101_000_000, b"x")})
    manifest = single.READER.read(source)
    [finding] = single.READER.check(source, manifest)
    assert (finding.kind, finding.severity) == ("large-header", Severity.WARNING)
    assert "the reference reader refuses more than 100,000,000 (100 MB)" in manifest.notes[0]


@pytest.mark.parametrize(
    ("here", "missing"),
    [
        ([A], B),
        (["m-1-of-3.safetensors", "m-3-of-3.safetensors"], "m-2-of-3.safetensors"),
        (["m-00000-of-00002.safetensors"], "m-00001-of-00002.safetensors"),
        (["m-00002-of-00002.fp16.safetensors"], "m-00001-of-00002.fp16.safetensors"),
        (["m-00000-of-00002.safetensors", "m-00001-of-00002.safetensors"], None),
        (["m.safetensors", "n-2-of-two.safetensors"], None),
    ],
)
def test_numbers_tell_what_is_missing_however_they_are_written(here: list[str], missing: str | None) -> None:
    """Also where a single file of a set is left, which is no model by itself; the file that is named is one."""
    files = {name: model_bytes({f"w{i}": b"12"}) for i, name in enumerate(here)}
    manifest, found = judged(files)
    assert manifest.info.get("missing_files") == ([missing] if missing else None)
    assert ("missing-file" in found) is (missing is not None)
    if missing is not None:
        source, _ = source_and_store(files)
        assert READER.probe(source).confidence > single.READER.probe(source).confidence or len(here) > 1


def test_an_index_of_a_variant_is_one() -> None:
    """diffusers: ``model.safetensors.index.fp16.json`` tells what is missing, unless a plain index is there."""
    shards = {name.replace(".safetensors", ".fp16.safetensors"): data for name, data in SOUND.items()}
    names = {fqn: name.replace(".safetensors", ".fp16.safetensors") for fqn, name in MAP.items()}
    variant = INDEX.replace(".json", ".fp16.json")
    lost = names["u"]
    _, found = judged({name: data for name, data in shards.items() if name != lost} | {variant: index_bytes(names, 7)})
    assert found["missing-file"].fqn == "u"
    manifest, found = judged({**SOUND, INDEX: index_bytes(MAP, 7), **shards, variant: index_bytes(names, 7)})
    assert (manifest.info["index"], manifest.info["left_out"]) == (INDEX, sorted(shards))
    assert found == {}


def test_names_and_sizes_are_taken_as_loaders_take_them() -> None:
    """``./a`` is ``a``, 7.0 is 7; a second ``weight_map`` hides the first."""
    dotted = index_bytes({fqn: f"./{name}" for fqn, name in MAP.items()}, 7)
    _, found = judged({**SOUND, INDEX: dotted.replace(b": 7", b": 7.0")})
    assert found == {}
    _, found = judged({**SOUND, INDEX: dotted.rstrip()[:-1] + b', "weight_map": {}}'})
    assert found["index-duplicate-key"].severity is Severity.ERROR
