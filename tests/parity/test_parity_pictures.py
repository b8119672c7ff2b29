"""Models that loop over pictures in Python and read their sizes: as on one process, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.errors import AutoptdError, InputsError, RuntimeFault, UnsupportedOp
from autoptd.parallel import Parallel
from autoptd.passes.loops import sample_loops, write_joined
from autoptd.passes.loops.blocks import SampleBlocks
from autoptd.runtime.batch import by_sample
from autoptd.testing.parity import differences, train_alone, train_in_lockstep
from tests.parity.parity_check import TOLERANCE

SAMPLES, HEADS, WIDTH, WORDS, IMAGE = 8, 2, 16, 31, 30
HIGH, WIDE = 2, 3
PATCHES, TOKENS = HIGH * WIDE, 10
See = Callable[[nn.Module, Tensor, Tensor], Tensor]


def attention_by_lengths(model: Any, x: Tensor, grid: Tensor) -> Tensor:
    """Attend within each picture, as Qwen2-VL does without flash attention."""
    places = [(torch.arange(h)[:, None] * 8 + torch.arange(w)).flatten() for h, w in grid.tolist()]
    x = x + model.places(torch.cat(places))
    lengths = torch.repeat_interleave(grid[:, 0] * grid[:, 1], torch.ones_like(grid[:, 0]))
    bounds = F.pad(lengths.cumsum(0), (1, 0))
    q, k, v = model.heads(x).reshape(x.shape[0], 3, HEADS, -1).permute(1, 2, 0, 3).unsqueeze(1).unbind(0)
    parts = [t.split((bounds[1:] - bounds[:-1]).tolist(), dim=2) for t in (q, k, v)]
    seen = [F.scaled_dot_product_attention(*part).transpose(1, 2) for part in zip(*parts, strict=True)]
    return x + torch.cat(seen, dim=1).reshape(x.shape[0], -1)  # type: ignore[no-any-return]


def attention_by_mask(model: Any, x: Tensor, grid: Tensor) -> Tensor:
    """Attend to all pictures but for a mask, as Pixtral does."""
    mask = torch.full((x.shape[0], x.shape[0]), torch.finfo(x.dtype).min, dtype=x.dtype)
    start = 0
    for h, w in grid:
        end = start + int(h * w)
        mask[start:end, start:end] = 0
        start = end
    q, k, v = model.heads(x).reshape(1, x.shape[0], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
    seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[None, None])
    return x + seen.transpose(1, 2).reshape(x.shape[0], -1)


def a_list(model: Any, x: Tensor, grid: Tensor) -> Tensor:
    """Take the pictures as a list, add a line to each row of patches, and join them."""
    pictures = []
    for i, picture in enumerate(list(x.unflatten(0, (-1, PATCHES)))):
        h, w = grid[i].tolist()
        line = model.line.expand(h, 1, -1)
        pictures.append(torch.cat([picture.view(h, w, -1), line], dim=1)[:, :w].flatten(0, 1) + model.line)
    return torch.cat(pictures)


def rows_written(model: Any, x: Tensor, grid: Tensor) -> Tensor:
    """Fill a tensor picture by picture, as Siglip 2 does with positions."""
    b = grid.shape[0]
    found = torch.empty((b, PATCHES, WIDTH), dtype=x.dtype)
    for i in range(b):
        n = int(grid[i].prod())
        found[i, :n] = model.places.weight[:n] * 2
        found[i, n:] = model.places.weight[0]
    return x + found.flatten(0, 1)


def windows(model: Any, x: Tensor, grid: Tensor) -> Tensor:
    """Reorder the patches of each picture, and put them back."""
    order, start = [], 0
    for h, w in grid.tolist():
        index = torch.arange(h * w).reshape(h, w).T.flatten()
        order.append(index[index >= 0] + start)
        start += h * w
    at = torch.cat(order)
    return model.out(x[at])[at.argsort()]  # type: ignore[no-any-return]


class Captioner(nn.Module):
    """Text with pictures, whose patches are rows of one tensor."""

    def __init__(self, see: See) -> None:
        super().__init__()
        self.see, self.patches, self.places = see, nn.Linear(12, WIDTH), nn.Embedding(64, WIDTH)
        self.heads, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.line = nn.Parameter(torch.randn(WIDTH))
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, pixels: Tensor, grid: Tensor, labels: Tensor) -> Tensor:
        seen = self.out(self.see(self, self.patches(pixels), grid))
        marks = ids == IMAGE
        if marks.sum() != seen.shape[0]:
            raise ValueError("pictures and their tokens do not match")
        x = self.words(ids).masked_scatter(marks[..., None], seen)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def batch(seed: int = 0, samples: int = SAMPLES) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, IMAGE, (samples, TOKENS), generator=rng)
    ids[:, 2 : 2 + PATCHES] = IMAGE
    return {
        "ids": ids,
        "pixels": torch.randn(samples * PATCHES, 12, generator=rng, dtype=torch.float64),
        "grid": torch.tensor([[HIGH, WIDE]]).repeat(samples, 1),
        "labels": ids.roll(1, 1),
    }


def made(see: See, **fix: int) -> tuple[nn.Module, Parallel]:
    torch.manual_seed(0)
    model = Captioner(see).double()
    ask = {"world": 8, "cluster": "dgx-h100", "batch": SAMPLES, "precision": "fp64", "optimizer": "sgd"}
    fix = fix or {"tp": 2, "pp": 2, "dp": 2}
    found = autoptd.parallelize(model, inputs=batch(1, 2), optimizer_options={"lr": 0.05}, fix=fix, **ask)  # type: ignore[arg-type]
    return model, found


def off(see: See) -> float:
    """Return by how much a plan's steps differ from those of one process."""
    model, parallel = made(see)
    batches = [batch(2), batch(3)]
    found = train_in_lockstep(parallel, batches)
    alone = train_alone(model, batches, optimizer="sgd", optimizer_options={"lr": 0.05})
    assert found.losses == pytest.approx(alone.losses, rel=1.0)
    wrong = {**differences(found.gradients, alone.gradients), **differences(found.state, alone.state)}
    return max(wrong.values())


