"""What file names say about ranks."""

from __future__ import annotations

import pytest

from ckpt_tool.formats._torch_file.rank_names import RankFile, find_sets, rank_file


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("model_world_size_4_rank_0.pt", ("model", "model_world_size_4_rank_*.pt", 0, 4)),
        ("optim_world_size_16_rank_12.pt", ("optim", "optim_world_size_16_rank_*.pt", 12, 16)),
        ("extra_state_world_size_4_rank_1.pt", ("extra_state", "extra_state_world_size_4_rank_*.pt", 1, 4)),
        ("pytorch_model_fsdp_0_rank3.bin", ("model", "pytorch_model_fsdp_0_rank*.bin", 3, None)),
        ("optimizer_0_rank3.bin", ("optim", "optimizer_0_rank*.bin", 3, None)),
        ("shard.rank003.pt", ("model", "shard.rank*.pt", 3, None)),
        ("rank0.pt", ("model", "rank*.pt", 0, None)),
        ("ckpt_rank_7_step_100.pt", ("model", "ckpt_rank_*_step_100.pt", 7, None)),
        ("sub/rng_rank_2.pth", ("extra_state", "sub/rng_rank_*.pth", 2, None)),
        ("zero_pp_rank_0_mp_rank_00_optim_states.pt", None),
        ("mp_rank_00_model_states.pt", None),
        ("ranking_1.pt", None),
        ("model_rank_0.safetensors", None),
        ("model.pt", None),
    ],
)
def test_names_tell_kind_family_and_rank(path: str, expected: tuple[str, str, int, int | None] | None) -> None:
    """A rank number makes a rank file; numbers of single axes of a larger mesh do not."""
    if expected is None:
        assert rank_file(path) is None
    else:
        digits = path[expected[1].index("*") :][: len(path) - len(expected[1]) + 1]
        assert rank_file(path) == RankFile(path, *expected, digits)


def test_missing_files_are_named_like_their_siblings() -> None:
    """Each family should have a file of every rank, with as many digits."""
    (found,) = find_sets(["w_rank_00.pt", "w_rank_02.pt", "optim_rank_01.pt", "notes.txt"])
    assert [file.path for file in found.files] == ["w_rank_00.pt", "w_rank_02.pt", "optim_rank_01.pt"]
    assert (found.world_size, found.is_stated) == (3, False)
    assert found.missing == ("w_rank_01.pt", "optim_rank_00.pt", "optim_rank_02.pt")


def test_a_stated_world_size_counts_missing_last_ranks() -> None:
    """With the world size in the name, also the last files are missed."""
    (found,) = find_sets(["model_world_size_4_rank_0.pt", "model_world_size_4_rank_1.pt"])
    assert found.missing == ("model_world_size_4_rank_2.pt", "model_world_size_4_rank_3.pt")


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("stray", ["m_rank_0.pt", "m_rank_00.pt", "m_rank_000.pt", "m_rank_0000.pt", "m_rank_010.pt"])
def test_a_rank_has_one_spelling(width: int, stray: str) -> None:
    """That of the other files, however many digits those of higher ranks have."""
    names = [f"m_rank_{rank:0{width}d}.pt" for rank in range(120)]
    if stray in names:
        return
    (found,) = find_sets([stray, *names])
    assert [file.path for file in found.files] == names
    assert found.strays == (stray,)
    assert not found.missing
