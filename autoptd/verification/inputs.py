"""Batches for verification: uneven on purpose, and accepted by the plain model.

Neighbouring samples have different numbers of valid tokens, one microbatch of the first step has none, and classes are
not equally frequent. A loss that is averaged over the wrong count therefore gives a wrong result.

The valid values of each input come from the graph (`domains`). Each input has several makers, the most discriminating
first. The plain model is trained on the batches; if it raises, or its loss or gradient is not finite, the next
combination of makers is tried. If none works, verification is an error, never a verdict.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from autoptd.compile.traced import TracedModel
from autoptd.layout.sample_rows import SHARED
from autoptd.passes.trace.traced import BATCH
from autoptd.verification.domains import Domain, domains_of

Batch = dict[str, Tensor]
_TRIES = 60
USER_ERRORS = (  # exceptions that a model may raise for a batch that it does not support
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True)
class InputMaker:
    """One way to make an input: its description, and a function of a generator."""

    text: str
    make: Callable[[torch.Generator], Tensor]


def try_batches(
    source: TracedModel, sizes: Mapping[str, int], samples: int, steps: int
) -> Iterator[tuple[list[Batch], tuple[str, ...]]]:
    """Yield the global batches of all steps with a description of each input, the best first; deterministic.

    sizes: the values of the plan's symbols; `b` is the samples of a microbatch. samples: of each batch. Each step
    rotates the samples of the step before by one.
    """
    values = {s: sizes.get(str(s), n) for s, n in source.sizes.items()} | {BATCH: samples}
    domains, rows = domains_of(source, values), source.folded.traced.rows
    makers = [
        list(makers_of(replace(domain, shape=domain.shape or (1,)), k, sizes[str(BATCH)]))
        for k, domain in enumerate(domains)
    ]
    levels = itertools.product(*(range(len(w)) for w in makers))
    for chosen in sorted(levels, key=lambda level: (sum(level), level))[:_TRIES]:
        first, texts = Batch(), []
        picked = [options[i] for options, i in zip(makers, chosen, strict=True)]
        for k, (domain, maker) in enumerate(zip(domains, picked, strict=True)):
            first[domain.name] = maker.make(torch.Generator().manual_seed(2 + k)).view(domain.shape)
            texts.append(f"{domain.name}: {maker.text}")
        steps_of = [
            {name: x if rows.get(name) == SHARED else x.roll(step, 0) for name, x in first.items()}
            for step in range(steps)
        ]
        yield [source.folded.traced.as_given(x) for x in steps_of], tuple(texts)


def makers_of(domain: Domain, k: int, micro: int) -> Iterator[InputMaker]:
    """Yield the makers of the `k`-th input, the most discriminating first. `micro`: samples of a microbatch."""
    if domain.dtype.is_floating_point or domain.dtype.is_complex:
        return _floats(domain, k, micro)
    if domain.dtype == torch.bool:
        return _flags(domain, k, micro)
    return _numbers(domain, k, micro) if domain.bound is None else _indices(domain, k, micro)


def uneven(shape: Sequence[int], k: int, micro: int, *, empty: bool) -> Tensor:
    """Return a mask of the valid elements: a prefix of each sample, of different lengths; never all false.

    With `empty`, the second microbatch has no valid element. If a sample is one number, two of three samples are valid.
    """
    samples, length = shape[0], shape[-1] if len(shape) > 1 else 1
    step = next(n for n in (5, 7, 3, 2, 1) if math.gcd(n, length) == 1)
    index = torch.arange(samples)
    count = 1 + (step * index + 3 * k) % length if length > 1 else ((index + k) % 3 != 2).long()
    if empty:
        count[micro : 2 * micro] = 0
    if not count.any():
        count[0] = 1
    found = torch.arange(length) < count[:, None]
    return found.view(samples, *[1] * (len(shape) - 2), length).expand(shape) if len(shape) > 1 else found[:, 0]


def _floats(domain: Domain, k: int, micro: int) -> Iterator[InputMaker]:
    shape, wide = domain.shape, torch.complex128 if domain.dtype.is_complex else torch.float64

    def ragged(empty: bool, weighted: bool = False) -> Callable[[torch.Generator], Tensor]:
        weights = share if weighted else lambda _: 1.0
        return lambda g: uneven(shape, k, micro, empty=empty).to(wide) * weights(g)

    def share(g: torch.Generator) -> Tensor:
        return 0.05 + 0.9 * torch.rand(shape, generator=g, dtype=torch.float64)

    normal = InputMaker("normal", lambda g: torch.randn(shape, generator=g, dtype=wide))
    shares, ones = InputMaker("between 0 and 1", share), InputMaker("all 1", lambda _: torch.ones(shape, dtype=wide))
    masks = [
        InputMaker("0 or 1, uneven", ragged(True)),
        InputMaker("0 or 1, uneven, some of each sample 1", ragged(False)),
    ]
    weights = InputMaker("between 0 and 1, uneven", ragged(True, weighted=True))
    yield from {
        "value": [normal, shares, masks[1], ones],
        "share": [shares, ones, normal],
        "mask": [*masks, shares, ones, normal],
        "weight": [weights, shares, masks[1], ones],
    }[domain.role]


def _flags(domain: Domain, k: int, micro: int) -> Iterator[InputMaker]:
    shape = domain.shape
    yield InputMaker("true or false, uneven", lambda _: uneven(shape, k, micro, empty=True).clone())
    yield InputMaker(
        "true or false, uneven, some of each sample true", lambda _: uneven(shape, k, micro, empty=False).clone()
    )
    yield InputMaker(
        "true or false, uneven, some of each sample false", lambda _: ~uneven(shape, k, micro, empty=False)
    )
    yield InputMaker("all true", lambda _: torch.ones(shape, dtype=torch.bool))
    yield InputMaker("all false", lambda _: torch.zeros(shape, dtype=torch.bool))


def _indices(domain: Domain, k: int, micro: int) -> Iterator[InputMaker]:
    """Yield makers of integers below the bound, skewed towards small ones, in some samples more than in others."""
    shape, bound = domain.shape, domain.bound
    assert bound is not None

    def body(g: torch.Generator) -> Tensor:
        skew = 1 + torch.arange(shape[0]).view(-1, *[1] * (len(shape) - 1)) % 3
        drawn = bound * torch.rand(shape, generator=g, dtype=torch.float64) ** skew
        return drawn.long().clamp(0, bound - 1).to(domain.dtype)

    yield from _marked(f"0 to {bound - 1}", body, domain, k, micro)
    yield InputMaker("all 0", lambda _: torch.zeros(shape, dtype=domain.dtype))


def _numbers(domain: Domain, k: int, micro: int) -> Iterator[InputMaker]:
    """Yield makers of integers that are not indices: masks, lengths, counts."""
    shape, dtype = domain.shape, domain.dtype

    def small(g: torch.Generator) -> Tensor:
        return torch.randint(1, 4, shape, generator=g).to(dtype)

    if set(domain.marks) - {0, 1}:
        yield from _marked("1 to 3", small, domain, k, micro)
    elif len(shape) == 1:
        yield InputMaker("1 to 3", small)
    yield InputMaker("0 or 1, uneven", lambda _: uneven(shape, k, micro, empty=True).to(dtype))
    yield InputMaker("0 or 1, uneven, some of each sample 1", lambda _: uneven(shape, k, micro, empty=False).to(dtype))
    yield InputMaker(
        "0 or 1, uneven, some of each sample 0", lambda _: (~uneven(shape, k, micro, empty=False)).to(dtype)
    )
    yield InputMaker("all 1", lambda _: torch.ones(shape, dtype=dtype))


def _marked(
    text: str, body: Callable[[torch.Generator], Tensor], domain: Domain, k: int, micro: int
) -> Iterator[InputMaker]:
    """Yield makers that put the domain's marks behind the valid elements of each sample; then one without marks."""
    info, inside = torch.iinfo(domain.dtype), range(domain.bound or 0)
    held = [m for m in domain.marks if info.min <= m <= info.max]
    for marks, empty in ((held, True), (held, False), ([m for m in held if m in inside], False)):
        if marks:
            said = f"{text} and {', '.join(map(str, marks))}, uneven"

            def make(g: torch.Generator, marks: list[int] = marks, empty: bool = empty) -> Tensor:
                each = torch.tensor(marks)[torch.arange(domain.shape[0]) % len(marks)].to(domain.dtype)
                rest = each.view(-1, *[1] * (len(domain.shape) - 1)).expand(domain.shape)
                return torch.where(uneven(domain.shape, k, micro, empty=empty), body(g), rest)

            yield InputMaker(said, make)
    yield InputMaker(text, body)
