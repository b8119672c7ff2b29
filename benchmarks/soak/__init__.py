"""Faults drawn at random against a training job of four real processes: `python -m benchmarks.soak --help`."""
