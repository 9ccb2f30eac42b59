"""torch-checkpointing: one file per item and rank, and a pickle of plain data that says how tensors are placed."""
