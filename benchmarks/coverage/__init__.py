"""Coverage: which models of installed libraries train in parallel at parity, and which are refused, with the reason.

    library's classes ──tiny configuration──► model, batch ──► trace, plan, run all ranks beside one process ──► Outcome

Each model runs in a process of its own with a time limit. `python -m benchmarks.coverage` writes docs/coverage.md.
"""
