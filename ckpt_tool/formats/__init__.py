"""On-disk formats: one module or folder each, over the container readers ``_zip`` and ``_pickle``."""
