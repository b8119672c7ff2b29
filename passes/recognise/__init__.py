"""Ops of torch that a model spells out: attention of shared keys, norms.

Each pass replaces the result of a chain of ops by the one op that computes the same function, with the same roundings
to the types that the model names. A chain that differs in any of that stays as it is. `returned_operands` finds ops
that change nothing.
"""
