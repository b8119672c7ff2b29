"""Emitted programs against the same training written with PyTorch's own parts: time and memory of a step, on gloo."""
