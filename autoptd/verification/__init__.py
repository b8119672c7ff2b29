"""Verification of a plan on a CPU before it runs: all its ranks in one process, in float64, beside the plain model.

Import `verdict` (`verify_plan`) and `report`; `cli` does. This package imports anything below `api`, and never `cli`.

smaller      the smallest model that keeps every decision of the plan (widths, depth, carry)
inputs       uneven batches that the plain model accepts          domains  valid values of each input, from the graph
plain        the user's model alone, in float64, same dropout     keyed    the torch function mode that does this
trial        program, batches and expected steps of a run         ranks    all ranks, one thread each
owners       which rank updates and counts each element           compare  every rank's tensors against the plain ones
locate       the first line, or op of the graph, that is wrong    copies   copies of a model, with its hooks
verdict      the whole verification, and the certificate          report   its text and its JSON
"""
