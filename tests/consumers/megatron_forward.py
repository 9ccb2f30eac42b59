"""Run by real Megatron, on the CPU: loads a checkpoint by the arguments in it, and saves the logits of a few tokens.

``launch.py N megatron_forward.py DIR OUT [more arguments]``, beside ``cpu_shim.py`` of the fixtures. With pipeline
stages there is no forward pass: the ranks then save their weights, to be compared with what another layout has.
"""

import cpu_shim  # type: ignore[import-not-found]  # first: it makes Megatron importable without a GPU

if __name__ == "__main__":
    import contextlib
    import logging
    import random
    import sys

    import numpy as np
    import torch

    logging.disable(logging.WARNING)
    folder, out, *more = sys.argv[1:]
    rank, _ = cpu_shim.init_dist()
    sys.argv = [
        "forward", "--load", folder, "--use-checkpoint-args", "--no-load-optim", "--no-load-rng",
        "--seq-length", "32", "--micro-batch-size", "1", "--global-batch-size", "8", "--lr", "1e-3", "--train-iters",
        "10", "--tokenizer-type", "NullTokenizer", "--vocab-size", "64", "--use-cpu-initialization",
        "--transformer-impl", "local", "--no-persist-layer-norm", "--no-gradient-accumulation-fusion",
        "--no-bias-swiglu-fusion", "--no-rope-fusion", "--no-masked-softmax-fusion", "--distributed-backend", "gloo",
        "--no-create-attention-mask-in-dataloader", "--eval-iters", "1", "--moe-token-dispatcher-type", "allgather",
        "--attention-softmax-in-fp32", "--no-bias-dropout-fusion", "--no-bias-gelu-fusion", *more,
    ]  # fmt: skip

    from megatron.core import mpu, tensor_parallel  # type: ignore[import-not-found]
    from megatron.core.models.gpt import GPTModel  # type: ignore[import-not-found]
    from megatron.core.models.gpt.gpt_layer_specs import (  # type: ignore[import-not-found]
        get_gpt_decoder_block_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.num_microbatches_calculator import (  # type: ignore[import-not-found]
        init_num_microbatches_calculator,
    )
    from megatron.core.rerun_state_machine import (  # type: ignore[import-not-found]
        initialize_rerun_state_machine,
    )
    from megatron.training import arguments, checkpointing, global_vars  # type: ignore[import-not-found]

    class PlainAttention(torch.nn.Module):  # type: ignore[misc]
        """Softmax attention of [tokens, batch, heads, width], as its paper has it."""

        def __init__(self, config: object, *_: object, softmax_scale: float | None = None, **__: object) -> None:
            super().__init__()
            self.scale = softmax_scale

        def forward(self, *tensors: torch.Tensor | None, **_: object) -> torch.Tensor:
            """Of queries, keys and values; causal, whatever the mask."""
            states = [x.permute(1, 2, 0, 3) for x in tensors[:3] if x is not None]
            out = torch.nn.functional.scaled_dot_product_attention(*states, is_causal=True, scale=self.scale)
            return out.permute(2, 0, 1, 3).flatten(2)

    args = arguments.parse_args()
    args, stored = checkpointing.load_args_from_checkpoint(args)
    for name, value in vars(stored).items():  # Megatron takes over a part of what shapes a model
        if name != "rank" and not any(word in name for word in ("parallel", "world", "_shards", "save", "ckpt")):
            setattr(args, name, value)
    arguments.validate_args(args, {})
    global_vars.set_args(args)
    init_num_microbatches_calculator(0, None, args.global_batch_size, args.micro_batch_size, args.data_parallel_size)
    initialize_rerun_state_machine()
    mpu.initialize_model_parallel(
        args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
    )  # fmt: skip
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002 - Megatron's own generator
    torch.manual_seed(1)
    tensor_parallel.random.initialize_rng_tracker()
    tracker = tensor_parallel.get_cuda_rng_tracker()
    type(tracker).fork = lambda _self, *_names: contextlib.nullcontext()  # nothing is drawn without dropout

    config = arguments.core_transformer_config_from_args(args)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=args.normalization)
    if args.multi_latent_attention:  # Megatron's own attention has no values of another width than keys
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = PlainAttention
    mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if args.mtp_num_layers else None
    model = GPTModel(
        config, spec, args.padded_vocab_size, args.max_position_embeddings,
        pre_process=mpu.is_pipeline_first_stage(), post_process=mpu.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type, rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base, rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor, mtp_block_spec=mtp,
    )  # fmt: skip
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    checkpointing.load_checkpoint([model], None, None)
    lost = [name for name, parameter in model.named_parameters() if parameter.isnan().any()]
    if lost:
        raise SystemExit(f"not loaded: {lost}")
    model.eval()
    if args.pipeline_model_parallel_size == 1:
        ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
        mask = torch.ones(8, 8).triu(1).bool()[None, None]
        with torch.no_grad():
            logits = model(ids, torch.arange(8)[None], mask)[0].float()
        parts = [torch.empty_like(logits) for _ in range(args.tensor_model_parallel_size)]
        torch.distributed.all_gather(parts, logits, group=mpu.get_tensor_model_parallel_group())
        if rank == 0:
            np.save(out, torch.cat(parts, -1).numpy().reshape(-1, args.padded_vocab_size))
    if rank == 0:
        print("FORWARD OK")
    torch.distributed.barrier()
