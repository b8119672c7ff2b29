"""Sharding rules: one row per op in a factor notation, the legal strategies that follow from it, and their proof by
execution. Import `lookup` for the rule or strategies of a call and the other modules for their parts; this file exports
nothing. It may import `layout`, `ops` and `passes.opcall`, never `plans`, `search`, `codegen` or `runtime`.
"""
