"""A running rank: `trainer` holds its stages and `executor` runs its list of actions. Imports
`layout`, `ops` and `schedule`, never passes or the search.
"""
