"""Rows moved by computed indices: correct forms train as one process does, wrong ones are refused, by op and line."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autoptd
from autoptd.errors import UnsupportedOp
from autoptd.passes.batch.batch_independence import refuse_mixed_samples
from autoptd.passes.normalise import normalise
from autoptd.testing.parity import differences, train_alone, train_in_lockstep
from tests.passes.interpret import assert_unchanged, normalised

SAMPLES, TOKENS, VOCAB, WIDTH, EXPERTS = 6, 5, 12, 8, 4
Body = Callable[["Model", Tensor, Tensor, Tensor], "Tensor | tuple[Tensor, Tensor]"]
SGD = {"lr": 0.05, "momentum": 0.9}


class Model(nn.Module):
    """`body` of hidden states [b, s, h], tokens and labels [b, s] gives a loss, or hidden states (and labels)."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.table, self.head = body, nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.router, self.mask_token = nn.Linear(WIDTH, EXPERTS), nn.Parameter(torch.randn(WIDTH))
        self.up, self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 6)), nn.Parameter(torch.randn(EXPERTS, 6, WIDTH))
        self.places = nn.Embedding(64, WIDTH)
        self.double()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        made = self.body(self, self.table(ids), ids, labels)
        x, labels = made if isinstance(made, tuple) else (made, labels)
        return x if x.ndim == 0 else F.cross_entropy(self.head(x).flatten(0, -2), labels.flatten())


def batch(samples: int = SAMPLES) -> dict[str, Tensor]:
    """Return ragged labels, and tokens with ties."""
    rng = torch.Generator().manual_seed(3)
    ids = torch.randint(0, VOCAB, (samples, TOKENS), generator=rng)
    labels = torch.randint(0, VOCAB, (samples, TOKENS), generator=rng)
    for i in range(samples):
        labels[i, : (3 * i) % TOKENS] = -100
    return {"ids": ids, "labels": labels}


# Moves within a sample, or out and back.


