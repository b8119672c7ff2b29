import pytest
from dataclasses import replace
from tests.parity.test_parity_context import *
from tests.parity import parity_check as pc
real = pc.planned.__wrapped__
def planned_ep(name, mesh, variant):
    plan = real(name, replace(mesh, ep=1), variant)
    return plan.model_copy(update={"mesh": plan.mesh.model_copy(update={"ep": mesh.ep})})
pc.planned = planned_ep
W = [
    (Mesh(dp=2,ep=2), BULK, "adamw"),
    (Mesh(dp=4,ep=2,tp=2), BULK, "adamw"),
    (Mesh(dp=8,ep=4), replace(BULK, zero=0, micro=2), "sgd"),
    (Mesh(dp=2,tp=2,pp=2,ep=2), replace(BULK, zero=2), "adamw"),
    (Mesh(dp=4,pp=2,ep=2), replace(BULK, zero=3), "adamw"),
    (Mesh(dp=2,cp=2,tp=2,ep=4), BULK, "adamw"),
    (Mesh(cp=4,pp=2,ep=2), replace(BULK, zero=3, recompute="full"), "adamw"),
    (Mesh(dp=4,pp=2,ep=4), replace(BULK, schedule="interleaved", virtual=2, recompute="ops", micro=2), "sgd"),
    (Mesh(dp=4,pp=2,ep=4), replace(BULK, schedule="zero-bubble"), "adamw"),
    (Mesh(dp=2,pp=2,tp=2,ep=2), replace(BULK, recompute="selective", clip_norm=0.05), "adamw"),
    (Mesh(dp=4,tp=2,ep=4), replace(BULK, sequence_parallel=False, overlap=("dp","p2p")), "adamw"),
]
@pytest.mark.parametrize("mesh,variant,opt", W, ids=[str(i) for i in range(len(W))])
def test_mix(mesh, variant, opt):
    assert not pc.check("mixtral", mesh, variant, opt)
