"""Answers about plans: sweeps, time against memory, sensitivity, why nothing fits, why an op is split as it is."""
