"""The state that a target of DeepSpeed holds: a request's tensors and objects by the part that they play in it.

Names are those of the module, without what stands for the module in the source's. Knows no file and no layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckpt_tool.errors import Unsupported
from ckpt_tool.formats._torch_file.objects import check_objects
from ckpt_tool.formats._torch_file.written import blob_entry
from ckpt_tool.formats.deepspeed.affine import Pair
from ckpt_tool.formats.deepspeed.vectors import MASTER
from ckpt_tool.manifest.masters import MASTER_STATES, module_names
from ckpt_tool.manifest.model import Blob, KeyPath, Manifest
from ckpt_tool.manifest.optimizer import OptimizerView, ParameterKey, optimizer_views
from ckpt_tool.manifest.tables import ChunkTable, FileTable, TensorTable
from ckpt_tool.records import dataclass, field

__all__ = ["STEP", "Parameter", "TargetGroup", "TargetState"]

STEP = "step"


@dataclass
class Parameter:
    """A trained parameter."""

    name: str
    key: ParameterKey
    """What the source's optimizer calls it."""
    shape: tuple[int, ...] = ()
    states: dict[str, int] = field(default_factory=dict)
    """Tensors of the request, by name of the state; the master is ``fp32``."""
    values: dict[str, Any] = field(default_factory=dict)
    """States that are objects of the request, such as ``step``."""
    shard: tuple[Pair, ...] = ()
    """Of one tensor-parallel rank's part: its boxes, in its own coordinates and the tensor's; none for all of it."""


@dataclass(frozen=True)
class TargetGroup:
    """Parameters that share hyperparameters."""

    names: tuple[str, ...]
    hyperparameters: Mapping[str, Any]


@dataclass
class TargetState:
    """Everything that goes into the target."""

    prefix: KeyPath
    """Keys of the optimizer in the source."""
    parameters: dict[str, Parameter] = field(default_factory=dict)
    groups: list[TargetGroup] = field(default_factory=list)
    weights: dict[str, int] = field(default_factory=dict)
    """Tensors of the request by name in the module, buffers too; without those that are masters."""
    lent: dict[str, int] = field(default_factory=dict)
    """Weights in fp32 that are the masters, for want of others."""
    others: list[tuple[KeyPath, int]] = field(default_factory=list)
    """Tensors of the request that are neither weights nor states."""
    optimizer: list[tuple[KeyPath, Any]] = field(default_factory=list)
    """Objects of the optimizer besides its groups."""
    model: list[tuple[KeyPath, Any]] = field(default_factory=list)
    """All other objects; of several ranks' the first."""

    @property
    def step(self) -> int | None:
        """The step of all parameters, None where they have none or differ."""
        steps = {int(own.values[STEP]) if STEP in own.values else None for own in self.parameters.values()}
        return steps.pop() if len(steps) == 1 else None

    @property
    def groups_name(self) -> str:
        """Below which fqn the source has the optimizer's groups."""
        return ".".join(map(str, (*self.prefix, "param_groups")))

    @classmethod
    def of(cls, tensors: TensorTable, blobs: Sequence[Blob], info: Mapping[str, Any]) -> TargetState:
        """The parts of a request.

        Raises:
            Unsupported: no optimizer or several, parameters without names, or without fp32 masters or weights.
        """
        view = _view(tensors, blobs, info)
        found = cls(tuple(view.prefix.split(".")) if view.prefix else ())
        named = view.named()
        by_fqn = module_names(tensors, {key for key in named if isinstance(key, str)})
        found.weights = {name: tensors.index[fqn] for fqn, name in by_fqn.items()}
        values = {blob.fqn: blob.value for blob in blobs}
        for (key, states), original in zip(named.items(), view.parameters, strict=True):
            if isinstance(key, int):
                raise Unsupported(
                    f"the optimizer numbers its parameters, and nothing tells the name of {key}: {view.evidence[-1]}"
                )
            found._add_parameter(Parameter(by_fqn.get(key, key), original), states, tensors, values)
        for group in view.named_groups():
            names = tuple(by_fqn.get(name, name) for name in group.params if isinstance(name, str))
            found.groups.append(TargetGroup(names, group.hyperparameters))
        found._add_rest(tensors, blobs, view)
        return found

    def _add_parameter(
        self, own: Parameter, states: Mapping[str, str], tensors: TensorTable, values: Mapping[str, Any]
    ) -> None:
        for state, fqn in states.items():
            called = MASTER if state in MASTER_STATES else state
            if fqn in tensors.index:
                own.states[called] = tensors.index[fqn]
            elif fqn in values:
                own.values[called] = values[fqn]
        if MASTER not in own.states:
            row = self.weights.get(own.name)
            if row is None or tensors.dtypes[row].name != "float32":
                raise Unsupported(
                    "no fp32 master and no weight in fp32, of which a checkpoint of DeepSpeed is made", where=own.name
                )
            own.states[MASTER] = self.lent[own.name] = self.weights.pop(own.name)
        own.shape = tensors.shape_of(own.states[MASTER])
        self.parameters[own.name] = own

    def _add_rest(self, tensors: TensorTable, blobs: Sequence[Blob], view: OptimizerView) -> None:
        """Everything that is neither a weight nor a parameter's state."""
        placed = {row for own in self.parameters.values() for row in own.states.values()} | set(self.weights.values())
        self.others += [(meta.path, row) for row, meta in enumerate(tensors) if row not in placed]
        stated = {fqn for states in view.parameters.values() for fqn in states.values()}
        groups = self.groups_name
        rest: dict[str, Blob] = {}
        for blob in blobs:
            if blob.fqn not in stated and not f"{blob.fqn}.".startswith(f"{groups}."):
                rest.setdefault(blob.fqn, blob)
        check_objects(list(rest.values()))
        for blob in rest.values():
            path, value = blob_entry(blob)
            is_optimizer = bool(self.prefix) and path[: len(self.prefix)] == self.prefix and len(path) > 1
            (self.optimizer if is_optimizer else self.model).append((path[1:] if is_optimizer else path, value))


def _view(tensors: TensorTable, blobs: Sequence[Blob], info: Mapping[str, Any]) -> OptimizerView:
    nothing = ChunkTable.from_columns(tensor=[], offsets=[], sizes=[], file=[], offset=[], length=[])
    views = optimizer_views(Manifest("", "", tensors, nothing, FileTable(), tuple(blobs), info=info))
    if len(views) != 1:
        raise Unsupported(
            f"a checkpoint of DeepSpeed holds one optimizer's state, there are {len(views):,}",
            hint="write weights alone as safetensors, or a state of another form as dcp",
        )
    return views[0]
