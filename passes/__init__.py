"""Passes over an fx graph: `trace`, then `normalise`, then `fold`; rules and analyses that the search
reads. Imports `layout` and `ops`, never the runtime or the search.
"""
