"""Structures of arguments: flat, and nested again."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from autoptd.errors import InputsError
from autoptd.nest import Nest, tensors_of

Pair = namedtuple("Pair", "x y")
A, B = torch.arange(3.0), torch.arange(4.0)


@dataclass(frozen=True)
class Fields:
    x: Tensor
    kind: str = "a"


STRUCTURES: dict[str, Any] = {
    "dict": {"a": A, "b": {"c": B}},
    "list": [A, [B]],
    "tuple": (A, B, None),
    "namedtuple": Pair(A, B),
    "dataclass": Fields(A),
    "ordered": OrderedDict(a=A, b=B),
    "user": UserDict(a=A, b=B),
    "keys that are no names": {"a b": A, 3: B, "class": A},
    "flags": {"a": A, "flags": (1, 2.5, True, None, "text")},
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_structure_is_built_again(name: str) -> None:
    given = {"plain": A, "held": STRUCTURES[name]}
    nest = Nest.of(given)
    flat = nest.flat(given)
    assert all(n.isidentifier() and isinstance(x, Tensor) for n, x in flat.items())
    again = nest.nested(flat)
    assert type(again["held"]) is type(given["held"])
    assert [id(x) for x in tensors_of(again)] == [id(x) for x in tensors_of(given)]
    assert nest.flat(flat) == flat  # a flat batch stays as it is
    assert repr(again) == repr(given)


def test_names_that_would_clash() -> None:
    flat = Nest.of(given := {"a": {"b": A}, "a_b": B, "a_": [A]}).flat(given)
    assert list(flat) == ["a_b_", "a_b", "a__0"]


def test_fixed_values_may_be_left_out_and_must_be_the_planned_ones() -> None:
    nest = Nest.of({"x": A, "scale": 0.5})
    assert nest.flat({"x": B}) == nest.flat({"x": B, "scale": 0.5}) == {"x": B}
    assert nest.nested({"x": B}) == {"x": B, "scale": 0.5}
    with pytest.raises(InputsError, match=r"scale is 0.25, but the plan was made for 0.5"):
        nest.flat({"x": B, "scale": 0.25})
    with pytest.raises(InputsError, match=r"scale is a Tensor, but the plan"):
        nest.flat({"x": B, "scale": A})
    with pytest.raises(InputsError, match="on is 1, but the plan was made for True"):
        Nest.of({"x": A, "on": True}).flat({"on": 1})


@pytest.mark.parametrize("other", [{"a": A}, {"a": A, "b": B, "c": B}, A, None])
def test_another_structure_than_planned(other: Any) -> None:
    with pytest.raises(InputsError, match=r"held .*but the plan was made for 'a', 'b'"):
        Nest.of({"held": {"a": A, "b": B}}).flat({"held": other})


def test_another_order_of_keys_than_planned() -> None:
    nest = Nest.of({"held": {"a": A, "b": [B, {"c": A, "d": B}]}})
    with pytest.raises(InputsError, match="another order than in the example inputs") as caught:
        nest.flat({"held": {"a": A, "b": [B, {"d": B, "c": A}]}})
    assert (caught.value.where, caught.value.fix) == ("held.b.1", "give them as 'c', 'd'")


def test_values_that_are_no_data() -> None:
    with pytest.raises(InputsError, match=r"input 'held.b' is ndarray") as caught:
        Nest.of({"held": {"a": A, "b": np.zeros(3)}})
    assert "torch.from_numpy" in caught.value.fix
