"""HDF5: Keras' ``.h5``, ``.weights.h5`` and ``.keras``."""
