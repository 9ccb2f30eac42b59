"""NumPy's ``.npz``: a zip of ``.npy`` files."""
