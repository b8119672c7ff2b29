"""Shardings as data (a strategy per op, a placement per tensor and their text form in plans), and the graph of one cp
rank. Import from its modules; this file exports nothing. It may import `cost_models`, `layout`, `ops` and the rest of
`passes`, never `plans`, `search`, `codegen` or `runtime`.
"""
