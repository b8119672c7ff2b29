"""Clusters: every shipped file is plausible and round-trips; mistakes in a user's file are named by field."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autoptd.cost_models import local_cluster
from autoptd.cost_models.cluster import Cluster, Device, Peaks
from autoptd.cost_models.local_cluster import default_cluster
from autoptd.errors import ClusterError

GPU_CLUSTERS = [name for name in Cluster.names() if name != "local"]
OWN = """
name = "own"
[device]
name = "thing"
memory_bytes = 80e9
memory_bytes_per_s = 2e12
[device.matmul_flops_per_s]
fp64 = 1e13
fp32 = 2e13
bf16 = 3e14
fp16 = 3e14
[[levels]]
name = "inside"
ranks = 4
bytes_per_s = 1e11
latency_s = 5e-6
[[levels]]
name = "outside"
bytes_per_s = 1e10
latency_s = 2e-5
"""


def test_shipped_names():
    dgx = ("dgx-a100-40gb", "dgx-a100-80gb", "dgx-b200", "dgx-b300", "dgx-h100", "dgx-h200")
    others = ("g2", "gb200-nvl72", "gb300-nvl72", "grand-teton-h100-96gb", "jean-zay-a100", "local")
    assert Cluster.names() == (*dgx, *others, "p4d", "p5", "p5en", "p6-b200")


@pytest.mark.parametrize("name", Cluster.names())
def test_round_trip_is_exact(name: str):
    cluster = Cluster.load(name)
    again = Cluster.from_data(json.loads(json.dumps(cluster.to_data())))
    assert again == cluster and hash(again) == hash(cluster)
    assert json.dumps(again.to_data()) == json.dumps(cluster.to_data())
    assert cluster.name == name and cluster.device.name in cluster.describe()


@pytest.mark.parametrize("name", [name for name in GPU_CLUSTERS if name != "g2"])
def test_numbers_are_plausible(name: str):
    cluster = Cluster.load(name)
    device, (intra, inter) = cluster.device, cluster.levels
    peaks = device.matmul_flops_per_s
    assert peaks.bf16 == peaks.fp16
    assert 10 <= peaks.bf16 / peaks.fp32 <= 32, "matrix units are 16 times the plain fp32 rate, give or take"
    assert 100 <= peaks.bf16 / device.memory_bytes_per_s <= 420, "flop per byte at the ridge"
    assert 20e-3 <= device.memory_bytes / device.memory_bytes_per_s <= 45e-3, "seconds to read all of memory"
    assert 3 <= device.memory_bytes_per_s / intra.bytes_per_s <= 11
    assert 6 <= intra.bytes_per_s / inter.bytes_per_s <= 48
    assert intra.ranks == (72 if "nvl72" in name else 8) and inter.ranks is None
    assert 1e-6 < intra.latency_s < inter.latency_s < 80e-6
    assert (intra.in_switch is None) == ("A100" in device.name), "NVSwitch sums from H100 on"
    if intra.in_switch:
        assert 0.5 < intra.in_switch.fraction < 0.8 and 10e-6 < intra.in_switch.latency_s < 40e-6
    assert 1e-6 < device.launch_s < 10e-6
    assert 0.5e9 < device.context_bytes < 2e9 and device.usable_bytes == device.memory_bytes - device.context_bytes
    assert 0.7 <= intra.sustained.fraction <= 0.96
    assert 0.45 <= device.matmul_sustained.fraction <= 0.87, "training reaches less than the best of all shapes"
    assert 0.35 <= device.rows_sustained.fraction < device.memory_sustained.fraction <= 0.92
    assert (0.1 if "Omni-Path" in inter.name else 0.9) <= inter.sustained.fraction <= 0.96
    backward = device.attention_backward_sustained.fraction
    # FlashAttention-2 does without the instructions that tensor cores have had since Hopper
    least = 0.15 if "B" in device.name.partition("-")[0] else 0.2
    assert least <= backward < device.attention_sustained.fraction < device.matmul_sustained.fraction
    for rates in device.attention.values():  # with the starts and overheads of 4,096 tokens, and of heads of 128
        overhead = 1 + (device.head_overhead if rates.head_overhead is None else rates.head_overhead) / 128
        forward, backward = rates.forward / (1 + rates.start / 2112), rates.backward / (1 + rates.backward_start / 2112)
        assert backward < forward and forward / overhead <= 0.62 and rates.source


def test_numbers_of_a_card_on_pcie_are_plausible():
    cluster = Cluster.load("g2")
    device, (intra, inter) = cluster.device, cluster.levels
    peaks = device.matmul_flops_per_s
    # 58 multiprocessors * 512 multiply-adds per cycle * 2 * 2.04 GHz
    assert peaks.bf16 == peaks.fp16 == pytest.approx(58 * 512 * 2 * 2.04e9, rel=0.01)
    assert peaks.bf16 / peaks.fp32 == pytest.approx(4, rel=0.01)
    assert 0.35 <= device.matmul_sustained.fraction <= 1050 / 2040, "the clock at which its runs were timed"
    assert device.attention_sustained.fraction < device.matmul_sustained.fraction
    assert 4e9 <= intra.bytes_per_s * intra.sustained.fraction <= 4.7e9, "between devices, by way of the host"
    assert intra.ranks == 8 and inter.bytes_per_s * 8 == inter.port_bytes_per_s
    assert 22 * 2**30 < device.memory_bytes < 23 * 2**30


@pytest.mark.parametrize("name", GPU_CLUSTERS)
def test_every_number_has_a_source(name: str):
    cluster = Cluster.load(name)
    sourced = [cluster.device, cluster.device.matmul_sustained, cluster.device.attention_sustained]
    sourced += [cluster.device.memory_sustained, *cluster.levels, *(level.sustained for level in cluster.levels)]
    sourced += [level.in_switch for level in cluster.levels if level.in_switch]
    assert all(len(item.source) > 20 for item in sourced)


def test_generations_order():
    a100, h100, h200, b200 = (Cluster.load(f"dgx-{n}").device for n in ("a100-80gb", "h100", "h200", "b200"))
    assert (
        79 * 2**30
        < min(a100.memory_bytes, h100.memory_bytes)
        <= max(a100.memory_bytes, h100.memory_bytes)
        < h200.memory_bytes
    )
    assert h200.memory_bytes < b200.memory_bytes
    assert h100.matmul_flops_per_s == h200.matmul_flops_per_s and h100.memory_bytes_per_s < h200.memory_bytes_per_s
    # the DGX H100 datasheet quotes 3958 Tflop/s of fp8 with sparsity: four times dense bf16
    assert h100.matmul_flops_per_s.bf16 == pytest.approx(3958e12 / 4, rel=0.001)
    # 108 multiprocessors * 1024 multiply-adds per cycle * 2 * 1.41 GHz
    assert a100.matmul_flops_per_s.bf16 == pytest.approx(108 * 1024 * 2 * 1.41e9, rel=0.002)


def test_own_file(tmp_path: Path):
    path = tmp_path / "own.toml"
    path.write_text(OWN)
    cluster = Cluster.load(path)
    assert cluster.gpus_per_node == 4 and cluster.device.memory_bytes == 80_000_000_000
    assert cluster.levels[0].sustained_bytes_per_s == 1e11 and cluster == Cluster.load(str(path))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("memory_bytes = 80e9", "memory_bytes = -1"), "device.memory_bytes: input should be greater than 0, got -1"),
        (("memory_bytes = 80e9", 'memory_bytes = "much"'), "device.memory_bytes: "),
        (
            ("memory_bytes = 80e9", "memory_bites = 80e9"),
            "device.memory_bites: unknown key; did you mean 'memory_bytes'",
        ),
        (("memory_bytes = 80e9", ""), "device.memory_bytes: missing"),
        (("bf16 = 3e14\n", ""), "device.matmul_flops_per_s.bf16: missing"),
        (
            ("bytes_per_s = 1e10", "bytes_per_s = nan"),
            "levels[1].bytes_per_s: input should be a finite number, got nan",
        ),
        (
            ("bytes_per_s = 1e10", "bytes_per_s = inf"),
            "levels[1].bytes_per_s: input should be a finite number, got inf",
        ),
        (("latency_s = 5e-6", "latency_us = 5"), "levels[0].latency_us: unknown key; did you mean 'latency_s'"),
        (("latency_s = 5e-6", 'latency_s = 5e-6\nprotocols = ["LL64"]'), "levels[0].protocols[0]: "),
        (("latency_s = 5e-6", "latency_s = 5e-6\nprotocols = []"), "levels[0].protocols: "),
        (("latency_s = 5e-6", "latency_s = 5e-6\nwiring = [[0, 1], [1, 0]]"), "a table of 4 by 4 links"),
        (("latency_s = 2e-5", "latency_s = 2e-5\nport_bytes_per_s = 1e9"), "less than bytes_per_s"),
        (("latency_s = 2e-5", "latency_s = 2e-5\nin_switch = { fraction = 0.7, latency_s = 1e-5 }"), "only the first"),
        (("ranks = 4\n", ""), "(the whole file): only the last of levels may leave out `ranks`"),
        (("ranks = 4", "ranks = 0"), "levels[0].ranks: input should be greater than 0, got 0"),
        (("ranks = 4", "ranks = true"), "levels[0].ranks: should be a number or text, not true or false"),
        (('name = "outside"', 'name = "outside"\nranks = 6'), "6 ranks is not a larger multiple of 4 ranks"),
        (
            ("memory_bytes = 80e9", "memory_bytes = 80e9\ncontext_bytes = 90_000_000_000"),
            "must be less than",
        ),
    ],
)
def test_mistakes_are_named_by_field(tmp_path: Path, change: tuple[str, str], told: str):
    path = tmp_path / "own.toml"
    assert change[0] in OWN
    path.write_text(OWN.replace(*change))
    with pytest.raises(ClusterError) as caught:
        Cluster.load(path)
    assert told in str(caught.value) and str(path) in str(caught.value) and caught.value.fix


def test_all_mistakes_at_once(tmp_path: Path):
    path = tmp_path / "own.toml"
    path.write_text(OWN.replace("fp64 = 1e13", "").replace("latency_s = 2e-5", "latency_s = -1"))
    with pytest.raises(ClusterError, match=r"2 error\(s\)") as caught:
        Cluster.load(path)
    assert "fp64: missing" in str(caught.value) and "levels[1].latency_s" in str(caught.value)


def test_not_toml(tmp_path: Path):
    path = tmp_path / "own.toml"
    path.write_text("name = [unclosed")
    with pytest.raises(ClusterError, match="line 1"):
        Cluster.load(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ClusterError, match="UTF-8"):
        Cluster.load(path)


def test_unknown_names():
    with pytest.raises(ClusterError, match=r"did you mean 'dgx-h100'.*known: dgx-a100-40gb"):
        Cluster.load("dgx-h10")
    with pytest.raises(ClusterError, match="does not exist"):
        Cluster.load("nowhere/own.toml")
    with pytest.raises(ClusterError, match="did you mean 'H100-SXM5-80GB'"):
        Cluster.of("H100-SXM5-80", 8, 450e9, 50e9)
    with pytest.raises(ClusterError):
        Cluster.from_data(["not", "a", "cluster"])


def test_of():
    cluster = Cluster.of("A100-SXM4-80GB", 4, 300e9, 12.5e9)
    shipped = Cluster.load("dgx-a100-80gb")
    assert cluster.device == shipped.device and cluster.gpus_per_node == 4
    assert [level.bytes_per_s for level in cluster.levels] == [300e9, 12.5e9]
    assert [level.sustained for level in cluster.levels] == [level.sustained for level in shipped.levels]
    assert Cluster.from_data(cluster.to_data()) == cluster
    own = Device(
        name="own",
        memory_bytes=2**30,
        memory_bytes_per_s=1e12,
        matmul_flops_per_s=Peaks(fp64=1, fp32=1, bf16=1, fp16=1),
    )
    assert Cluster.of(own, 2, 1e9, 1e9).device is own


def test_of_keeps_what_is_known_of_the_links():
    p4d, again = Cluster.load("p4d"), Cluster.of("p4d", 8, 300e9, 6.25e9)
    assert again.levels == p4d.levels, "the same rates: a GPU alone has a whole NIC, the protocols are those of EFA"
    other = Cluster.of("p4d", 4, 300e9, 20e9).levels[1]
    assert other.port_bytes_per_s is None and other.protocols == ("Simple",)
    assert Cluster.of("H100-SXM5-80GB", 8, 400e9, 50e9).levels[0].in_switch


@pytest.mark.parametrize("sizes", [(0, 1e9, 1e9), (8, -1.0, 1e9), (8, 1e9, float("nan")), (8, float("inf"), 1e9)])
def test_of_refuses_impossible_sizes(sizes: tuple[int, float, float]):
    with pytest.raises(ClusterError, match="positive"):
        Cluster.of("H100-SXM5-80GB", *sizes)


def test_unknown_precision():
    with pytest.raises(ValueError, match=r"int8.*known: bf16"):
        Cluster.load("dgx-h100").device.matmul_flops_per_s.of("int8")
    with pytest.raises(ValueError, match="no matmul peak for precision 'fp8'"):
        Cluster.load("dgx-a100-80gb").device.matmul_flops_per_s.of("fp8")


@pytest.mark.parametrize(
    ("gpus", "torchrun", "name", "node"),
    [
        ([], False, "dgx-h100", 8),
        ([], True, "local", None),
        (["NVIDIA H200"] * 8, False, "dgx-h200", 8),
        (["NVIDIA B200"] * 8, True, "dgx-b200", 8),
        (["NVIDIA H200"], False, "dgx-h200", 8),
        (["NVIDIA A100-SXM4-40GB"] * 4, True, "dgx-a100-40gb, 4 GPUs a node", 4),
        (["NVIDIA GeForce RTX 4090"], False, "dgx-h100", 8),
    ],
)
def test_default_cluster(monkeypatch: pytest.MonkeyPatch, gpus: list[str], torchrun: bool, name: str, node: int | None):
    monkeypatch.setattr(local_cluster, "_visible_gpus", lambda: tuple(gpus))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if torchrun:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    cluster = default_cluster()
    assert cluster.name == name and cluster.gpus_per_node == node


def test_default_cluster_guesses_nothing_for_a_real_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(local_cluster, "_visible_gpus", lambda: ("NVIDIA A100 80GB PCIe",) * 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(ClusterError, match="A100 80GB PCIe"):
        default_cluster()
