"""Constraints that a user sets by hand: the options of `fix=` and `include=`, the names in them found
in a graph, and those without effect. Imports passes, nothing else of the search.
"""
