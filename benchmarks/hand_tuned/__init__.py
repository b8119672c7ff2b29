"""Hand-tuned plans of published runs against the plans that the search finds, both predicted by the same cost model.

`python -m benchmarks.hand_tuned FILE.jsonl` reads the same files as `benchmarks.published`. Gains are predicted, not
measured; `docs/hand_tuned.md` has the figures and explains where plans differ.
"""
