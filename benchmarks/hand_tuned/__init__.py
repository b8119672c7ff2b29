"""Plans that others tuned by hand against those that a free search finds, both predicted by the same model.

`python -m benchmarks.hand_tuned FILE.jsonl`, of the runs that `benchmarks.published` reads. Predicted gains, no
measurement: `docs/hand_tuned.md` has the figures, and where plans differ, why.
"""
