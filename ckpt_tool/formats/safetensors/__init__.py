"""safetensors files: one, several with or without an index, torch's sharded ones, and one per rank."""
