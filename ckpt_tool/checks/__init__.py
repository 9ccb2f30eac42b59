"""Verification: what is wrong with a checkpoint, told from its manifest, its headers and its bytes."""
