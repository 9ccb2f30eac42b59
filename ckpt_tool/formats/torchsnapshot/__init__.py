"""torchsnapshot: a manifest in JSON beside slabs or files of raw bytes."""
