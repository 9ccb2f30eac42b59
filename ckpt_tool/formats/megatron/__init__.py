"""Megatron checkpoints: ``torch_dist``, legacy per-rank files, and the zarr folders of mcore 0.8 to 0.15.

Names are the same for every container, so that checkpoints of two of them compare tensor by tensor:

- a weight is ``model.<key>``, the key being the one that mcore's distributed checkpoints have
  (``model.decoder.layers.mlp.linear_fc1.weight``): Transformer Engine's names, whichever spec the model ran with;
- its optimizer state is ``optimizer.state.<slot>.<key>`` with the slots ``param`` (the fp32 master, called
  ``fp32_param`` or ``master_param`` by some versions), ``exp_avg``, ``exp_avg_sq``, in the shape of the weight: buckets
  and flattened ranges are decoded, their alignment gaps belong to nobody;
- layers are stacked as mcore stacks them, ``[L, ...]`` and experts ``[L, E, ...]``, with global numbers; where layers
  differ they have a name each, ``model.decoder.layers.3.<...>``, as mcore does then;
- gate and up are the halves of ``linear_fc1.weight``, not interleaved by tensor-parallel rank; qkv is as stored;
- an object keeps its key: ``rng_state/shard_0.0_2.2``, ``model.<key>._extra_state/shard_0_4``; what the common state
  holds has its place in it: ``args``, ``iteration``, ``optimizer.optimizer.param_groups.0.lr``.
"""
