"""Two checkpoints side by side: which tensors differ, how much, where first, and why, as far as bytes tell."""
