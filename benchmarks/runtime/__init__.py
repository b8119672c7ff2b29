"""Time and memory of a training step: emitted programs against the same training by hand in PyTorch, on gloo."""
