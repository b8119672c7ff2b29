"""Statements of consecutive segments: ops at local shapes, with the conversions between them.

There is one variable per (tensor, placement): a conversion is written once, right before the first line that needs it.
The comment of each line that communicates states the conversion and its collectives, forward and backward.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any

import sympy
import torch
from torch import fx

from autoptd.codegen.expressions import SourceText, call_text, expression, size_text, value_text
from autoptd.codegen.joined import head_text, line_reads, products_text, scattered_text
from autoptd.codegen.lines import conversion_args, conversion_note, implementation_note, summed_note
from autoptd.codegen.names import TAKEN, Names, hint, read_by, reads_in_place
from autoptd.codegen.quoting import code_of
from autoptd.codegen.random_keys import ATTENTION, keyed
from autoptd.codegen.recompute import Recomputation, core_lines, kept_text, runs_of
from autoptd.layout.placements import B, Broadcast, Placement, conversion
from autoptd.ops.random import DRAWS
from autoptd.passes.analysis.heads import Head, heads_of
from autoptd.passes.analysis.overwriting import WIDE
from autoptd.passes.batch.batch_dims import symbols_in
from autoptd.passes.fold import Segment
from autoptd.passes.graph import info, infos, is_getitem, op_call, op_name, operands
from autoptd.passes.opcall import TensorInfo
from autoptd.passes.rules.attention import OWN_KEYS
from autoptd.passes.rules.factors import Op, Strategy, local_args, local_shape
from autoptd.passes.rules.lookup import op_of
from autoptd.passes.rules.table import IMPLEMENTATIONS
from autoptd.passes.sharding.context_parallel_graph import TOKEN_OPS, ring
from autoptd.passes.sharding.expert_parallel_graph import EXPERT_OPS
from autoptd.passes.sharding.sharding import KindSharding, Sharding, ops_of, tensor_name
from autoptd.passes.sharding.tp_products import RingScatter, SharedOperand

aten = torch.ops.aten
Held = tuple[fx.Node, Placement]
Made = tuple[str, fx.Node, Placement]  # variable, and the tensor and placement that it holds


@dataclass
class Body:
    """The lines written so far, and the variable that holds each tensor in each placement."""

    sharding: Sharding
    names: Names
    lines: list[str] = field(default_factory=list)
    held: dict[Held, str] = field(default_factory=dict)
    sizes: set[sympy.Symbol] = field(default_factory=set)  # symbols that the lines mention
    dropout: bool = False  # a line draws random numbers
    first: int | None = None  # in a block: the index of its first segment, from which random keys count
    at: tuple[int, int] = (0, 0)  # current segment and node
    uses_device: bool = False
    called: Mapping[fx.Node, str] = field(default_factory=dict)  # names of variables that blocks read and replace
    made: list[Made] = field(default_factory=list)  # by each line that assigns, in order
    assigned: list[tuple[int, Made]] = field(default_factory=list)  # and the line, without those of recomputed cores
    within: bool = False  # the lines are those of a recomputed core
    recomputation: Recomputation = field(default_factory=Recomputation)  # recomputed and kept ops of these segments
    in_place: Mapping[str, bool] = field(default_factory=dict)  # losses in place; False: in a copy of the logits
    fast_dropout: bool = False  # attention draws its masks by torch's kernel
    joins_heads: bool = False  # each head is one op, `ops.linear_cross_entropy`
    heads: Mapping[fx.Node, Head] = field(default_factory=dict)  # those of the current segment, by their losses
    wanted: Mapping[fx.Node, set[Placement]] = field(default_factory=dict)  # placements read of each made tensor

    @property
    def ranks(self) -> int:
        return self.sharding.ranks

    @property
    def scatters(self) -> Mapping[fx.Node, RingScatter]:
        return {scatter.product: scatter for scatter in self.recomputation.scatters}

    def bind(self, node: fx.Node, placement: Placement, text: str) -> None:
        """Declare the text of a tensor that is defined outside these lines."""
        self.held[node, _plain(node, placement)] = text

    def read(self, node: fx.Node, given: Placement, needed: Placement) -> str:
        """Return the variable that holds `node` in the needed placement; write the conversion if there is none."""
        given, needed = _plain(node, given), _plain(node, needed)
        if (node, needed) not in self.held:
            self.held[node, needed] = self._convert(node, given, needed)
        return self.held[node, needed]

    def _convert(self, node: fx.Node, given: Placement, needed: Placement) -> str:
        source = self.held[node, given]
        row = conversion(given, needed)
        if not row.function:
            return source
        args = conversion_args(given, needed)
        once = self._serves_once(node, given, needed)
        name = source if once else self.names.fresh(_converted(source, node, needed))
        if once:  # rebinding the variable frees the tensor in its given placement
            del self.held[node, given]
        note = conversion_note(given, needed, info(node).requires_grad)
        call = f"tp.{row.function}({', '.join([source, *args])})"
        if (tensor_name(node), str(needed)) in self.recomputation.kept_conversions:
            call = kept_text(call)
        self.lines.append(f"{name} = {call}  # {note}")
        self._assign(name, node, needed)
        return name

    def _assign(self, name: str, node: fx.Node, placement: Placement) -> None:
        self.made.append((name, node, _plain(node, placement)))
        if not self.within:
            self.assigned.append((len(self.lines) - 1, self.made[-1]))

    def _serves_once(self, node: fx.Node, given: Placement, needed: Placement) -> bool:
        """Return whether a tensor is only read in the needed placement, so that the result can reuse its variable."""
        source = self.held[node, given]
        others = (text for key, text in self.held.items() if key != (node, given))
        return (
            self.wanted.get(node) == {needed}
            and not self.recomputation.core  # functions of the core distinguish variables by name
            and source.isidentifier()
            and not any(re.search(rf"(?<![\w.]){source}\b", code_of(text)) for text in others)
        )

    def segment(self, segment: Segment) -> None:
        """Write one segment, whose received tensors must be bound in the placements in which they are received."""
        decided = self.sharding.kinds[segment.kind]
        given: dict[fx.Node, Placement] = dict.fromkeys(segment.prelude, B)
        given |= dict(zip(segment.parameters, decided.parameters, strict=True))
        given |= dict(zip(segment.receives, decided.receives, strict=True))
        self.wanted = _wanted(segment, decided)
        heads = heads_of(segment, decided) if self.joins_heads else ()
        strategies = {segment.nodes[i]: strategy for i, strategy in decided.strategies.items()}
        self.heads = {head.loss: head for head in heads}
        inner = {node for head in heads for node in head.inner}
        before = set(self.held)
        runs = runs_of(list(ops_of(segment)), self.recomputation.core, self.recomputation.views)
        last_use = {o: i for _, run in runs for i, n in run for o in line_reads(n, self.heads.get(n))}
        sent = {*segment.sends, *(o for n in segment.sends if reads_in_place(n) for o in read_by(n))}
        local = set(segment.nodes) - sent

        shared = {node: each for each in self.recomputation.shared for node in each.products}

        def write(i: int, node: fx.Node) -> None:
            self.at = (segment.index, i)
            if node in inner:
                given[node] = decided.strategies[i].gives[0]
                return
            done = [o for o in dict.fromkeys(line_reads(node, self.heads.get(node))) if o in local and last_use[o] == i]
            if node in shared:
                if node is shared[node].products[0]:
                    self._products(shared[node], strategies, given)
                for operand in done:
                    self._forget(operand)
                return
            text = head_text(self, self.heads[node], strategies, given) if node in self.heads else ""
            self._op(node, decided.strategies[i], given, done, text)

        for is_core, run in runs:
            if is_core:
                self._core(run, decided.strategies, given, write, segment)
            else:
                for i, node in run:
                    write(i, node)
        for node, placement in zip(segment.sends, decided.sends, strict=True):
            text = self.read(node, given[node], placement)
            self.held[node, _plain(node, placement)] = text
        kept = {(n, _plain(n, p)) for n, p in zip(segment.sends, decided.sends, strict=True)}
        self.held = {k: v for k, v in self.held.items() if k in before or k in kept}

    def _core(
        self,
        run: Sequence[tuple[int, fx.Node]],
        strategies: Mapping[int, Strategy],
        given: dict[fx.Node, Placement],
        write: Callable[[int, fx.Node], None],
        segment: Segment,
    ) -> None:
        """Write recomputed ops as a function of their own."""
        inside = {n for _, n in run}
        for i, node in run:  # conversions that are not recomputed
            for operand, placement in zip(operands(node), strategies[i].needs, strict=True):
                key = tensor_name(operand), str(placement)
                if operand in given and key not in self.recomputation.core_conversions:
                    self.read(operand, given[operand], placement)
        outer, self.lines, self.within = self.lines, [], True
        before = dict(self.held)
        for i, node in run:
            write(i, node)
        made = [o for _, n in run for o in _outputs(n) if o is not None]
        needed = [o for o in made if o in segment.sends or any(u not in inside and not is_getitem(u) for u in o.users)]
        results = [self._named(o, given[o]) for o in needed]
        known = {name for text in before.values() for name in re.findall(r"[^\W\d]\w*", code_of(text))}
        known -= TAKEN | {str(symbol) for symbol in self.sizes}
        own = {text for key, text in self.held.items() if before.get(key) != text} - set(results)
        self.held = {key: text for key, text in self.held.items() if text not in own}
        lines, self.lines, self.within = self.lines, outer, False
        self.lines += core_lines(self.names.fresh("core"), lines, known, results)

    def _op(
        self,
        node: fx.Node,
        strategy: Strategy,
        given: dict[fx.Node, Placement],
        done: Sequence[fx.Node],
        text: str = "",
    ) -> None:
        """Write one op; `done` are the operands that no later op reads, `text` its expression if it is not its own."""
        if not text:
            needs = zip(operands(node), strategy.needs, strict=True)
            text = self.op_text(node, strategy, [SourceText(self.read(o, given[o], p)) for o, p in needs])
        if node in self.scatters:
            strategy = replace(strategy, gives=(self.scatters[node].target,))
            text = scattered_text(text, self.scatters[node])
        text = self.recomputation.written(node, text)
        note = f"  # {implementation_note(strategy)}" if strategy.implementation else summed_note(node)
        outputs = _outputs(node)
        for output, placement in zip(outputs, strategy.gives, strict=True):
            if output is not None:
                given[output] = placement
        for operand in done:
            self._forget(operand)
        if reads_in_place(node):
            self.held[node, _plain(node, strategy.gives[0])] = text
            return
        names = [self.names.fresh(self.called.get(o) or hint(o)) if o is not None else "_" for o in outputs]
        self.lines.append(f"{_left(node, names)} = {text}{note}")
        for output, placement, name in zip(outputs, strategy.gives, names, strict=True):
            if output is not None:
                self.held[output, _plain(output, placement)] = name
                self._assign(name, output, placement)

    def _named(self, node: fx.Node, placement: Placement) -> str:
        """Return the variable that holds `node`, which may be a view that its only reader would write in place."""
        key = node, _plain(node, placement)
        if not self.held[key].isidentifier():
            name = self.names.fresh(hint(node))
            self.lines.append(f"{name} = {self.held[key]}")
            self.held[key] = name
            self._assign(name, node, placement)
        return self.held[key]

    def _products(
        self, shared: SharedOperand, strategies: Mapping[fx.Node, Strategy], given: dict[fx.Node, Placement]
    ) -> None:
        """Write all products of a tensor, at the first of them."""
        text = products_text(self, shared, strategies, given)
        names = [self.names.fresh(self.called.get(node) or hint(node)) for node in shared.products]
        self.lines.append(f"{', '.join(names)} = {text}")
        for node, name in zip(shared.products, names, strict=True):
            given[node] = strategies[node].gives[0]
            self.bind(node, given[node], name)
            self._assign(name, node, given[node])

    def _forget(self, node: fx.Node) -> None:
        for key in [k for k in self.held if k[0] is node]:
            self.names.release(self.held.pop(key))

    def op_text(self, node: fx.Node, strategy: Strategy, texts: Sequence[SourceText]) -> str:
        """Return the op's expression on local tensors."""
        op = Op(op_call(node), None) if node.target in _COMMUNICATION else op_of(node)
        args, kwargs = local_args(op, strategy, self.ranks)
        source = iter(texts)
        args = _with_texts(args, source)
        kwargs = {k: _with_texts(v, source) for k, v in kwargs.items()}
        self.sizes |= symbols_in((args, tuple(kwargs.values())))
        if node.name in self.in_place:
            kwargs = {**kwargs, "in_place": True}
            if (
                not self.in_place[node.name] and info(operands(node)[0]).dtype in WIDE
            ):  # narrower ones are copied anyway
                args = (SourceText(f"{args[0]}.clone()"), *args[1:])
        if strategy.implementation == OWN_KEYS.name:
            heads = size_text(op.call.operands[0].shape[-3])
            args = (args[0], *(SourceText(f"tp.own_keys({x}, {heads})") for x in args[1:3]), *args[3:])
        elif strategy.implementation:
            function = IMPLEMENTATIONS[node.target, strategy.implementation]  # type: ignore[index]
            return _implementation_text(function, args, kwargs)
        if node.target is aten.dropout.default and args[1] and args[2]:
            return f"ops.dropout({args[0]}, {value_text(args[1])}, {self._random(node, strategy)})"
        if node.target in DRAWS:
            given = (tuple(args[0]), *args[1:])
            return call_text(f"ops.{op_name(node)}", (*given, SourceText(self._random(node, strategy))), {})
        if node.target in ATTENTION and len(args) > 4 and args[4]:
            return self._attention_text(node, strategy, args, kwargs)
        return expression(node.target, args, kwargs)  # type: ignore[arg-type]

    def _random(self, node: fx.Node, strategy: Strategy) -> str:
        self.dropout = True
        text, sizes = keyed(node, strategy.gives[0], self.at, self.first)
        self.sizes |= symbols_in(sizes)
        return text

    def _attention_text(
        self, node: fx.Node, strategy: Strategy, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> str:
        name = ATTENTION[node.target]  # type: ignore[index]
        cp = ", cp" if node.target in TOKEN_OPS else ""
        options = [f"dropout_p={value_text(args[4])}"]
        options += [f"mask={args[3]}"] if args[3] is not None else []
        options += ["is_causal=True"] if len(args) > 5 and args[5] else []
        options += [f"{k}={value_text(v)}" for k, v in kwargs.items() if v not in (None, False)]
        options += ["fast=True"] if self.fast_dropout and node.target is not ring else []
        options.append(self._random(node, strategy))
        return f"ops.{name}({args[0]}, {args[1]}, {args[2]}{cp}, {', '.join(options)})"

    def prelude(self, nodes: Sequence[fx.Node]) -> None:
        """Write nodes that every rank computes whole."""
        for node in nodes:
            if is_getitem(node):
                continue
            texts = [SourceText(self.held[o, B]) for o in operands(node)]
            call = op_call(node)
            source = iter(texts)
            args = _with_texts(call.args, source)
            kwargs = {k: _with_texts(v, source) for k, v in call.kwargs.items()}
            self.sizes |= symbols_in((args, tuple(kwargs.values())))
            self.uses_device |= any(isinstance(v, torch.device) for v in kwargs.values())
            outputs = _outputs(node)
            names = [self.names.fresh(hint(o)) if o is not None else "_" for o in outputs]
            self.lines.append(f"{_left(node, names)} = {expression(node.target, args, kwargs)}")  # type: ignore[arg-type]
            for output, name in zip(outputs, names, strict=True):
                if output is not None:
                    self.held[output, B] = name
                    self.assigned.append((len(self.lines) - 1, (name, output, B)))


_COMMUNICATION = TOKEN_OPS | {*EXPERT_OPS.values()}  # ops without a rule
_SUFFIX = {"B": "whole", "S": "split", "P": "partial"}


def _plain(node: fx.Node, placement: Placement) -> Placement:
    """Return the placement, with B for a Bp of a tensor without gradient."""
    return B if isinstance(placement, Broadcast) and not info(node).requires_grad else placement


def _left(node: fx.Node, names: Sequence[str]) -> str:
    """Return the left side of an assignment; an op that returns a tuple of one tensor has a comma there."""
    return ", ".join(names) + ("," if len(names) == 1 and isinstance(node.meta["info"], tuple) else "")


def _outputs(node: fx.Node) -> list[fx.Node | None]:
    """Return the node of each output; None for one that is not read."""
    if not isinstance(node.meta["info"], tuple):
        return [node]
    found: list[fx.Node | None] = [None] * len(infos(node))
    for user in node.users:
        assert is_getitem(user)
        found[user.args[1]] = user  # type: ignore[index]
    return found


def _converted(source: str, node: fx.Node, needed: Placement) -> str:
    """Return a name for the result of a conversion: `out_whole`, `x_split`."""
    base = source if source.isidentifier() else "_".join(source.split(".")[-2:]) if "." in source else hint(node)
    return f"{base}_{_SUFFIX[str(needed)[0]]}"


def _wanted(segment: Segment, decided: KindSharding) -> dict[fx.Node, set[Placement]]:
    """Return the placements in which each tensor made by a segment is read by its ops or sent."""
    found: dict[fx.Node, set[Placement]] = {n: set() for n in segment.nodes}
    for i, node in ops_of(segment):
        for operand, placement in zip(operands(node), decided.strategies[i].needs, strict=True):
            if operand in found:
                found[operand].add(_plain(operand, placement))
    for node, placement in zip(segment.sends, decided.sends, strict=True):
        if node in found:
            found[node].add(_plain(node, placement))
    return found


def _with_texts(value: Any, texts: Iterator[SourceText]) -> Any:
    if isinstance(value, TensorInfo):
        return next(texts)
    if isinstance(value, tuple):
        return tuple(_with_texts(v, texts) for v in value)
    if isinstance(value, list):
        return [_with_texts(v, texts) for v in value]
    return value


def _implementation_text(function: Callable[..., Any], args: Sequence[object], kwargs: Mapping[str, object]) -> str:
    """Return the call of an op with an implementation of its own: tensors, the axis, then non-default options."""
    tensors = [str(a) for a in args if isinstance(a, SourceText)]
    rest = [a for a in args if not isinstance(a, SourceText)]
    takes = list(signature(function).parameters.values())[len(tensors) + 1 :]
    given = {p.name: a for p, a in zip(takes, rest, strict=False)} | dict(kwargs)
    unknown = [*rest[len(takes) :], *(v for k, v in kwargs.items() if k not in {p.name for p in takes})]
    assert not any(unknown), (function, unknown)
    options = [f"{p.name}={value_text(given[p.name])}" for p in takes if given.get(p.name, p.default) != p.default]
    return f"ops.{function.__name__}({', '.join([*tensors, 'tp', *options])})"


def local_shape_text(tensor: TensorInfo, placement: Placement, ranks: int) -> str:
    """Return the local shape of a tensor: `(4096, 512)`."""
    shape = local_shape(tensor, placement, ranks)
    return "(" + ", ".join(map(size_text, shape)) + ("," if len(shape) == 1 else "") + ")"
