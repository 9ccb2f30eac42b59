"""Meta's and Mistral's own files: ``consolidated.NN.pth`` with ``params.json``."""
