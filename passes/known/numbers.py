"""Sizes that a function needs as numbers: the trace starts again with these input dims fixed, before it goes on.

A scan halves its steps, so the number of tokens cannot be a symbol. Torch would turn the symbol into its example value
and go on, and the other inputs that count the same tokens would be found at the end of the trace, which is then done
once more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class SizeNeeded(Exception):
    """Raised where a trace with symbols needs numbers. `sizes`: the example values of the symbols."""

    def __init__(self, sizes: frozenset[int]) -> None:
        super().__init__(f"sizes {sorted(sizes)} must be numbers")
        self.sizes = sizes

    def dims(self, specs: Mapping[str, tuple[Any, torch.dtype]]) -> frozenset[tuple[str, int]]:
        """Return the input dims of these sizes, other than those of samples."""
        shapes = {name: shape for name, (shape, _) in specs.items()}
        return frozenset((n, d) for n, shape in shapes.items() for d in range(1, len(shape)) if shape[d] in self.sizes)


def number(size: int | torch.SymInt) -> int:
    """Return a size as a number. Raises SizeNeeded for a symbol, unless it counts samples."""
    if isinstance(size, torch.SymInt) and (symbols := size.node.expr.free_symbols):
        found = [example_of(s, size) for s in symbols]
        if all(found) and not any(of_samples for example in found if example for of_samples in example[1:]):
            raise SizeNeeded(frozenset(example[0] for example in found if example))
    return int(size)


def example_of(symbol: Any, size: torch.SymInt) -> tuple[int, bool] | None:
    """Return what a symbol of a size is in the example, and whether it counts samples; None if no input has it.

    `backed_var_to_val` and `var_to_sources` of torch's ShapeEnv are private (seen in 2.13.0).
    """
    env = size.node.shape_env
    sources = [str(source.name) for source in env.var_to_sources.get(symbol, ())]
    if not sources or symbol not in env.backed_var_to_val:
        return None
    return int(env.backed_var_to_val[symbol]), any(name.endswith(".size()[0]") for name in sources)