def by_length(model: Any, x: Tensor, grid: Tensor) -> Tensor:
    """Divide by the length of a list to which the loop adds."""
    pictures = []
    for picture in x.unflatten(0, (-1, PATCHES)):
        pictures.append(picture.tanh())
    return torch.cat([picture / len(pictures) for picture in pictures])


WAYS = [attention_by_lengths, attention_by_mask, a_list, rows_written, windows, by_length]


@pytest.mark.parametrize("see", WAYS, ids=lambda see: see.__name__)
def test_as_on_one_process(see: See) -> None:
    assert off(see) <= TOLERANCE


def test_planted_rows_of_another_picture_are_refused() -> None:
    """Every picture would read the rows of the first one."""

    def first_again(blocks: Any, dim: int) -> SampleBlocks:
        return SampleBlocks(blocks[0], torch.zeros_like(blocks[0].flatten()[0]), dim)

    with (
        patch.object(sample_loops, "blocks_of", first_again),
        pytest.raises(AutoptdError, match="works across samples"),
    ):
        made(windows)


def test_planted_order_of_patches_is_found() -> None:
    """The patches of each picture would come back in reverse."""
    flat = write_joined._flat
    with patch.object(write_joined, "_flat", lambda *args: _flipped(flat, *args)):
        assert off(attention_by_lengths) > 1e-4


def _flipped(flat: Any, graph: Any, found: Any, count: Any, dim: int) -> Any:
    node = graph.call_function(torch.ops.aten.flip.default, (found.node, [dim + 1]))
    node.meta = dict(found.node.meta)
    return flat(graph, type(found)(node, found.differs), count, dim)


def by_number(model: Any, x: Tensor, grid: Tensor) -> Tensor:
    pictures = list(x.unflatten(0, (-1, PATCHES)))
    return torch.cat([picture / pictures.__len__() for picture in pictures])


def by_turn(model: Any, x: Tensor, grid: Tensor) -> Tensor:
    return torch.cat([picture * (i + 1) for i, picture in enumerate(x.unflatten(0, (-1, PATCHES)))])


def first_for_all(model: Any, x: Tensor, grid: Tensor) -> Tensor:
    first, *more = x.unflatten(0, (-1, PATCHES))
    return torch.cat([first, *(picture + first for picture in more)])


@pytest.mark.parametrize("see", [by_number, by_turn, first_for_all], ids=lambda see: see.__name__)
def test_what_depends_on_other_samples_is_refused(see: See) -> None:
    with pytest.raises(AutoptdError, match=r"number of turns|batch size|works across samples"):
        made(see)


def test_pictures_of_another_size_are_refused_by_the_step() -> None:
    _, parallel = made(attention_by_lengths, dp=8)
    other = batch(2) | {"grid": torch.tensor([[WIDE, HIGH]]).repeat(SAMPLES, 1)}
    with pytest.raises(RuntimeFault, match=r"is not \[2, 3\], which the program was made for"):
        train_in_lockstep(parallel, [other])


def test_other_numbers_of_rows_are_refused_by_the_step() -> None:
    specs = made(attention_by_lengths, dp=8)[1].layout.specs
    with pytest.raises(InputsError, match="traced with 6 rows of dim 0"):
        by_sample(batch(2) | {"pixels": torch.randn(40, 12, dtype=torch.float64)}, specs)


def test_examples_with_pictures_of_several_sizes_are_refused() -> None:
    inputs = batch(1, 2) | {"grid": torch.tensor([[HIGH, WIDE], [WIDE, HIGH]])}
    with pytest.raises(UnsupportedOp, match=r"depends on data|from a tensor's data"):
        autoptd.trace(Captioner(attention_by_lengths).double(), inputs=inputs, precision="fp64")


def test_notes_name_what_is_fixed_and_what_is_left_out() -> None:
    _, parallel = made(attention_by_lengths)
    notes = "\n".join(parallel.plan.notes)
    assert "grid must be [2, 3] in every sample" in notes
    assert "pixels has 6 rows of dim 0 for each sample" in notes
    assert "checks of data in forward are left out: test_parity_pictures.py:" in notes
