"""What can be believed of a checkpoint: verify, diff, digests held against data, and what can be salvaged."""
