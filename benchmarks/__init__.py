"""Benchmarks of planning, prediction, search and execution; `make bench` runs `python -m benchmarks`.

They may import all of autoptd, and each other; autoptd imports none of them. `benchmarks/README.md` lists the commands.
"""
