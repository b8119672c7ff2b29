"""Predicted against measured: published training runs, planned by `autoptd.plan` with their plans fixed.

`python -m benchmarks.published FILE.jsonl`, one run per line: its model's shape, devices and links, plan, and what was
measured. `benchmarks/README.md` explains the format and the report.
"""
