"""The location of a fault: the first op of a program whose value or gradient differs from the graph's, or the model's.
`verdict` uses `locate` with `recorder` (program against graph), then `graph` (graph against model), then `explain`.
"""