def in_groups(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiply the rows up to each end by the weights of one expert, as transformers writes it for float64."""
    import transformers.integrations.moe  # noqa: F401  registers the op

    return torch.ops.transformers.grouped_mm_fallback(x, weights, ends)


def sorted_and_back(m: Model, x: Tensor, ids: Tensor, labels: Tensor, back: str = "index") -> Tensor:
    """Sort tokens to one expert each, and move them back in one of many ways."""
    flat = x.flatten(0, 1)
    order = m.router(flat).argmax(-1).argsort(stable=True)
    y = (flat[order] @ m.up[0]).relu() @ m.down[0]
    into = torch.zeros_like(flat)
    match back:
        case "index":
            y = y[order.argsort()]
        case "scattered inverse":
            inverse = torch.empty_like(order)
            inverse[order] = torch.arange(order.shape[0])
            y = y[inverse]
        case "scatter inverse":
            y = y[torch.zeros_like(order).scatter(0, order, torch.arange(order.shape[0]))]
        case "index_add":
            y = into.index_add(0, order, y)
        case "index_copy":
            y = into.index_copy(0, order, y)
        case "index_put":
            into[order] = y
            y = into
        case "scatter_add":
            y = into.scatter_add(0, order[:, None].expand(-1, WIDTH), y)
        case "gather":
            y = y.gather(0, order.argsort()[:, None].expand(-1, WIDTH))
    return x + y.view(x.shape)


def routed(m: Model, x: Tensor, keys: Callable[[Tensor], Tensor], counts: Callable[[Tensor], Tensor]) -> Tensor:
    """Route each token to its two likeliest experts; multiply in groups whose ends are counted."""
    flat = x.flatten(0, 1)
    weights, chosen = m.router(flat).softmax(-1).topk(2)
    chosen = keys(chosen)
    order = chosen.flatten().sort()[1]
    token = order // 2
    ends = counts(chosen.flatten()).cumsum(0).to(torch.int32)
    y = in_groups(in_groups(flat[token], m.up, ends).relu(), m.down, ends)
    y = y * weights.flatten()[order][:, None]
    return x + torch.zeros_like(flat).index_add(0, token, y).view(x.shape)


def unknown(keys: Tensor) -> Tensor:
    """Return the same keys, by arithmetic after which no bound is known."""
    return keys * 3 - keys * 2


def gathered(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    """Gather scores by keys of which nothing else is known: no index is below 0."""
    found = list[Tensor]()

    def keys(chosen: Tensor) -> Tensor:
        found.append(unknown(chosen))
        return found[0]

    y = routed(m, x, keys, histogram("histc"))
    return y * (1 + m.router(x.flatten(0, 1)).gather(1, found[0]).sum(1).view(*x.shape[:2], 1))


def weights_of_each_row(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    flat = x.flatten(0, 1)
    expert, order = m.router(flat).argmax(-1).sort()
    y = torch.bmm(torch.bmm(flat[order][:, None], m.up[expert]).relu(), m.down[expert])[:, 0]
    return x + y[order.argsort()].view(x.shape)


def choices_first(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    """Copies of all tokens for the first choice, then for the second."""
    flat = x.flatten(0, 1)
    count = flat.shape[0]
    order = m.router(flat).topk(2)[1].t().flatten().argsort()
    y = (flat[order % count] @ m.up[0]).relu() @ m.down[0]
    return x + y[order.argsort()].view(2, count, WIDTH).sum(0).view(x.shape)


def repeated_tokens(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    flat = x.flatten(0, 1)
    token = torch.arange(flat.shape[0]).repeat_interleave(2)
    order = m.router(flat).topk(2)[1].flatten().argsort()
    y = (flat[token[order]] @ m.up[0]).relu() @ m.down[0]
    return x + torch.zeros_like(flat).index_add(0, token[order], y).view(x.shape)


def capacity_of_a_sample(m: Model, x: Tensor, ids: Tensor, labels: Tensor, dim: int = 1) -> Tensor:
    """Each expert takes the first tokens that chose it; with `dim` 0 those of the whole batch."""
    chosen = F.one_hot(m.router(x).argmax(-1), EXPERTS)
    rank = chosen.flatten(0, 1).cumsum(0).view(chosen.shape) if dim == 0 else chosen.cumsum(1)
    kept = chosen * (rank <= 2)
    return x + torch.einsum("bse,ehf,bsh->bsf", kept.to(x), m.up, x) @ m.down[0]


def last_tokens(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    last = (ids > 3).sum(1).clamp(max=TOKENS - 1)
    return x[torch.arange(x.shape[0]), last], labels[:, 0]


def flat_numbers(m: Model, x: Tensor, ids: Tensor, labels: Tensor, step: int = 0) -> Tensor:
    """The nearest tokens of each token, by row numbers over all samples; `step` samples further."""
    near = (x @ x.transpose(1, 2)).topk(2)[1]
    near = near + torch.arange(step, x.shape[0] + step)[:, None, None] * x.shape[1]
    return x + x.reshape(-1, WIDTH)[near.view(-1)].view(*near.shape, WIDTH).mean(2)


def masked(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    x = x.clone()
    x[ids > 6] = m.mask_token
    return x * 2


def written_at_own(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    x = x.clone()
    x[torch.arange(x.shape[0]), ids.argmax(1)] = m.mask_token
    return x * 2


def columns_written(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    """Write columns of each token, then tokens of each sample: a number, and other columns and tokens."""
    y = x.clone()
    y[:, :, [0, 2]] = 0.5
    y[:, :, [1, 3]] = x[:, :, [2, 0]] * 2
    y[:, [0, 1]] = x[:, [1, 2]]
    return y


def scattered_gates(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    value, chosen = m.router(x).topk(2)
    gates = torch.zeros(*x.shape[:2], EXPERTS, dtype=x.dtype).scatter(2, chosen, value.softmax(-1))
    return x + torch.einsum("bse,ehf,bsh->bsf", gates, m.up, x) @ m.down[0]


def loss_of_sorted(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    order = ids[:, 0].argsort()
    return x[order], labels[order]


def own(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    """Two ways to pick within a sample."""
    chosen = m.router(x)[..., 0].topk(2, 1)[1]
    rows = torch.arange(x.shape[0])
    one = x[rows[:, None], chosen].sum(1)
    two = x.gather(1, chosen[..., None].expand(-1, -1, WIDTH)).sum(1)
    return x + (one + two)[:, None]


def histogram(tally: str) -> Callable[[Tensor], Tensor]:
    def counts(keys: Tensor) -> Tensor:
        match tally:
            case "one_hot":
                return F.one_hot(keys, EXPERTS).sum(0)
            case "scatter_add":
                return torch.zeros(EXPERTS, dtype=torch.int64).scatter_add(0, keys, torch.ones_like(keys))
        return torch.histc(keys.float(), EXPERTS, 0, EXPERTS - 1)

    return counts


RIGHT: dict[str, Body] = {
    **{
        f"sorted, back by {back}": lambda m, x, ids, labels, back=back: sorted_and_back(m, x, ids, labels, back)
        for back in (
            *("index", "scattered inverse", "scatter inverse", "index_add", "index_copy", "index_put"),
            *("scatter_add", "gather"),
        )
    },
    **{
        f"groups counted by {by}": lambda m, x, ids, labels, by=by: routed(m, x, lambda k: k, histogram(by))
        for by in ("histc", "one_hot", "scatter_add")
    },
    "keys that are masked": lambda m, x, ids, labels: routed(
        m, x, lambda k: torch.where(k == 2, 0, k.masked_fill(k == 1, 3)), histogram("histc")
    ),
    "keys that gather": gathered,
    "all to one expert": lambda m, x, ids, labels: routed(m, x, lambda k: k * 0 + 2, histogram("one_hot")),
    "weights of each row": weights_of_each_row,
    "choices first": choices_first,
    "repeated tokens": repeated_tokens,
    "capacity of a sample": capacity_of_a_sample,
    "last token": last_tokens,
    "numbers of flat rows": flat_numbers,
    "masked": masked,
    "added under a mask": lambda m, x, ids, labels: x.index_put((ids > 6,), m.mask_token, accumulate=True),
    "written at its own": written_at_own,
    "scattered gates": scattered_gates,
    "columns written": columns_written,
    "row of a repeated table": lambda m, x, ids, labels: (
        x + m.places.weight[:1].expand(x.shape[0], -1).reshape(x.shape[0], 2, -1)[1].flatten()
    ),
    "loss of sorted rows": loss_of_sorted,
    # a count of the whole batch that depends on inputs alone: known before the first forward pass
    "counts read back": lambda m, x, ids, y: x / (1 + F.one_hot(ids, VOCAB).sum((0, 1))[ids])[..., None],
    "picked within": own,
    "all within": lambda m, x, ids, labels: x[:, torch.arange(x.shape[1]).flip(0)] + x[:, [0]],
    "position of a flat row": lambda m, x, ids, labels: (
        x + m.places(torch.arange(x.shape[0] * x.shape[1]) % x.shape[1]).view(x.shape)
    ),
}


def one_after_another(names: Sequence[str]) -> Body:
    def body(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
        for name in names:
            x = x + 0.1 * RIGHT[name](m, x, ids, labels)  # type: ignore[operator]
        return x

    return body


LAST = ("last token", "loss of sorted rows")  # their results can be read by a loss only
TOGETHER = {
    "back": [n for n in RIGHT if n.startswith("sorted")],
    "groups": [n for n in RIGHT if "group" in n or "expert" in n],
    "rest": [n for n in RIGHT if not n.startswith("sorted") and "group" not in n and n not in LAST],
}


@pytest.mark.parametrize("body", [RIGHT[n] for n in LAST] + [one_after_another(n) for n in TOGETHER.values()])
def test_what_stays_within_samples_is_the_same_in_microbatches(body: Body) -> None:
    assert_unchanged(Model(body), batch())


def test_all_of_it_trains_as_on_one_process() -> None:
    """Two data-parallel ranks, with microbatches of 2, 2 and 1 samples."""
    model, data = Model(one_after_another([n for n in RIGHT if n not in (*LAST, "masked")])), batch(10)
    made = autoptd.parallelize(
        model, world=2, cluster="dgx-h100", batch=12, seq=TOKENS, inputs={n: x[:2] for n, x in data.items()},
        precision="fp64", optimizer="sgd", optimizer_options=SGD, fix={"dp": 2, "tp": 1, "pp": 1, "micro": 2},
    )  # fmt: skip
    found = train_in_lockstep(made, [data])
    alone = train_alone(model, [data], optimizer="sgd", optimizer_options=SGD)
    assert max(differences(found.gradients, alone.gradients).values()) < 1e-10
    assert max(differences(found.state, alone.state).values()) < 1e-10


def columns_of_others(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    y = x.clone()
    y[:, [0, 1]] = x[x[:, 0, 0].argsort()][:, [0, 1]]
    return y


# Moves between samples, or by a sample's position in its batch: (op, line, what is wrong with it).


def rolled(x: Tensor) -> Tensor:
    """Shift by one sample, by arithmetic."""
    return x[(torch.arange(x.shape[0]) + 1) % x.shape[0]]


def shared_capacity(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    return capacity_of_a_sample(m, x, ids, labels, dim=0)


def capacity_by_order(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    """Tokens beyond the fourth of an expert are dropped."""
    expert, order = m.router(x.flatten(0, 1)).argmax(-1).sort(stable=True)
    first = torch.searchsorted(expert, torch.arange(EXPERTS))
    rank = torch.arange(expert.shape[0]) - first[expert]
    kept = torch.zeros_like(rank).index_copy(0, order, (rank < 4).to(rank.dtype))
    return x + (kept[:, None] * m.down[0, 0]).view(x.shape)


def other_way_back(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    one, two = (m.router(x.flatten(0, 1))[:, i].argsort() for i in range(2))
    return x + x.flatten(0, 1)[one][two.argsort()].view(x.shape)


def ranks_by_scatter(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    order = x[:, 0].sum(-1).argsort()
    ranks = torch.empty_like(order).scatter(0, order, torch.arange(x.shape[0]))
    return x + m.places.weight[ranks, None]


def histogram_read_back(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    chosen = m.router(x.flatten(0, 1)).argmax(-1)
    count = torch.zeros(EXPERTS, dtype=x.dtype).index_add(0, chosen, torch.ones_like(chosen, dtype=x.dtype))
    return x / count[chosen].view(*x.shape[:2], 1)


def groups_of_others(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    """Rows sorted by one key meet the experts of another."""
    flat = x.flatten(0, 1)
    one, two = m.router(flat).argmax(-1), m.router(flat).argmin(-1)
    order = one.argsort()
    y = in_groups(flat[order], m.up, F.one_hot(two, EXPERTS).sum(0).cumsum(0).to(torch.int32))
    return x + (y @ m.down[0])[order.argsort()].view(x.shape)


def groups_counted(
    m: Model, x: Tensor, counts: Callable[[Tensor], Tensor] = lambda n: n, descending: bool = False
) -> Tensor:
    """Rows sorted by their key, which is counted again for the groups."""
    flat = x.flatten(0, 1)
    keys = m.router(flat).argmax(-1)
    order = keys.sort(descending=descending)[1]
    ends = counts(F.one_hot(keys, EXPERTS).sum(0)).cumsum(0).to(torch.int32)
    return x + (in_groups(flat[order], m.up, ends) @ m.down[0])[order.argsort()].view(x.shape)


def flat_and(x: Tensor, add: Callable[[Tensor], Tensor]) -> Tensor:
    """Rows at the numbers of first tokens, after something is added."""
    return x + x.flatten(0, 1)[add(torch.arange(x.shape[0]) * TOKENS) % (x.shape[0] * TOKENS), None]


def shifted_write(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    into = torch.zeros_like(x)
    into[(torch.arange(x.shape[0]) + 1).clamp(max=x.shape[0] - 1)] = x
    return x + into


def unsorted_values(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    return x * x[:, 0, 0].sort()[0][:, None, None]


WRONG: dict[str, tuple[str, Body]] = {
    "sample before": ("sub computes with the positions", lambda m, x, ids, y: x + x[torch.arange(x.shape[0]) - 1]),
    "rolled by arithmetic": ("add computes with the positions", lambda m, x, ids, y: x + rolled(x)),
    "sample before in the loss": ("add computes with the positions", lambda m, x, ids, y: F.mse_loss(x, rolled(x))),
    "place as a feature": ("index computes", lambda m, x, ids, y: x + m.places.weight[torch.arange(x.shape[0]), None]),
    "place as a number": ("mul computes", lambda m, x, ids, y: x * torch.arange(x.shape[0])[:, None, None]),
    "place by a sum of ones": (
        "cumsum works",
        lambda m, x, ids, y: x * torch.ones(x.shape[0]).cumsum(0)[:, None, None],
    ),
    "table by size": ("slice computes", lambda m, x, ids, y: x + m.places.weight[: x.shape[0], None]),
    "place in the loss": ("mul computes", lambda m, x, ids, y: (x * torch.arange(x.shape[0])[:, None, None]).sum()),
    "size as a number": ("full computes with the number", lambda m, x, ids, y: x * torch.full((), x.shape[0])),
    "sorted without return": ("add pairs .* argsort", lambda m, x, ids, y: x + x[x[:, 0, 0].argsort()]),
    "sorted in the loss": (
        "mse_loss pairs .* argsort",
        lambda m, x, ids, y: F.mse_loss(x, x[x[:, 0, 0].argsort()]),
    ),
    "labels of others": ("cross_entropy_loss pairs", lambda m, x, ids, y: (x[x[:, 0, 0].argsort()], y)),
    "sorted values": ("mul pairs .* sort", unsorted_values),
    "back by another order": ("index works", other_way_back),
    "by the order twice": ("index works", lambda m, x, ids, y: x[(i := x[:, 0, 0].argsort())][i]),
    "columns sorted": ("sort works", lambda m, x, ids, y: x + x.flatten(1).sort(0)[0].view(x.shape)),
    "best of the batch": ("topk works", lambda m, x, ids, y: x + x[:, 0].topk(1, 0)[0][:, None]),
    "by an input": ("index works", lambda m, x, ids, y: x + x[ids[:, 0] % 2]),
    "flat by an input": ("index works", lambda m, x, ids, y: x + x.flatten(0, 1)[ids]),
    "flat by a step": ("arange computes", lambda m, x, ids, y: flat_numbers(m, x, ids, y, step=1)),
    "shifted labels": ("roll works", lambda m, x, ids, y: x - m.table(ids[y[:, 0].roll(1, 0).clamp(0, 1)])),
    "gathered along the batch": (
        "gather works",
        lambda m, x, ids, y: x + x.gather(0, (ids % 2)[..., None].expand_as(x)),
    ),
    "windows of samples": ("unfold ", lambda m, x, ids, y: x.unfold(0, 2, 1).sum(-1).mean() + x.mean()),
    "differences": ("diff ", lambda m, x, ids, y: x.diff(dim=0).square().mean() + x.mean()),
    "shared capacity": ("cumsum works", shared_capacity),
    "capacity by order": ("searchsorted", capacity_by_order),
    "ranks by scatter": ("index computes", ranks_by_scatter),
    "ranks by sorting twice": (
        "mul computes",
        lambda m, x, ids, y: x * x[:, 0, 0].argsort().argsort()[:, None, None],
    ),
    "histogram read back": ("index_add sums", histogram_read_back),
    "groups of others": ("sum sums", groups_of_others),
    "groups in reverse": ("sum sums", lambda m, x, ids, y: groups_counted(m, x, descending=True)),
    "groups of rounded counts": ("sum sums", lambda m, x, ids, y: groups_counted(m, x, lambda n: n.half())),
    "number of a later row": ("add computes", lambda m, x, ids, y: flat_and(x, lambda i: i + TOKENS)),
    "twice as far": ("add computes", lambda m, x, ids, y: flat_and(x, lambda i: i.add(ids.argmax(1), alpha=2))),
    "divided before it is filled": ("floor_divide", lambda m, x, ids, y: x + x[torch.arange(len(x)) * 2 // 2]),
    "remainder before it is filled": ("remainder computes", lambda m, x, ids, y: flat_and(x, lambda i: i)),
    "back in reverse": (
        "add pairs",
        lambda m, x, ids, y: x + x[(i := x[:, 0, 0].argsort())][i.argsort(descending=True)],
    ),
    "sorted by coarser numbers": ("add pairs", lambda m, x, ids, y: x + x[(torch.arange(len(x)) * 2).argsort()]),
    "order of a column": ("argsort works", lambda m, x, ids, y: x + x[x[:, :, 0].argsort(0)[:, 0]]),
    "added to other rows": (
        "index_add works",
        lambda m, x, ids, y: x + x[x[:, 1, 0].argsort()].index_add(0, (i := x[:, 0, 0].argsort()), x[i]),
    ),
    "written in batch order": (
        "index_put works",
        lambda m, x, ids, y: x + torch.zeros_like(x).index_put((x[:, 0, 0].argsort(),), x),
    ),
    "more rows than samples": (
        "index_add works",
        lambda m, x, ids, y: x + x.new_zeros(2 * len(x), *x.shape[1:]).index_add(0, torch.arange(len(x)), x)[: len(x)],
    ),
    "numbers in every second row": (
        "index_put works",
        lambda m, x, ids, y: (
            x + x[torch.zeros(2 * len(x), dtype=int).index_put((2 * (i := torch.arange(len(x))),), i)][: len(x)]
        ),
    ),
    "added to sorted rows under a mask": (
        "index_put works",
        lambda m, x, ids, y: x + x[x[:, 0, 0].argsort()].index_put((ids > 6,), m.mask_token, accumulate=True),
    ),
    "table at two orders": (
        "index pairs",
        lambda m, x, ids, y: x + m.router.weight[(k := ids[:, 0] % 4)[x[:, 0, 0].argsort()], k][:, None, None],
    ),
    "table at pairs": (
        "index pairs",
        lambda m, x, ids, y: x + m.router.weight[(k := ids[:, 0] % 4)[:, None], k].sum(1)[:, None, None],
    ),
    "table at rows merged in two ways": (
        "index pairs",
        lambda m, x, ids, y: x + m.router.weight[(k := ids % 4).flatten(), k.t().flatten()].view(ids.shape)[..., None],
    ),
    "place as a column": ("index works", lambda m, x, ids, y: x + x[(i := torch.arange(len(x))), :, i][..., None]),
    "row of a reshaped table": (
        "select",
        lambda m, x, ids, y: x + x[:, 0].reshape(x.shape[0], 2, -1)[1].flatten(),
    ),
    "written to each": ("index_put", lambda m, x, ids, y: x.index_put((torch.tensor([0]),), x[:, :1].mean(0)[None])),
    "columns of others": ("index_put", columns_of_others),
    "groups of keys below 0": ("grouped_mm", lambda m, x, ids, y: routed(m, x, unknown, histogram("histc"))),
    "written beside": ("add computes", shifted_write),
    "written by an input": ("index_put works", lambda m, x, ids, y: x.index_put((ids[:, 0] % 2,), x)),
    "summed by an input": ("index_add works", lambda m, x, ids, y: x.index_add(0, ids[:, 0] % 2, x)),
}


@pytest.mark.fault("samples mixed")
@pytest.mark.parametrize("name", WRONG)
def test_what_moves_between_samples_is_refused(name: str) -> None:
    says, body = WRONG[name]
    with pytest.raises(UnsupportedOp, match=says) as error:
        normalised(Model(body), batch())
    assert "test_index_moves.py" in error.value.where and error.value.fix


TRUSTED = [
    *("sample before", "place as a number", "sorted in the loss", "back by another order", "by the order twice"),
    *("shared capacity", "ranks by scatter", "histogram read back", "groups of others", "written beside"),
]


@pytest.mark.fault("moves on trust")
@pytest.mark.parametrize("name", TRUSTED)
def test_on_trust_they_would_train_otherwise(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trusting = [p for p in normalise.LOSS if p is not refuse_mixed_samples]
    monkeypatch.setattr(normalise, "LOSS", trusting)
    with pytest.raises(AssertionError):
        assert_unchanged(Model(WRONG[name][1]), batch())
