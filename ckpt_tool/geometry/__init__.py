"""Boxes, grids, flat ranges and byte runs: pure integers and columns of them, no files and no tensors."""
