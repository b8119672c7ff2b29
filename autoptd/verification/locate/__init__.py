"""The first op of a program whose value or gradient is not what the graph, or the model, computes."""
