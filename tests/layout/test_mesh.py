"""Rank layout: Megatron's groups."""

from __future__ import annotations

import pytest

from autoptd.layout.mesh import AxisName, Mesh


def groups(mesh: Mesh, axis: AxisName) -> list[tuple[int, ...]]:
    """Return all groups of an axis, sorted by their first rank."""
    found = {tuple(mesh.group_of(rank, axis)) for rank in range(mesh.world)}
    assert sorted(rank for ranks in found for rank in ranks) == list(range(mesh.world))
    return sorted(found)


def test_sixteen_ranks_as_megatron_groups_them() -> None:
    mesh = Mesh(dp=2, tp=2, pp=4)
    assert groups(mesh, "tp") == [(i, i + 1) for i in range(0, 16, 2)]
    assert groups(mesh, "pp") == [(i, i + 4, i + 8, i + 12) for i in range(4)]
    assert groups(mesh, "dp") == [(0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15)]


def test_coordinates_and_rank_are_inverse() -> None:
    mesh = Mesh(dp=3, tp=2, pp=4)
    assert [mesh.rank(*mesh.coordinates(rank)) for rank in range(mesh.world)] == list(range(24))


def test_ranks_of_experts_are_folded_over_all_axes_of_a_stage() -> None:
    mesh = Mesh(dp=2, tp=2, pp=2, cp=2, ep=2)
    assert groups(mesh, "ep") == [(0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15)]
    assert groups(mesh, "edp") == [(0, 4), (1, 5), (2, 6), (3, 7), (8, 12), (9, 13), (10, 14), (11, 15)]
    over = Mesh(dp=2, tp=2, pp=2, cp=2, ep=4, etp=1)
    assert groups(over, "ep") == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)]
    assert groups(over, "edp") == [(i, i + 4) for i in (0, 1, 2, 3, 8, 9, 10, 11)]


def test_ranks_that_share_tokens_are_next_to_tp() -> None:
    mesh = Mesh(dp=2, tp=2, pp=2, cp=2)
    assert groups(mesh, "tp") == [(i, i + 1) for i in range(0, 16, 2)]
    assert groups(mesh, "cp") == [(0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15)]
    assert groups(mesh, "dp") == [(0, 4), (1, 5), (2, 6), (3, 7), (8, 12), (9, 13), (10, 14), (11, 15)]
    assert groups(mesh, "pp") == [(i, i + 8) for i in range(8)]
    assert groups(mesh, "data") == [(0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15)]
    assert [mesh.rank(*mesh.coordinates(rank), mesh.cp_of(rank)) for rank in range(16)] == list(range(16))


@pytest.mark.parametrize(
    "mesh", [Mesh(2, 2, 3, cp=2), Mesh(dp=2, pp=4, virtual=2), Mesh(tp=2, pp=3, virtual=2, stage_order="v")]
)
def test_each_rank_has_the_channels_of_its_edges(mesh: Mesh) -> None:
    """The two ends of a channel, and no others, have it, and both ends are the same copy of the model."""
    found: dict[tuple[int, str, int, int], set[int]] = {}
    for rank in range(mesh.world):
        for channel in mesh.channels_of(rank):
            found.setdefault(channel, set()).add(rank)
    assert all(ranks == {source, target} for (_, _, source, target), ranks in found.items())
    edges = mesh.route.edges()
    assert len(found) == 2 * len(edges) * mesh.world // mesh.pp
    for edge, direction, source, target in found:
        (below, *copy), (above, *other) = map(mesh.coordinates, (source, target))
        assert copy == other and mesh.cp_of(source) == mesh.cp_of(target)
        assert (below, above)[:: 1 if direction == "forward" else -1] == edges[edge]


def test_ranks_with_the_same_samples_are_numbered() -> None:
    mesh = Mesh(dp=2, tp=2, pp=2, cp=3)
    for dp in range(2):
        share = [rank for rank in range(mesh.world) if mesh.coordinates(rank)[1] == dp]
        assert [mesh.place_in_share(rank) for rank in share] == list(range(12))
