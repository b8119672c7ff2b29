"""Measures a machine and fits the constants of a cluster file to it (`autoptd profile`). Import `measure`
for the points, `fit` for the cluster, `toml` for its file, `report` for their comparison. Imports cost
models and the runtime's communicators, never passes, plans or the search.
"""
