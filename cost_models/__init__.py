"""Seconds and bytes from formulas: ops on a device, collectives on a cluster's links, memory of a
rank, and the simulated step. Knows neither graphs nor plans.
"""
