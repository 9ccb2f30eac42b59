"""Files that torch.save wrote: where every storage lies, and which box of which tensor each pickled tensor is."""
