"""Measuring a machine: `measure` gives a `Record` of timed points, `fit` the `Cluster` whose models explain them."""
