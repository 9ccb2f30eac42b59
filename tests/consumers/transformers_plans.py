"""Run by a python with transformers: what each of its language models calls its tensors, and how it cuts them.

Prints JSON: ``{"version": ..., "models": {model type: {name: [shape, style]}}}``, for each kind of names (numbers as
``*``) the shape of one, and the style that the model's own plan for tensor parallelism has for it, null where it has
none. Of models that are named as arguments, ``{model type: [config, {name: shape}]}`` instead. Models are made without
memory, with the sizes of their default configurations.
"""

if __name__ == "__main__":
    import json
    import re
    import sys
    import warnings
    from typing import Any

    import torch
    import transformers  # type: ignore[import-not-found]
    from transformers.models.auto import modeling_auto  # type: ignore[import-not-found]

    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    names = {
        **modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        **modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        **modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    }
    models: dict[str, Any] = {}
    wholes: dict[str, Any] = {}
    for model_type, class_name in names.items():
        if sys.argv[1:] and model_type not in sys.argv[1:]:
            continue
        try:
            config = transformers.CONFIG_MAPPING[model_type]()
            with torch.device("meta"):
                model = getattr(transformers, class_name)(config)
        except Exception:  # noqa: BLE001 - some have no configuration to begin with
            continue
        if sys.argv[1:]:
            wholes[model_type] = [config.to_dict(), {name: list(t.shape) for name, t in model.state_dict().items()}]
            continue
        plan = getattr(model, "_tp_plan", None) or {}
        kinds = {}
        for name, tensor in model.state_dict().items():
            kind = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
            kinds[kind] = [list(tensor.shape), plan.get(kind) or plan.get(kind.rpartition(".")[0])]
        models[model_type] = kinds
    print(json.dumps(wholes or {"version": transformers.__version__, "models": models}, default=str))
