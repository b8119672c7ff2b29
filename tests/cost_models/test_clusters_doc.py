"""docs/clusters.md: its example is a valid cluster, its error is the real one, its table agrees with the files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from autoptd.cost_models.cluster import Cluster
from autoptd.errors import ClusterError

TEXT = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text("utf-8")
EXAMPLE = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)[0]


def test_example_is_a_cluster(tmp_path: Path):
    path = tmp_path / "ours.toml"
    path.write_text(EXAMPLE, "utf-8")
    cluster = Cluster.load(path)
    assert cluster.name == "ours" and cluster.gpus_per_node == 8


def test_error_is_the_one_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("ours.toml").write_text(EXAMPLE.replace("latency_s = 10e-6", "latency_us = 10\nlatency_s = 10e-6"), "utf-8")
    with pytest.raises(ClusterError) as caught:
        Cluster.load("ours.toml")
    assert str(caught.value) in TEXT


@pytest.mark.parametrize("name", [name for name in Cluster.names() if name != "local"])
def test_table_row(name: str):
    cluster = Cluster.load(name)
    device = cluster.device
    row = [
        name,
        f"{device.memory_bytes / 2**30:.1f}",
        f"{device.memory_bytes_per_s / 1e9:.0f}",
        f"{device.matmul_flops_per_s.bf16 / 1e12:.0f}",
        f"{device.matmul_sustained.fraction:.3f}",
        f"{(torch.forward if (torch := device.attention.get('torch')) else device.attention_sustained.fraction):.3f}",
    ]
    assert f"| {' | '.join(row)} |" in TEXT


@pytest.mark.parametrize("name", [name for name in Cluster.names() if name != "local"])
def test_link_row(name: str):
    intra, inter = Cluster.load(name).levels
    switch = intra.in_switch
    row = [
        name,
        str(intra.ranks),
        f"{intra.bytes_per_s / 1e9:g}",
        f"{intra.sustained.fraction:.3f}",
        f"{intra.latency_s * 1e6:.1f}",
        f"{switch.fraction:.3f}" if switch else "–",
        f"{switch.latency_s * 1e6:.0f}" if switch else "–",
        f"{inter.bytes_per_s / 1e9:g}",
        f"{(inter.port_bytes_per_s or inter.bytes_per_s) / 1e9:g}",
        f"{inter.sustained.fraction:.3f}",
        f"{inter.latency_s * 1e6:.0f}",
    ]
    assert f"| {' | '.join(row)} |" in TEXT
