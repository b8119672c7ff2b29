"""Measurements on one GPU: parity of all kinds of plans, rates of kernels, time and memory of steps, tokens/s."""
