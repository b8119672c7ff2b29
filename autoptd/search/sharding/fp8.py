"""Products in fp8: which ops of a graph they are, and the kernels that convert their operands.

    products    with a weight, inside the repeated blocks, unless their result is at once converted to float32 (routers)
    the rest    attention, norms, embedding, head and loss stay in the compute type (Micikevicius et al. 2022, "FP8
                formats for deep learning", section 4; NVIDIA's Transformer Engine)

An operand is read in the compute type and written twice in fp8, once transposed, since its parts are scaled along the
dim that a product sums over, and the gradients' products sum over another. Weights are converted once a step, which
costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from autoptd.cost_models.op_time import OpWork
from autoptd.passes.analysis.flops import CASTS, work
from autoptd.passes.fold import Folded, Segment
from autoptd.passes.graph import infos, op_call, operands

# bytes moved per element of a converted operand: read once (per-tensor scales: twice, since the maximum comes first),
# written twice
CONVERTED_BYTES = {"mxfp8": 2 + 2, "block": 2 + 2, "tensor": 4 + 2}


def fp8_products(folded: Folded) -> frozenset[fx.Node]:
    """Return the products that an fp8 recipe computes in fp8."""
    repeated = {i for unit in folded.units if unit.count > 1 for i in range(unit.first, unit.last + 1)}
    kinds = {s.kind for s in folded.segments if s.index in repeated or not repeated}
    segments = [s for kind, s in folded.representatives.items() if kind in kinds]
    return frozenset(n for s in segments for n in s.nodes if n.op == "call_function" and _is_fp8(n, s))


def _is_fp8(node: fx.Node, segment: Segment) -> bool:
    if isinstance(node.meta["info"], tuple) or work(op_call(node)).kind != "matmul" or len(operands(node)) < 2:
        return False
    weight = operands(node)[1]
    while weight.op == "call_function" and work(op_call(weight)).kind == "view" and operands(weight):
        weight = operands(weight)[0]
    is_float = infos(node)[0].dtype.itemsize == 2
    widened = any(u.target in CASTS and infos(u)[0].dtype.itemsize > 2 for u in node.users)
    return weight in segment.parameters and is_float and not widened


def saved_in_fp8(segment: Segment) -> Iterator[str]:
    """Yield the tensors that only products in fp8 read, so that they alone save them, converted."""
    products = {n for n in segment.nodes if n.op == "call_function" and _is_fp8(n, segment)}
    for node in {operands(n)[0] for n in products}:
        if node not in segment.sends and products.issuperset(node.users):
            yield node.name


def conversion(elements: float, recipe: str, *, backward: bool = False) -> OpWork:
    """Return the kernel that converts an operand of so many elements."""
    return OpWork("memory", 0, elements * CONVERTED_BYTES[recipe], "bf16", backward=backward)
