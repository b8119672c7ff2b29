"""A few heads of transformers, one of each sort, through the check of the coverage sweep."""

from __future__ import annotations

import pytest

from benchmarks.coverage.check import check
from benchmarks.coverage.huggingface import TABLES, heads

pytest.importorskip("transformers")
SORTS = {
    "MixtralForCausalLM": "decoder, mixture of experts",
    "BertForMaskedLM": "encoder",
    "ViTForImageClassification": "vision",
    "WhisperForConditionalGeneration": "speech, encoder and decoder",
    "DeiTForImageClassificationWithTeacher": "no loss of its own: that of its task, with targets",
}


@pytest.mark.parametrize("name", SORTS)
def test_a_head_of_each_sort_trains_in_parallel_at_parity(name: str) -> None:
    case = next(head for head in heads(list(TABLES)) if head.name == name)
    found = check(case, free=False)
    assert (found.result, found.what) == ("trained", "")
    assert found.difference < 1e-9
