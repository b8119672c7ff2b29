"""Traced models on disk, so that a command that only plans an unchanged model needs no trace: `cached.py` finds and
keeps traces, `folder.py` has their files, `depends_on.py` what makes one invalid, `to_bytes.py` and `equal.py` exact
copies of graphs. Only `cli` uses it. It may import `compile` and all below it, never the API.
"""
