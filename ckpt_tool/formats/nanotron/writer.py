"""The writer of nanotron: every parameter whole in a file of its own, with the slices that it is.

nanotron cuts parameters itself as it loads them: where a rank does not find a file of its own place in the mesh, it
takes what all files of a parameter hold by their slices. Whole parameters therefore fit jobs of any size, while parts
would be loaded as they are by jobs of as many ranks, whatever rows of a fused weight these expect. A parameter that
nanotron never cuts has a file without ranks in its name. Source: nanotron 0.4, ``serialize/weights.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from ckpt_tool.errors import LayoutError, Unsupported
from ckpt_tool.formats._element_types import check_types
from ckpt_tool.formats._safetensors.header import build_header, has_type
from ckpt_tool.formats._whole import whole_rows
from ckpt_tool.formats.base import LayOut, Segment, WriteRequest
from ckpt_tool.formats.nanotron.location import METADATA, ONE_RANK, model_file
from ckpt_tool.manifest.model import FileEntry
from ckpt_tool.sizes import counted, counted_of

__all__ = ["WRITER", "NanotronWriter"]

_VERSION = "1.2"
"""That of the one published release, which refuses newer ones; parameters are described alike up to 1.5."""
# As nanotron's models call what its tensor-parallel layers have, and what its other layers have.
_CUT = re.compile(
    r"\.(?:token_embedding|lm_head(?:\.pp_block)?|[qkv]_proj|qkv_proj|o_proj|gate_proj|up_proj|gate_up_proj|down_proj)"
    r"\.weight|\.(?:[qkv]_proj|qkv_proj|gate_proj|up_proj|gate_up_proj)\.bias"
)
_NOT_CUT = re.compile(r"norm\w*(?:\.pp_block)?\.(?:weight|bias)")
_SHOWN = 3


class NanotronWriter:
    """Lays out ``model/<module>/model_<leaf>*.safetensors``; ``checkpoint_metadata.json`` is written last."""

    name = "nanotron"
    per_rank = False

    def lay_out(self, request: WriteRequest) -> LayOut:
        """All files.

        Raises:
            Unsupported: names that are not nanotron's, state of an optimizer, objects, dtypes that safetensors lacks.
            LayoutError: tensors that are cut, or of which it is unknown whether nanotron cuts them.
        """
        tensors, boxes = request.tensors, request.boxes
        _check(request)
        whole_rows(request, "a checkpoint written for nanotron")
        known = request.info.get("cut_parameters")
        starts, entries, segments = [], [], []
        for meta in tensors:
            is_cut = _is_cut(meta.fqn) if known is None else meta.fqn in known
            path = _path(meta.fqn, ONE_RANK if is_cut else "")
            data, header = build_header([("data", meta.dtype, meta.shape)], _said(meta.shape, path))
            starts.append(header.data_start)
            entries.append(FileEntry(path, header.data_start + header.payload_nbytes))
            segments.append(Segment(path, 0, data))
        text = (json.dumps(_metadata(request.info), indent=2, sort_keys=True) + "\n").encode()
        note = (
            "weights alone: nanotron starts from them with model.init_method.path, beside the model's own config.yaml"
        )
        manifest = request.manifest(
            self.name,
            [*entries, FileEntry(METADATA, len(text))],
            file=boxes.tensor,
            offset=np.array(starts, dtype=np.int64)[boxes.tensor],
            notes=[note],
        )
        return LayOut(manifest, (*segments, Segment(METADATA, 0, text)), METADATA)


def _check(request: WriteRequest) -> None:
    """Nothing, when these are parameters under nanotron's names.

    Raises:
        Unsupported: they are not.
    """
    others = [fqn for fqn in request.tensors.fqns if ".pp_block." not in fqn]
    if others:
        shown = ", ".join(others[:_SHOWN])
        raise Unsupported(
            f"{counted_of(len(others), len(request.tensors), 'tensor', 'do')} not have nanotron's names: {shown}",
            hint="names are like model.decoder.0.pp_block.attn.o_proj.weight; where SRC has such, --names source keeps "
            "them and --exclude leaves others out, else rules make them (--naming)",
        )
    names = [*(fqn for fqn in request.tensors.fqns if fqn.startswith("optimizer.")), *(b.fqn for b in request.blobs)]
    if names:
        shown = ", ".join(names[:_SHOWN])
        raise Unsupported(
            f"nanotron is written its weights, the source has {counted(len(names), 'other entry')}: {shown}",
            hint="leave out --all",
        )
    check_types(request.tensors, "safetensors has no such type:", has_type)


def _is_cut(fqn: str) -> bool:
    """Whether nanotron's tensor-parallel ranks cut a parameter of this name.

    Raises:
        LayoutError: the name does not tell.
    """
    is_cut = _CUT.search(fqn) is not None
    if not is_cut and _NOT_CUT.search(fqn) is None:
        raise LayoutError(
            "nanotron looks for another file where its tensor-parallel ranks cut a parameter, and this name does not "
            "tell whether they do",
            where=fqn,
            hint="leave it out with --exclude, or start from a checkpoint that nanotron saved",
        )
    return is_cut


def _path(fqn: str, ranks: str) -> str:
    """The file of a parameter.

    Raises:
        Unsupported: no file can be called so.
    """
    module, _, leaf = fqn.rpartition(".")
    path = f"model/{module.replace('.', '/')}/model_{leaf}{ranks}.safetensors"
    found = model_file(path)
    if found is None or found.name != fqn or not all(part.strip(".") for part in path.split("/")):
        raise Unsupported("no file of nanotron's can be called so", where=fqn, hint="leave it out with --exclude")
    return path


def _said(shape: tuple[int, ...], path: str) -> dict[str, str]:
    """Metadata of a file, where nanotron has some."""
    if ONE_RANK not in path:
        return {}
    whole = "|".join(f"0,{size},None" for size in shape)
    return {"version": _VERSION, "local_global_slices_pairs": f"{whole}#{whole}", "unsharded_shape": str(tuple(shape))}


def _metadata(info: Mapping[str, Any]) -> dict[str, Any]:
    """``checkpoint_metadata.json``: what the source's says of the run, else a run at its start."""
    said = info.get("metadata")
    known = said if isinstance(said, dict) and isinstance(said.get("metas"), dict) else {}
    start: dict[str, Any] = {
        "consumed_train_samples": 0, "last_train_step": 0, "consumed_tokens_total": 0, "last_stage_idx": None,
        "data_stages": [],
    }  # fmt: skip
    return {
        "version": _VERSION,
        "tp": 1,
        "dp": 1,
        "cp": 1,
        "metas": known.get("metas", start),
        "custom_metas": known.get("custom_metas"),
    }


WRITER = NanotronWriter()
