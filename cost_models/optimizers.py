"""State and work of an optimizer's update, by the optimizer's name.

    n     elements of a parameter
    r, c  rows and columns of a matrix, or of each in a stack (a vector has neither)

State is counted in elements of the main dtype: `2 n` are Adam's two moments, `n/r + n/c` Adafactor's two vectors.

Muon multiplies a matrix of r ≤ c (else its transpose) in each of 5 Newton-Schulz iterations: X Xᵀ and its product with
X take 2 r² c FLOPs each, the square of X Xᵀ 2 r³ (Jordan et al. 2024, Muon), in bfloat16 in torch 2.13.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class UpdateCost:
    """Costs of one optimizer. `whole`: the parameters that it updates as whole tensors."""

    state: str  # of a parameter
    matrices: str = ""  # of those that it updates as whole tensors and that have two dims or more; "": as others
    whole: Literal["none", "hidden", "all"] = "none"
    iterations: int = 0  # Newton-Schulz iterations for each of these matrices

    def elements(self, shape: Sequence[int], whole: bool) -> int:
        """Return the elements of state of a parameter, which is updated as a whole tensor or not."""
        text = self.matrices if whole and len(shape) > 1 and self.matrices else self.state
        return state_elements(text, shape)

    def flops(self, shape: Sequence[int]) -> int:
        """Return the FLOPs of the products in the update of a whole parameter."""
        if len(shape) < 2 or not self.iterations:
            return 0
        rows, columns = sorted(shape[-2:])
        return self.iterations * math.prod(shape[:-2]) * (4 * rows**2 * columns + 2 * rows**3)

    @property
    def moments(self) -> int:
        """Elements of state per element of a parameter that is not updated as a whole tensor."""
        return state_elements(self.state, (1,))


def state_elements(text: str, shape: Sequence[int]) -> int:
    """Return the value of an expression such as `2 n` or `n/r + n/c` for a parameter. Raises ValueError."""
    n, (rows, columns) = math.prod(shape), (1, *shape)[-2:]
    values = {"n": n, "n/r": n // max(1, rows), "n/c": n // max(1, columns), "0": 0}
    total = 0
    for term in text.split(" + "):
        factor, _, symbol = term.rpartition(" ")
        if symbol not in values:
            raise ValueError(f"unknown term {term!r} in {text!r}; known: {', '.join(values)}")
        total += int(factor or 1) * values[symbol]
    return total


UPDATE_COSTS: Mapping[str, UpdateCost] = {
    "adamw": UpdateCost("2 n"),
    "sgd": UpdateCost("0"),
    "lion": UpdateCost("n"),
    "adafactor": UpdateCost("n", "n/r + n/c", "all"),
    "muon": UpdateCost("2 n", "n", "hidden", 5),
    # of one's own: as much state as AdamW
    "custom": UpdateCost("2 n"),
    "custom-whole": UpdateCost("2 n", whole="all"),
}
