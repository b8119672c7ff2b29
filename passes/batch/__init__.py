"""Samples in a graph: which dim counts them, and the proof that no op mixes them."""
