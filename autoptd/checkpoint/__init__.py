"""Checkpoints that any plan can read: written beside training, verified by digests, read as data only.
Imports the runtime's buffers and `plans`.
"""
