"""A Llama-like block as a split problem, in numbers of one NVLink node: a realistic instance."""

from __future__ import annotations

from autoptd.layout.placements import BP, B, P, Placement, Split, conversion
from autoptd.search.sharding.problem import Choice, Node, SplitProblem

S0, S1, S2 = Split(0), Split(1), Split(2)
TP, TOKENS, HIDDEN, FFN = 8, 4096, 8192, 28672
PEAK, BANDWIDTH, LINK, LATENCY = 400e12, 2.6e12, 300e9, 8e-6  # FLOP/s, bytes/s, bytes/s per rank, s per collective
STEPS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1 / TP, None: 0}
ROWWISE: tuple[Placement, ...] = (B, S1)


class Block:
    """Builder of nodes; tensors are named by the node that produces them, `width[t]` is their last size."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.width: dict[str, int] = {}

    def add(self, name: str, width: int, reads: list[str], rows: list[tuple[list[Placement], Placement, float]]) -> str:
        """Add a node; `rows`: (placements of its operands, of its result, share of the work per rank)."""
        self.width[name] = width
        moved = 2 * TOKENS * (width + sum(self.width[t] for t in reads)) * 3
        self.nodes.append(
            Node(
                name,
                tuple(
                    Choice(
                        f"{', '.join(map(str, places))} -> {out}",
                        tuple(zip(reads, places, strict=True)),
                        ((name, out),),
                        5e-6 + moved * share / BANDWIDTH,
                        tuple(zip(reads, places, strict=True)),
                    )
                    for places, out, share in rows
                ),
            )
        )
        return name

    def source(self, name: str, width: int, places: tuple[Placement, ...]) -> str:
        return self.add(name, width, [], [([], p, 0.0) for p in places])

    def linear(self, name: str, read: str, width: int) -> str:
        """Add a linear layer: column (input saved by token, re-gathered in backward), row, by token, or whole."""
        flop_s = 6 * TOKENS * self.width[read] * width / PEAK
        weight = 2.0 * self.width[read] * width
        self.width[name] = width
        options: list[tuple[Placement, Placement, float, float]] = [
            (BP, S2, 1 / TP, 1 / TP), (S2, P, 1 / TP, 1 / TP), (S1, S1, 1 / TP, 1.0), (B, B, 1.0, 1.0),
        ]  # fmt: skip
        sync = {S1: weight / LINK / 64}
        self.nodes.append(
            Node(
                name,
                tuple(
                    Choice(
                        f"{need} -> {give}", ((read, need),), ((name, give),), flop_s * share + sync.get(need, 0.0),
                        ((read, S1 if need == BP else need),), weight * kept,
                    )
                    for need, give, share, kept in options
                ),
            )
        )  # fmt: skip
        return name

    def unary(self, name: str, read: str, *, linear: bool = False, norm: bool = False) -> str:
        places: list[Placement] = [B, S1] if norm else [B, S1, S2]
        rows: list[tuple[list[Placement], Placement, float]] = [([p], p, 1.0 if p == B else 1 / TP) for p in places]
        return self.add(name, self.width[read], [read], rows + ([([P], P, 1.0), ([BP], BP, 1.0)] if linear else []))

    def binary(self, name: str, left: str, right: str, *, linear: bool = False) -> str:
        rows: list[tuple[list[Placement], Placement, float]] = [
            ([p, p], p, 1.0 if p == B else 1 / TP) for p in (B, S1, S2)
        ]
        return self.add(name, self.width[left], [left, right], rows + ([([P, P], P, 1.0)] if linear else []))

    def problem(self, **extra: object) -> SplitProblem:
        everywhere: tuple[Placement, ...] = (B, BP, P, S0, S1, S2)
        conversions = {}
        for tensor, width in self.width.items():
            nbytes = 2 * TOKENS * width * (TP - 1) / TP
            for q in everywhere:
                for p in everywhere:
                    row = conversion(q, p)
                    steps = STEPS[row.forward] + STEPS[row.backward]
                    calls = (row.forward is not None) + (row.backward is not None)
                    conversions[tensor, q, p] = 1e-7 * (row.function != "") + calls * LATENCY + steps * nbytes / LINK
        saved = {
            (t, p): 2.0 * TOKENS * w / (TP if isinstance(p, Split) else 1)
            for t, w in self.width.items()
            for p in everywhere
        }
        return SplitProblem(tuple(self.nodes), conversions, saved, **extra)  # type: ignore[arg-type]


def block(layers: int = 1, **extra: object) -> SplitProblem:
    """Return attention with rotary embedding and a gated MLP, `layers` times; input and output are tied."""
    b = Block()
    stream = b.source("in", HIDDEN, (B, S1, S2, P))
    for i in range(layers):
        stream = _attention(b, stream, f"{i}.")
        stream = _mlp(b, stream, f"{i}.")
    b.add("out", HIDDEN, [stream], [([p], p, 0.0) for p in (B, S1, S2, P)])
    ties = (("in", "out"),)
    b.nodes[0] = Node(
        "in", tuple(Choice(f"{c.gives[0][1]} -> {c.gives[0][1]}", gives=c.gives) for c in b.nodes[0].choices)
    )
    return b.problem(ties=ties, **extra)


def _norm(b: Block, stream: str, at: str) -> str:
    square = b.unary(at + "square", b.unary(at + "float", stream, linear=True))
    rstd = b.unary(at + "rstd", square, norm=True)
    return b.unary(at + "scaled", b.binary(at + "normed", at + "float", rstd))


def _attention(b: Block, stream: str, at: str) -> str:
    normed = _norm(b, stream, at + "norm1.")
    heads = []
    for name, width in (("q", HIDDEN), ("k", HIDDEN // 8), ("v", HIDDEN // 8)):
        seen = b.unary(at + name + "_view", b.linear(at + name, normed, width), linear=True)
        turned = b.unary(at + name + "_transpose", seen, linear=True)
        if name != "v":
            splits_backward = b.unary(at + name + "_neg", b.unary(at + name + "_half", turned), linear=True)
            turned = b.binary(at + name + "_rope", turned, splits_backward, linear=True)
        heads.append(turned)
    rows: list[tuple[list[Placement], Placement, float]] = [
        ([B] * 3, B, 1.0),
        ([S2] * 3, S2, 1 / TP),
        ([S1, BP, BP], S1, 0.3),
    ]
    mixed = b.unary(at + "merge", b.add(at + "sdpa", HIDDEN, heads, rows), linear=True)
    return b.binary(at + "add1", stream, b.linear(at + "o", mixed, HIDDEN), linear=True)


def _mlp(b: Block, stream: str, at: str) -> str:
    normed = _norm(b, stream, at + "norm2.")
    gate = b.unary(at + "silu", b.linear(at + "gate", normed, FFN))
    product = b.binary(at + "product", gate, b.linear(at + "up", normed, FFN))
    return b.binary(at + "add2", stream, b.linear(at + "down", product, HIDDEN), linear=True)
