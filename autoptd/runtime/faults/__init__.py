"""Faults of a job: heartbeats, the watchdog that ends all ranks with the first cause, and the origin
of values that are not finite.
"""
