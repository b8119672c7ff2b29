"""Answers to questions about plans, each made of several searches: sweeps, time against memory,
sensitivity, the cost of a constraint, and why nothing fits. All are built on `query`.
"""
