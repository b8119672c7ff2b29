"""Random faults injected into a training job of four real processes: `python -m benchmarks.soak --help`."""
