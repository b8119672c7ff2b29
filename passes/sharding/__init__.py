"""Decisions about a graph as data: a strategy per op and a placement per tensor, and the graph of one
context-parallel rank.
"""
