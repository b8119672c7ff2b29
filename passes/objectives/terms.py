"""Named terms of a loss: numbers that a loss function returns beside the one that is minimised.

    loss(outputs, …) ──► {"loss": total, "aux": a, …}
                            │            └─► buffer losses.aux, as forward would write it
                            └──────────────► the scalar to minimise

A term is a buffer of a module that joins the model, and the loss writes it. So a term of a step is what one forward
pass over the whole batch gives, as any buffer that forward updates (`buffer_updates.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autoptd.errors import InputsError

LOSS = "loss"  # key of the scalar to minimise
_OF_MODULES = frozenset(vars(nn.Module())) | {"_held"}


class NamedTerms(InputsError):
    """Signal that a loss returns named terms, whose buffers the traced model does not have yet."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__(
            f"the loss returns {', '.join(map(repr, names))} beside the loss",
            where="loss",
            fix="call it through parallelize, or return the scalar alone",
        )
        self.names = names


class LossTerms(nn.Module):
    """The buffers of a loss's terms, 0-dim float64, which are in no state dict."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self._held = buffers_of(names)
        for held in self._held.values():
            self.register_buffer(held, torch.zeros((), dtype=torch.float64), persistent=False)

    def of(self, loss: Callable[..., Any]) -> Callable[..., Tensor]:
        """Return a loss that keeps its terms here, and returns the scalar."""
        return lambda *args, **kwargs: self(loss(*args, **kwargs))

    def forward(self, value: Any) -> Any:
        """Keep the terms of what a loss returned, and return the scalar; or what it returned, if it has others."""
        found = terms_of(value)
        if found is None or found.keys() != self._held.keys():
            return value
        for name, term in found.items():
            self.get_buffer(self._held[name]).copy_(term.detach())
        return value[LOSS]


def buffers_of(names: Iterable[str]) -> dict[str, str]:
    """Return the names of the buffers of some terms: the terms' own, without dots and apart from a module's."""
    found: dict[str, str] = {}
    for name in names:
        held = name.replace(".", "_")
        while hasattr(LossTerms, held) or held in _OF_MODULES or held in found.values():
            held += "_"
        found[name] = held
    return found


def terms_of(value: Any) -> dict[str, Tensor] | None:
    """Return the terms beside "loss" that a loss returned; None if it returned no such mapping.

    Raises InputsError for a term that is no number or has no name.
    """
    if not isinstance(value, Mapping) or not isinstance(value.get(LOSS), Tensor) or value[LOSS].ndim:
        return None
    terms = {name: x for name, x in value.items() if name != LOSS}
    for name, x in terms.items():
        if not isinstance(name, str) or not name:
            raise InputsError(
                f"the loss returned {name!r} as the name of a term beside the loss",
                where=LOSS,
                fix="name each term by a text, such as 'entropy' or 'rewards/chosen'",
            )
        if not isinstance(x, Tensor) or x.ndim:
            kind = f"a tensor of {x.ndim} dims" if isinstance(x, Tensor) else type(x).__name__
            raise InputsError(
                f"the loss returned {kind} as {name!r} beside the loss",
                where=LOSS,
                fix="return one number of each term, a tensor without dims; values of each sample are metrics, of "
                "par.evaluate",
            )
    return terms
