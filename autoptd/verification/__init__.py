"""Prove a plan on a CPU before it runs: all ranks in one process, in float64, beside the plain model.

smaller      the least model that still has all that the plan decides (widths, depth, carry, copies)
inputs       uneven batches that the plain model takes     domains what an input may hold, read off the graph
plain        the user's own model alone, in float64 with the same dropout (keyed)
trial        what is run                                   ranks   every rank, one thread each
owners       who updates and counts each element           compare every rank's tensors beside the plain ones
graph        where the traced graph is not the model
recorder     values and gradients of each emitted line     locate  the first that is not what the graph says
verdict      all of it, and the certificate                report  how it reads
"""
