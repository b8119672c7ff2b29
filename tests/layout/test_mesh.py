"""Rank layout: Megatron's groups."""

from __future__ import annotations

from autoptd.layout.mesh import Mesh


def test_sixteen_ranks_as_megatron_groups_them() -> None:
    mesh = Mesh(dp=2, tp=2, pp=4)
    assert mesh.groups("tp") == [(i, i + 1) for i in range(0, 16, 2)]
    assert mesh.groups("pp") == [(i, i + 4, i + 8, i + 12) for i in range(4)]
    assert mesh.groups("dp") == [(0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15)]


def test_coordinates_and_rank_are_inverse() -> None:
    mesh = Mesh(dp=3, tp=2, pp=4)
    assert [mesh.rank(*mesh.coordinates(rank)) for rank in range(mesh.world)] == list(range(24))


def test_ranks_of_experts_are_folded_over_all_axes_of_a_stage() -> None:
    mesh = Mesh(dp=2, tp=2, pp=2, cp=2, ep=2)
    assert mesh.groups("ep") == [(0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15)]
    assert mesh.groups("edp") == [(0, 4), (1, 5), (2, 6), (3, 7), (8, 12), (9, 13), (10, 14), (11, 15)]
    over = Mesh(dp=2, tp=2, pp=2, cp=2, ep=4, etp=1)
    assert over.groups("ep") == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)]
    assert over.groups("edp") == [(i, i + 4) for i in (0, 1, 2, 3, 8, 9, 10, 11)]


def test_ranks_that_share_tokens_are_next_to_tp() -> None:
    mesh = Mesh(dp=2, tp=2, pp=2, cp=2)
    assert mesh.groups("tp") == [(i, i + 1) for i in range(0, 16, 2)]
    assert mesh.groups("cp") == [(0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15)]
    assert mesh.groups("dp") == [(0, 4), (1, 5), (2, 6), (3, 7), (8, 12), (9, 13), (10, 14), (11, 15)]
    assert mesh.groups("pp") == [(i, i + 8) for i in range(8)]
    assert mesh.groups("data") == [(0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15)]
    assert [mesh.rank(*mesh.coordinates(rank), mesh.cp_of(rank)) for rank in range(16)] == list(range(16))
