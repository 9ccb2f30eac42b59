"""What is known of the formats that are no framework's own training state: arrays, exports, other ecosystems."""

from __future__ import annotations

from ckpt_tool.api.formats.proofs import Proof, read, written

__all__ = ["OTHERS"]


_BELOW = {"orbax_zarr2": "/3", "orbax_zarr3": "/3", "orbax_plain": "/3", "orbax_files": "/3", "orbax_manager": "/3"}


def _zoo(program: str, **checkpoints: str) -> tuple[Proof, ...]:
    """Proofs of reading checkpoints of the archive that they share."""
    folders = {what: f"zoo/checkpoints.tar.xz!{name}/ckpt{_BELOW.get(name, '')}" for what, name in checkpoints.items()}
    return read(program, **folders)


OTHERS: dict[str, tuple[str, tuple[Proof, ...]]] = {
    "orbax": (
        "Orbax (JAX): OCDBT or files, zarr 2 or 3",
        (
            *_zoo(
                "orbax-checkpoint 0.12.8",
                zarr_2_in_OCDBT="orbax_zarr2",
                zarr_3_in_OCDBT="orbax_zarr3",
                not_compressed="orbax_plain",
                files="orbax_files",
                items_of_a_manager="orbax_manager",
            ),
            *_zoo("tensorstore 0.1.86", shards_of_several_pieces="ocdbt_tall", nodes_not_compressed="ocdbt_raw"),
            Proof("reads", "tensorstore 0.1.86", "Blosc and bz2, columns first", "tests/consumers/test_orbax.py"),
            Proof(
                "writes for",
                "orbax-checkpoint 0.12.8",
                "StandardCheckpointer, CheckpointManager, restore over 8 devices",
                "tests/consumers/test_orbax.py",
            ),
        ),
    ),
    "nanotron": (
        "nanotron: parameters and optimizers read, parameters written, which it cuts itself",
        (
            *read("nanotron 0.4", TP_and_PP_with_ZeRO_1="nanotron/checkpoints.tar.xz!tp2_pp2_dp3/ckpt"),
            *_zoo("nanotron's layout, by its source", metadata_1_5="nanotron_tp2_dp2", one_rank="nanotron_plain"),
            Proof(
                "writes for",
                "nanotron 0.4",
                "load_weights on other tensor ranks and stages, on CPU",
                "tests/consumers/test_nanotron.py",
            ),
        ),
    ),
    "torchsnapshot": (
        "torchsnapshot",
        (
            *_zoo("torchsnapshot 0.1.0", slabs="torchsnapshot_slabs", files="torchsnapshot_files"),
            Proof(
                "writes for",
                "torchsnapshot 0.1.0",
                "Snapshot.restore of modules, optimizers and ShardedTensor on 1 to 4 ranks",
                "tests/consumers/test_torchsnapshot.py",
            ),
        ),
    ),
    "consolidated": (
        "Meta's consolidated.NN.pth with params.json, joined; written in any number of files",
        (
            *_zoo(
                "fairscale's layers",
                embedding_cut_by_columns="consolidated_llama2",
                grouped_queries_and_rows_of_the_vocabulary="consolidated_llama3",
            ),
            written("torch 2.13.0", "torch.load of each file, as fairscale cuts it", "consolidated/test_writer.py"),
        ),
    ),
    "gguf": (
        "GGUF (llama.cpp); quantised blocks as what they are, nothing is quantised",
        (
            *_zoo("gguf 0.19.0", plain_and_quantised="gguf_mixed", split="gguf_split", big_endian="gguf_big"),
            written("gguf 0.19.0", "GGUFReader", "gguf/test_writer.py"),
        ),
    ),
    "flax-msgpack": (
        "Flax's MessagePack: flax_model.msgpack, checkpoint_N",
        _zoo("flax 0.12.8", state="flax_state", model_in_two_files="flax_parts"),
    ),
    "hdf5": (
        "HDF5: Keras' .h5, .weights.h5 and .keras (with the extra h5)",
        (
            *_zoo("keras 3.15.1", h5="keras_h5", weights_h5="keras_weights", keras="keras_v3"),
            *_zoo("h5py 3.16.0", chunks_and_filters="hdf5_odd"),
        ),
    ),
    "npz": (
        "NumPy's .npz",
        (
            *_zoo("numpy 2.4.6", savez="npz_plain", savez_compressed="npz_deflated"),
            written("numpy 2.4.6", "numpy.load", "npz/test_writer.py"),
        ),
    ),
}
