"""A smaller model and plan for those too large to run in one process: narrower widths, fewer layers,
the same decisions.
"""
