"""Orbax: JAX checkpoints as zarr arrays, in files of their own or in an OCDBT database."""
