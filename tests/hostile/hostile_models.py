"""Text that would run or write something if it entered a program unescaped, and models whose names contain it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from autoptd.codegen.emit import Program, StageSpec, emit_program
from autoptd.codegen.quoting import is_name
from autoptd.cost_models.cluster import Cluster
from autoptd.passes.fold import Folded, fold
from autoptd.passes.normalise.normalise import normalise
from autoptd.passes.sharding.sharding import Sharding
from autoptd.passes.trace.trace import trace
from autoptd.passes.trace.traced import BATCH, SEQUENCE
from autoptd.search.sharding.tensors import Tensors

WIDTH, LENGTH = 8, 4
MARK = "mark"  # the file that a payload creates when run; no payload needs a dot, which names cannot hold
CALL = f'open("{MARK}", "w")'
PAYLOADS = {
    "double quote": 'a"b',
    "single quote": "a'b",
    "both quotes": "a'b\"c",
    "keyword": "class",
    "constant": "None",
    "number": "7",
    "zero before a number": "07",
    "newline": "x\ny",
    "carriage return": f"x\r{CALL}",
    "backslash": "back\\slash",
    "backslash last": "tail\\",
    "three quotes": '"""',
    "call": f'");{CALL};("',
    "call on a line": f"\n{CALL}\n",
    "call in a docstring": f'"""\n{CALL}\n"""',
    "call in an f-string": f"{{{CALL}}}",
    "call in single quotes": f"';{CALL};'".replace('"', "'"),
    "comment": f"x # y\n{CALL}",
    "line separator": f"x\u2028{CALL}",
    "form feed": f"x\f{CALL}",
    "hole": "{i}",
    "range": "range(0, 3)",
    "brackets": "((,[",
    "an import": "F",
    "an axis": "ab tp",
    "spelled otherwise": "ﬁ",
    "a digit that is none": "²",
    "private": "__x",
    "right to left": "\u202eabc",
    "no character": "\0",
    "half a character": "\udc80",
    "foreign": "ключ",
    "shell": f"$(touch {MARK})",
    "shell quote": f"'; touch {MARK}; '",
    "shell line": f"x\ntouch {MARK}\n",
    "backquote": f"`touch {MARK}`",
    "pattern": "*",
    "pattern of one": "?",
    "pattern of some": "[ab]",
    "long": "x" * 300,
}
KINDS = ("module", "parameter", "buffer", "class", "stack", "input")


class Made(nn.Module):
    """Block whose parameters, buffer and child all have given names."""

    def __init__(self, names: Mapping[str, str]) -> None:
        super().__init__()
        self.names = names
        self.add_module(names["module"], nn.Linear(WIDTH, WIDTH))
        self.register_parameter(names["parameter"], nn.Parameter(torch.rand(WIDTH)))
        self.register_buffer(names["buffer"], torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        linear = self._modules[self.names["module"]]
        weight, table = self._parameters[self.names["parameter"]], self._buffers[self.names["buffer"]]
        assert linear is not None
        found: Tensor = x + linear(x * table).relu() * weight
        return found


def model_of(names: Mapping[str, str], blocks: int = 3) -> nn.Module:
    """Build a model with these names, by KINDS."""
    block = type(names["class"], (Made,), {})

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(names["stack"], nn.ModuleList([block(names) for _ in range(blocks)]))

        def forward(self, **inputs: Tensor) -> Tensor:
            x = inputs[names["input"]]
            for inner in self.get_submodule(names["stack"]).children():
                x = inner(x)
            return x.square().mean()

    return Model()


def harmless(kind: str, text: str = "a") -> str:
    """Return a harmless name of the same form: a Python identifier if and only if `text` is one."""
    return f"plain_{kind}" if is_name(text) else f"plain-{kind}"


def planned(names: Mapping[str, str]) -> tuple[Folded, Sharding]:
    """Trace a model with these names and split it over two tp ranks."""
    inputs = {names["input"]: torch.ones(4, LENGTH, WIDTH)}
    folded = fold(normalise(trace(model_of(names), inputs, precision="fp32")))
    symbols = {s: n for s, n in {BATCH: 1, SEQUENCE: LENGTH}.items() if s in folded.traced.sizes}
    return folded, Tensors(folded, Cluster.load("dgx-h100"), 2, symbols, microbatches=8).solve().sharding


def written(folded: Folded, sharding: Sharding, title: str) -> Program:
    """Emit two stages, one segment of each recomputed."""
    last = len(folded.segments) - 1
    stages = [StageSpec(0, last // 2, {0: "full"}), StageSpec(last // 2 + 1, last, {last: "full"})]
    return emit_program(folded, sharding, stages, title)


def renamed(folded: Folded, sharding: Sharding, given: Mapping[str, str]) -> tuple[Folded, Sharding]:
    """Rename a traced model and its plan; `given` maps old names to new ones.

    Equals a trace of the renamed model, without the time of tracing. Stacks of modules are changed in place.
    """

    def new(text: str) -> str:
        for old, wanted in given.items():
            text = text.replace(old, wanted)
        return text

    traced = folded.traced
    for node in traced.graph.graph.nodes:
        stack = node.meta.setdefault("first stack", node.meta.get("nn_module_stack"))
        if stack:
            node.meta["nn_module_stack"] = {k: (new(path), _class_of(cls, new)) for k, (path, cls) in stack.items()}
    traced = replace(
        traced,
        parameters={k: new(text) for k, text in traced.parameters.items()},
        buffers={k: new(text) for k, text in traced.buffers.items()},
        inputs={k: new(text) for k, text in traced.inputs.items()},
        sizes={symbol: (new(text), dim) for symbol, (text, dim) in traced.sizes.items()},
        transient=frozenset(map(new, traced.transient)),
    )
    segments = tuple(replace(s, kind=new(s.kind), name=new(s.name)) for s in folded.segments)
    return (
        replace(folded, traced=traced, segments=segments, representatives={}),
        replace(sharding, kinds={new(kind): decided for kind, decided in sharding.kinds.items()}),
    )


def _class_of(cls: Any, new: Callable[[str], str]) -> str:
    return new(cls if isinstance(cls, str) else f"{cls.__module__}.{cls.__qualname__}")
