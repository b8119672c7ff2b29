"""Cost models: seconds and bytes from formulas, for ops on a device, collectives on a cluster's links, the memory of a
rank, and a simulated training step. Import from its modules; this file exports nothing. It may import `errors`,
`outputs` and `schedule`, nothing that has graphs (`passes`) or plans.
"""
