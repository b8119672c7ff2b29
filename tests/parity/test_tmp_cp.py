import pytest
from dataclasses import replace
from tests.parity.test_parity_context import *
@pytest.mark.parametrize("mesh", [Mesh(cp=2), Mesh(dp=2,cp=2,tp=2)], ids=str)
def test_mix(mesh):
    assert not check("mixtral", mesh, BULK, "adamw")
