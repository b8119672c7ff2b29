"""`len` of a tensor and `int` of a quotient are sizes of the trace, and plain before and after it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from autoptd.errors import UnsupportedOp
from autoptd.passes.trace.tensor_len import symbolic_len, tensor_len
from tests.passes.interpret import assert_unchanged, normalised

HERE = sys.modules[__name__]


class ByLength(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[: len(self.layers)]:
            x = layer(x).reshape(len(x), -1)
        return x.square().sum() / len(x)


def test_the_number_of_samples_stays_a_size() -> None:
    assert_unchanged(ByLength().double(), {"x": torch.randn(6, 4, dtype=torch.float64)})


def test_len_is_given_back() -> None:
    model = ByLength()
    try:
        with symbolic_len(model):
            assert HERE.len is tensor_len and len(torch.zeros(3)) == 3 and len("four") == 4
            raise RuntimeError
    except RuntimeError:
        assert not hasattr(HERE, "len")


def test_a_module_keeps_its_own_len() -> None:
    HERE.len = own = lambda x: 7  # type: ignore[attr-defined]
    try:
        with symbolic_len(ByLength()):
            assert HERE.len is own
        assert HERE.len is own
    finally:
        del HERE.len


class Windows(nn.Module):
    """Windows of tokens, joined again by a number of samples that is computed as a quotient."""

    def __init__(self, of: float) -> None:
        super().__init__()
        self.layer, self.of = nn.Linear(4, 4), of

    def forward(self, x: Tensor) -> Tensor:
        windows = self.layer(x.view(x.size(0) * 3, 2, 4))
        count = int(windows.shape[0] / self.of)
        assert isinstance(int("6"), int) and not isinstance(count, float)
        return self.layer(windows.view(count, 6, 4)).square().mean()


def test_a_whole_quotient_of_sizes_stays_a_size() -> None:
    assert_unchanged(Windows(3.0).double(), {"x": torch.randn(6, 6, 4, dtype=torch.float64)})
    assert "int" not in vars(HERE)


def test_a_quotient_with_a_fraction_is_refused() -> None:
    with pytest.raises(UnsupportedOp, match="reshape pairs samples") as caught:
        normalised(Windows(2.9).double(), {"x": torch.randn(5, 6, 4, dtype=torch.float64)})
    assert "test_tensor_len.py" in caught.value.where


HELPERS = "def share(x):\n    return x.sum() / len(x) / float(x.size(0))\n"


class Helped(nn.Linear):
    """A model whose helpers are in files of other packages."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.share = HERE.share

    def forward(self, x: Tensor) -> Tensor:
        return self.share(super().forward(x).square())  # type: ignore[no-any-return]


@pytest.mark.parametrize("installed", [False, True])
def test_so_it_does_in_files_that_the_models_file_imports(
    installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site-packages" if installed else tmp_path
    folder.mkdir(exist_ok=True)
    (folder / "shared_helpers.py").write_text(("import torch\n" if installed else "") + HELPERS, "utf-8")
    monkeypatch.syspath_prepend(folder)
    helpers = importlib.import_module("shared_helpers")
    monkeypatch.setitem(sys.modules, "shared_helpers", helpers)
    monkeypatch.setattr(HERE, "share", helpers.share, raising=False)
    assert_unchanged(Helped().double(), {"x": torch.randn(6, 4, dtype=torch.float64)})
    assert not hasattr(helpers, "len")
