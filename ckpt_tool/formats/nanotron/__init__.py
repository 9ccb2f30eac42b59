"""nanotron: a safetensors file per parameter and tensor-parallel rank, the optimizer in torch files."""
