"""A small GPT, traced once for all answers."""

from __future__ import annotations

import pytest

import autoptd
from autoptd.answers.query import PlanQuery
from autoptd.compile.traced import TracedModel
from tests.answers.small import nodes_of_four, small_gpt


@pytest.fixture(scope="session")
def traced() -> TracedModel:
    return autoptd.trace(small_gpt(), seq=256)


@pytest.fixture
def asked(traced: TracedModel) -> PlanQuery:
    return PlanQuery(traced, 8, nodes_of_four(), 32, name="small")
