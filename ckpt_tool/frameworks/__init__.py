"""Live tensors of the training frameworks, and the boxes of global tensors that they hold. Imports torch."""
