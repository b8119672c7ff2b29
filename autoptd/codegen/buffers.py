"""Source of the method of a stage that computes the new values of its buffers: `update_buffers`."""

from __future__ import annotations

from torch import fx

from autoptd.codegen.body import Body
from autoptd.codegen.expressions import value_text
from autoptd.codegen.loss import count_text, names_of, outer_size_text, part_text, state_text
from autoptd.codegen.quoting import literal
from autoptd.layout.placements import B
from autoptd.passes.fold import Folded
from autoptd.passes.graph import ancestors
from autoptd.passes.held_tensors import updated_buffers
from autoptd.passes.losses.loss_form import is_count, partial_slices
from autoptd.passes.losses.update_form import SUM
from autoptd.passes.sharding.sharding import Sharding


class BufferFunctions:
    """The sums for buffers that a stage returns, `own`, and the new values of the buffers that it holds."""

    def __init__(self, folded: Folded, sharding: Sharding, first: int, last: int) -> None:
        self.folded, self.sharding, self.updates = folded, sharding, folded.updates
        made = {n for s in folded.segments[first : last + 1] for n in s.nodes}
        self.slices = partial_slices(self.updates.sums)
        self.own = [n for n in folded.sums if n in made]
        self.buffers = updated_buffers(folded, first, last)

    def attributes(self) -> list[str]:
        places = tuple(where[:2] for n, where in zip(self.folded.sums, self.slices, strict=True) if n in self.own)
        return [f"    summed = {value_text(places)}"] if places else []

    def method(self) -> list[str]:
        """Return the lines of `update_buffers`."""
        if not self.buffers:
            return []
        traced, updates = self.folded.traced, self.updates
        body = Body(self.sharding, names_of(self.folded, "sums"))
        wanted = ancestors(updates.values[name] for name in self.buffers)
        nodes = [n for n in updates.graph.nodes if n in wanted]
        for node in (n for n in nodes if n.op == "placeholder"):
            body.bind(node, B, self._given(node))
        body.prelude([n for n in nodes if n.op == "call_function"])
        new = [f"{literal(traced.buffers[name])}: {body.held[updates.values[name], B]}," for name in self.buffers]
        lines = ["def update_buffers(self, sums: Tensor, counts: tuple[Tensor, ...]) -> dict[str, Tensor]:"]
        lines.append('    """Return the new values of buffers, from sums over all samples of the whole batch."""')
        lines += ["    device = sums.device"] if body.uses_device else []
        lines += [f"    {symbol} = {outer_size_text(traced, symbol)}" for symbol in sorted(body.sizes, key=str)]
        lines += [f"    {line}" for line in body.lines]
        lines += ["    return {", *(f"        {text}" for text in new), "    }"]
        return ["", *(f"    {line}".rstrip() for line in lines)]

    def _given(self, node: fx.Node) -> str:
        if node.name.startswith(SUM):
            return part_text(*self.slices[int(node.name.rpartition("_")[2])])
        return count_text(node) if is_count(node) else state_text(self.folded.traced, node)


__all__ = ["BufferFunctions"]
