"""Names under which models of transformers are published, for tensors that have other names while it runs them.

Transformers 5 keeps the experts of a layer in one tensor, and ``save_pretrained`` takes them apart again; a checkpoint
of a job has them as they were in memory. The model's config says which model it is; without one, names have to.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpt_tool.api.convert.hf_names import HfNames
from ckpt_tool.api.convert.names_options import check_used
from ckpt_tool.layout.naming_match import misfits, rules_of_name
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.sizes import counted

if TYPE_CHECKING:
    from ckpt_tool.api.convert.names_options import NamesOptions
    from ckpt_tool.layout.naming_rules import Naming
    from ckpt_tool.layout.views import View

__all__ = ["ENDS_IN_ONE", "in_memory", "is_in_one", "is_published", "published_names", "unpublished_note"]

_OF_EXPERTS = ".experts."
ENDS_IN_ONE = (".experts.gate_up_proj", ".experts.up_proj")
"""Of names of tensors that hold all experts of a layer."""
_INPUT_LINEAR = ".block_sparse_moe.input_linear."


def published_names(
    manifest: Manifest,
    names: Sequence[tuple[str, str]],
    info: Mapping[str, Any],
    wanted: NamesOptions,
    *,
    keep: Sequence[str] = (),
) -> HfNames | None:
    """Tensors under their published names, the others under those of the module; None where nothing is known to differ.

    Args:
        manifest: the tensors, resolved.
        names: of each of them, but those of ``keep``, the full name and the one that the module gives it.
        info: what the checkpoint records, its ``model_type`` among it.
        wanted: what the user says.
        keep: tensors that stay as they are, behind the others.

    Raises:
        LayoutError: two tensors would have one name, or a shape does not fit.
        UsageError: facts were given, which no such names need.
    """
    naming, evidence = _chosen([name for _, name in names], info, wanted)
    if naming is None:
        return None
    found = (next(rules_of_name(naming, fqn, name), None) for fqn, name in names)
    matches = [each for each in found if each is not None]
    if not matches:
        return None
    check_used(wanted)
    from ckpt_tool.layout.naming import rename
    from ckpt_tool.layout.origins import renaming_views
    from ckpt_tool.layout.views import apply_views

    shapes = dict(zip(manifest.tensors.fqns, manifest.tensors.shapes, strict=True))
    renaming = rename(naming, matches, shapes, {}, is_whole=False)
    made: dict[str, list[View]] = defaultdict(list)
    for view in renaming.views:
        made[view.parts[0].source_fqn].append(view)
    views = [
        replace(view, path=(view.fqn,))
        for fqn, name in names
        for view in made.get(fqn) or renaming_views(manifest, [(fqn, name)])
    ]
    note = f"{counted(len(matches), 'tensor', 'become')} {len(renaming.views):,}, as the model is published: {evidence}"
    shown = apply_views(manifest, views, keep=keep)
    views += renaming_views(manifest, [(fqn, fqn) for fqn in keep])
    return HfNames(shown, (), (note, *renaming.notes), tuple(views), {})


def is_in_one(names: Sequence[str]) -> bool:
    """Whether experts of a layer are one tensor among these, as transformers 5 has them in memory."""
    return any(name.endswith(ENDS_IN_ONE) for name in names)


def is_published(names: Iterable[str]) -> bool:
    """Whether experts are apart among these, or all in one under a published name of theirs."""
    return any((_OF_EXPERTS in name and _is_numbered(name)) or _INPUT_LINEAR in name for name in names)


def unpublished_note(names: Sequence[str], info: Mapping[str, Any], wanted: NamesOptions) -> str | None:
    """What to say where experts keep the names that they have in memory, and nothing tells how they are published."""
    if wanted.family == "none" or not is_in_one(names):
        return None
    if _chosen(names, info, wanted)[0] is not None:
        return None
    model_type = info.get("model_type")
    whose = "nothing tells which model it is" if model_type is None else f"nothing is known of {model_type}"
    return (
        f"experts are one tensor in each layer, as transformers 5 has them in memory, and {whose}: their names are "
        "kept; --family qwen_moe or mixtral gives a tensor for each, as such models are published"
    )


def in_memory(manifest: Manifest, wanted: Sequence[str]) -> Manifest | None:
    """A published model's tensors as transformers has them in memory; None where nothing is known to differ.

    Args:
        manifest: of the published model, resolved.
        wanted: names that a live state has; where no config says which model it is, they have to, if there are some.

    Raises:
        LayoutError: an expert, or a part of one, is missing.
    """
    from ckpt_tool.layout.naming_back import rename_back, reversed_names
    from ckpt_tool.layout.naming_rules import published_namings
    from ckpt_tool.layout.views import apply_views

    shapes = dict(zip(manifest.tensors.fqns, manifest.tensors.shapes, strict=True))
    model_type = manifest.info.get("model_type")
    namings = list(published_namings().values())
    of_type = [naming for naming in namings if model_type in naming.model_types]
    ends = tuple({name[name.rfind("layers.") :] for name in wanted})
    for naming in of_type or namings:
        own = reversed_names(naming, shapes)
        if not own:
            continue
        renaming = rename_back(naming, {fqn: shapes[fqn] for fqn in own}, {}, n_rows={})
        if of_type or not wanted or any(view.fqn.endswith(ends) for view in renaming.views if _OF_EXPERTS in view.fqn):
            views = [replace(view, path=(view.fqn,)) for view in renaming.views]
            return apply_views(manifest, views, keep=[fqn for fqn in shapes if fqn not in own])
    return None


def _chosen(names: Sequence[str], info: Mapping[str, Any], wanted: NamesOptions) -> tuple[Naming | None, str]:
    """The naming of a model, and how it was told."""
    if wanted.family == "none" or not is_in_one(names):
        return None, ""
    from ckpt_tool.layout.naming_rules import published_namings  # few models need it

    known = published_namings().values()
    if wanted.family != "auto":
        return next((each for each in known if each.family == wanted.family), None), f"--family {wanted.family}"
    model_type = info.get("model_type")
    if model_type is not None:
        naming = next((each for each in known if model_type in each.model_types), None)
        return naming, f"model_type is {model_type} in config.json"
    readings = [(name,) for name in names]
    fitting = [naming for naming in known if not naming.only_asked and not misfits(naming, readings)]
    if len(fitting) != 1:
        return None, ""
    return fitting[0], f"names are those that {fitting[0].family} has in transformers 5"


def _is_numbered(name: str) -> bool:
    """Whether it is of one expert.

    >>> _is_numbered("layers.0.mlp.experts.3.up_proj.weight"), _is_numbered("layers.0.mlp.experts.up_proj")
    (True, False)
    """
    return name.partition(_OF_EXPERTS)[2].partition(".")[0].isdecimal()
