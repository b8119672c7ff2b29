"""Inputs with several rows for each sample, or with samples in another dim, taken apart and joined again."""

from __future__ import annotations

import pytest
import torch

from autoptd.layout.sample_rows import (
    PLAIN,
    SHARED,
    SampleRows,
    find_rows,
    readings,
    samples_first,
    samples_in,
    with_samples,
)


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((4, 7), torch.int64, None),
        ((12, 7), torch.float64, SampleRows(0, 3)),
        ((3, 4, 7), torch.int64, SampleRows(1)),
        ((8, 4, 7), torch.int64, SampleRows(1)),  # an equal dim before a multiple
        ((8, 4, 7), torch.float64, SampleRows(0, 2)),  # pixels: dim 0 first
        ((1, 3, 8, 40), torch.float64, SampleRows(3, 10)),
        ((5,), torch.float64, SHARED),
        ((), torch.float64, SHARED),
        ((6, 6), torch.bool, SHARED),
    ],
    ids=str,
)
def test_where_samples_are_found(shape: tuple[int, ...], dtype: torch.dtype, expected: SampleRows | None) -> None:
    assert find_rows({"x": torch.zeros(shape, dtype=dtype)}, 4).get("x") == expected


@pytest.mark.parametrize("rows", [PLAIN, SampleRows(0, 3), SampleRows(1), SampleRows(1, 2)], ids=str)
def test_taken_apart_and_joined_again(rows: SampleRows) -> None:
    x = torch.arange(12 * 8 * 2).reshape(12, 8, 2)
    assert torch.equal(rows.joined(rows.apart(x)), x)
    assert torch.equal(torch.cat([rows.part(x, i, 2) for i in range(2)], rows.dim), x)


def test_most_inputs_say_how_many_samples_there_are() -> None:
    inputs = {"pixels": torch.zeros(12, 3), "ids": torch.zeros(4, 7), "labels": torch.zeros(4, 7)}
    assert samples_in(inputs, next(readings(inputs))) == 4


def test_tables_for_each_position_may_be_more_than_inputs_with_samples() -> None:
    positions, mask = torch.zeros(6, 16), torch.zeros(6, 6, dtype=torch.bool)
    inputs = {"ids": torch.zeros(8, 6, dtype=torch.int64), "positions": positions, "mask": mask}
    found = [(rows["ids"], rows["positions"]) for rows in readings(inputs)]
    assert found == [(SampleRows(1), PLAIN), (SHARED, PLAIN), (PLAIN, SampleRows(1, 2)), (PLAIN, SHARED)]
    assert next(readings({"scale": torch.zeros(())})) == {"scale": SHARED}


def test_examples_of_more_samples_keep_their_form() -> None:
    inputs = {
        "scale": torch.ones(()),
        "ids": torch.ones(2, 7, dtype=torch.int64),
        "patches": torch.ones(6, 3),
        "positions": torch.ones(3, 2),
    }
    rows = next(readings(inputs))
    shapes = {name: list(x.shape) for name, x in with_samples(inputs, rows, 8).items()}
    assert shapes == {"scale": [], "ids": [8, 7], "patches": [24, 3], "positions": [3, 8]}
    assert samples_first(inputs, rows) == ["ids", "patches", "positions", "scale"]
