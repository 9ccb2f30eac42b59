"""Which rank of a mesh holds which box of which tensor, from rules that are data."""
