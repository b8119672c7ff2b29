"""A smaller model and plan in place of those too large for one process: narrower, with fewer layers, same decisions.
Import `smaller` (`subject_of`, `Subject`). This package imports neither `verdict` nor `cli`.
"""
