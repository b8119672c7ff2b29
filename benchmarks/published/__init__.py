"""Predicted against measured published training runs, planned by `autoptd.plan` with every choice of theirs fixed.

`python -m benchmarks.published FILE.jsonl` reads one run per line: shape of the model, devices and links, plan, and
measured figures. `benchmarks/README.md` explains the format and the report.
"""
