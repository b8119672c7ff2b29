"""Measurement of a machine and fit of a cluster file's constants to it (`autoptd profile`). Import
`measure` for the points, `fit` for the cluster, `toml` for its file, `report` for their comparison.
Imports cost models and the runtime's communicators, never plans or the search.
"""
