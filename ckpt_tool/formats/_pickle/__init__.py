"""Pickles as data: read into inert records, walked, and written back, without importing what they name."""
