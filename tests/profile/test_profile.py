"""Profiling: processes measure, the constants of synthetic measurements are recovered, files are stored."""

from __future__ import annotations

import json
import math
import random
import signal
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import autoptd.cli.main as cli
from autoptd.cost_models.cluster import AttentionRates, Cluster, Device, HostMemory, Link, Peaks, Sustained
from autoptd.errors import ClusterError
from autoptd.layout.mesh import Mesh
from autoptd.profile.budget import spend
from autoptd.profile.cases import host_series, network_series, op_series
from autoptd.profile.fit import fit
from autoptd.profile.host import dispatch_s, host_run
from autoptd.profile.network import Network
from autoptd.profile.record import Case, Measurement, ProfileRecord, Skipped
from autoptd.profile.report import predicted_s, rows
from autoptd.profile.search import best_rate, best_two
from autoptd.profile.toml import cluster_toml
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.threaded import run_lockstep
from tests.profile.launched import listening, one_fails

# No existing device, so that no datasheet applies; only products of peaks and sustained fractions matter.
DEVICE = Device(
    name="Nobody's GPU",
    memory_bytes=2**36,
    memory_bytes_per_s=2e12,
    memory_sustained=Sustained(fraction=0.85),
    launch_s=2.5e-6,
    dispatch_s=6e-6,
    multiprocessors=100,
    k_overhead=90.0,
    head_overhead=20.0,
    matmul_flops_per_s=Peaks(fp64=30e12, fp32=40e12, bf16=500e12, fp16=450e12),
    matmul_sustained=Sustained(fraction=0.7),
    attention_sustained=Sustained(fraction=0.5),
    attention_backward_sustained=Sustained(fraction=0.4),
)
LEVELS = (
    Link(name="in", ranks=4, bytes_per_s=100e9, latency_s=4e-6),
    Link(name="out", bytes_per_s=10e9, latency_s=20e-6),
)
TRUE = Cluster(name="true", device=DEVICE, levels=LEVELS)


def record(cluster: Cluster, world: int = 8, noise: float = 0.0, kind: str = "cuda") -> ProfileRecord:
    """Return the measurements that the models predict, off by factors 1 + noise and 1 - noise alternately."""
    series = [*op_series(kind), *network_series(world, 4, "bf16"), *host_series(kind)]
    cases = [case for cases in series for case in cases]
    points = []
    for index, case in enumerate(cases):
        seconds = predicted_s(cluster, case) * (1 + noise * (-1) ** index)
        points.append(Measurement(case=case, seconds=max(seconds, 1e-9), repeats=3))
    return ProfileRecord(
        date="2026-01-02",
        kind=kind,
        device=cluster.device.name,
        torch="2.11.0",
        backend="nccl",
        memory_bytes=2**36,
        context_bytes=10**9,
        multiprocessors=cluster.device.multiprocessors,
        cache_bytes=50 << 20,
        world=world,
        node_ranks=min(4, world),
        points=tuple(points),
        skipped=(Skipped(case=cases[0], why="no time was left"),),
    )


def constants(cluster: Cluster) -> dict[str, float]:
    """Return the quantities that the models use: products of peaks and fractions."""
    device = cluster.device
    peak = device.matmul_flops_per_s
    found = {
        "memory": device.memory_bytes_per_s * device.memory_sustained.fraction,
        "launch": device.launch_s,
        "dispatch": device.dispatch_s,
        "k": device.k_overhead,
        "head": device.head_overhead,
        **{dtype: peak.of(dtype) * device.matmul_sustained.fraction for dtype in ("fp64", "fp32", "bf16", "fp16")},
        "attention": peak.bf16 * device.attention_sustained.fraction,
    }
    assert device.attention_backward_sustained is not None
    found["attention backward"] = peak.bf16 * device.attention_backward_sustained.fraction
    for index, level in enumerate(cluster.levels):
        found |= {f"rate {index}": level.sustained_bytes_per_s, f"latency {index}": level.latency_s}
    return found


# --- the fit ------------------------------------------------------------------------------------------------------


def test_the_fit_finds_the_constants_that_made_the_points():
    found = fit(record(TRUE))
    assert constants(found) == pytest.approx(constants(TRUE), rel=0.03)
    assert found.levels[0].ranks == 4
    assert found.levels[1].ranks is None
    assert found.device.context_bytes == 10**9
    assert all(row.median_error < 0.02 for row in rows(record(TRUE), found))


def test_other_constants_give_other_answers():
    """The test above can fail: the fit follows the measurements, constant by constant."""
    halved = DEVICE.model_copy(update={"memory_sustained": Sustained(fraction=0.4), "k_overhead": 300.0})
    slower = LEVELS[0].model_copy(update={"bytes_per_s": 50e9})
    other = TRUE.model_copy(update={"device": halved, "levels": (slower, LEVELS[1])})
    found, true = constants(fit(record(other))), constants(TRUE)
    assert found["memory"] == pytest.approx(true["memory"] * 0.4 / 0.85, rel=0.03)
    assert found["k"] == pytest.approx(300, rel=0.05)
    assert found["rate 0"] == pytest.approx(true["rate 0"] / 2, rel=0.03)
    assert found["rate 1"] == pytest.approx(true["rate 1"], rel=0.03)


def test_starts_of_attention_are_found():
    rates = AttentionRates(forward=0.5, backward=0.4, head_overhead=48, start=160, backward_start=440)
    device = DEVICE.model_copy(update={"attention": {"torch": rates}})
    fitted = fit(record(TRUE.model_copy(update={"device": device}))).device
    found, peaks = fitted.attention["torch"], [d.matmul_flops_per_s.bf16 for d in (device, fitted)]
    assert [x * peaks[1] for x in (found.forward, found.backward)] == pytest.approx(
        [0.5 * peaks[0], 0.4 * peaks[0]], rel=0.05
    )
    assert (found.head_overhead, found.start, found.backward_start) == pytest.approx((48, 160, 440), rel=0.05)
    assert "24 shapes" in found.source


def test_rates_of_the_host_are_those_of_the_largest_cases():
    host = HostMemory(to_bytes_per_s=21e9, from_bytes_per_s=19e9, step_bytes_per_s=7e9)
    other = TRUE.model_copy(update={"device": DEVICE.model_copy(update={"host": host})})
    whole = record(other)
    small = tuple(  # an update of a few elements is mostly overhead
        p.model_copy(update={"seconds": p.seconds * 9}) if p.case.op == "step" and p.case.n < 1 << 24 else p
        for p in whole.points
    )
    found = fit(whole.model_copy(update={"points": small})).device.host
    assert (found.to_bytes_per_s, found.from_bytes_per_s, found.step_bytes_per_s) == pytest.approx((21e9, 19e9, 7e9))
    assert "4 ranks of a node at once" in found.source and "not measured" not in found.source
    # 2^24 elements of AdamW in bf16 move 34 bytes each
    (largest,) = [p for p in whole.of("host") if p.case.n == 1 << 24 and p.case.op == "step"]
    assert largest.seconds == pytest.approx(34 * 2**24 / 7e9)

    without = whole.model_copy(update={"points": tuple(p for p in whole.points if p.case.op != "step")})
    assert fit(without).device.host.source.endswith("not measured: step")
    known = Cluster.load("dgx-h200")
    device = known.device.model_copy(update={"name": "NVIDIA H200"})
    made = record(known.model_copy(update={"device": device}), world=1)
    none = made.model_copy(update={"points": tuple(p for p in made.points if p.case.family != "host")})
    assert fit(none).device.host == known.device.host, "those of the shipped cluster"


def test_the_memory_of_a_node_is_read_from_the_machine():
    made = record(TRUE)
    assert fit(made).device.host.memory_bytes is None, "points of earlier versions"
    found = fit(made.model_copy(update={"host_bytes": 10**12})).device.host
    assert found.memory_bytes == 10**12 and found.memory_source.startswith("measured on 2026-01-02")
    points = tuple(p for p in made.points if p.case.family != "host")
    assert fit(made.model_copy(update={"host_bytes": 10**12, "points": points})).device.host.memory_bytes == 10**12


def test_a_container_has_no_more_memory_than_its_limit(tmp_path, monkeypatch):
    import autoptd.profile.measure as measure

    limit = tmp_path / "memory.max"
    monkeypatch.setattr(measure, "_CGROUP_LIMIT", limit)
    installed = measure._host_bytes()
    limit.write_text("max\n")
    assert measure._host_bytes() == installed > 4096
    limit.write_text("4096\n")
    assert measure._host_bytes() == 4096


def test_where_the_host_is_the_device_it_has_no_rates_of_its_own():
    assert not list(host_series("cpu"))
    local = Cluster.load("local")
    found = fit(record(local, world=1, kind="cpu").model_copy(update={"multiprocessors": None}))
    assert "[device.host]" not in cluster_toml(found)


@pytest.mark.parametrize("op", ["to_host", "from_host", "step"])
def test_work_of_the_host_runs(op: str):
    run = host_run(Case(family="host", op=op, dtype="fp32", n=1000, bytes_moved=4000), torch.device("cpu"))
    cells = [cell.cell_contents for cell in run.__closure__ or ()]  # type: ignore[attr-defined]
    tensors = [x for x in cells if isinstance(x, torch.Tensor)]
    before = [x.detach().clone() for x in tensors]
    assert len(tensors) == 2 and not torch.equal(*before)
    run()
    first, second = (x.detach() for x in tensors)
    assert torch.equal(first.bfloat16(), second.bfloat16()), "copied, or rounded after the update"
    changed = [not torch.equal(x, old) for x, old in zip((first, second), before, strict=True)]
    assert changed == [True, True] if op == "step" else sum(changed) == 1


def test_noise_and_outliers_do_not_move_it():
    noisy = record(TRUE, noise=0.1)
    spoilt = tuple(
        point.model_copy(update={"seconds": point.seconds * 20}) if index % 11 == 3 else point
        for index, point in enumerate(noisy.points)
    )
    found, true = constants(fit(noisy.model_copy(update={"points": spoilt}))), constants(TRUE)
    for values in (found, true):  # only two head sizes separate fraction and overhead of attention
        values["attention"] /= 1 + values["head"] / 128
    for name in ("memory", "bf16", "attention", "rate 0", "rate 1"):
        assert found[name] == pytest.approx(true[name], rel=0.15), name


def test_a_known_gpu_keeps_its_datasheet_and_its_levels():
    known = Cluster.load("dgx-h200")
    device = known.device.model_copy(update={"name": "NVIDIA H200", "memory_sustained": Sustained(fraction=0.77)})
    alone = record(known.model_copy(update={"device": device}), world=1)
    found = fit(alone)
    assert found.device.matmul_flops_per_s == known.device.matmul_flops_per_s
    assert found.device.memory_sustained.fraction == pytest.approx(0.77, rel=0.02)
    assert [level.bytes_per_s for level in found.levels] == [level.bytes_per_s for level in known.levels]
    assert all(level.source.startswith("not measured, taken from dgx-h200: ") for level in found.levels)
    assert "measured on 2026-01-02, NVIDIA H200, torch 2.11.0" in found.device.source


def test_without_points_of_a_kind_there_is_no_cluster():
    whole = record(TRUE)
    for family in ("launch", "memory", "matmul"):
        rest = tuple(point for point in whole.points if point.case.family != family)
        with pytest.raises(ClusterError, match=f"no case of the family '{family}'"):
            fit(whole.model_copy(update={"points": rest}))


def test_the_searches_find_a_minimum():
    assert best_rate(lambda x: abs(math.log(x / 37)), 1, 1000) == pytest.approx(37, rel=1e-3)
    x, y = best_two(lambda x, y: abs(math.log(x / 37)) + abs(y - 5), 1, 1000, (0, 2, 4, 8))
    assert (x, y) == pytest.approx((37, 5), rel=1e-2)
    assert best_two(lambda x, y: abs(math.log(x / 37)) + y, 1, 1000, (0, 2, 4))[1] == 0


# --- files --------------------------------------------------------------------------------------------------------


def test_a_record_reads_back():
    whole = record(TRUE)
    assert ProfileRecord.parse(whole.to_json()) == whole
    assert len(whole.to_json().splitlines()) == 16 + len(whole.points) + len(whole.skipped) + 4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "the file of points is not JSON"),
        ("[]", "not a file of measured points"),
        ('{"format": "autoptd-plan", "version": 1}', "not a file of measured points"),
        ('{"format": "autoptd-points", "version": 1, "date": 3, "point": []}', "wrong in"),
    ],
)
def test_a_wrong_record_is_refused(text: str, said: str):
    with pytest.raises(ClusterError, match=said):
        ProfileRecord.parse(text)


def test_the_toml_of_a_cluster_is_the_cluster(tmp_path: Path):
    odd = TRUE.model_copy(update={"source": 'a "quoted" source, µs\\\n'})
    for cluster in (odd, *map(Cluster.load, Cluster.names())):
        (tmp_path / "c.toml").write_text(cluster_toml(cluster, ("two\nlines",)), "utf-8")
        assert Cluster.load(tmp_path / "c.toml") == cluster


# --- cases and time -----------------------------------------------------------------------------------------------


def test_groups_of_several_nodes():
    def groups(world: int, node_ranks: int) -> set[tuple[str, int, int]]:
        series = network_series(world, node_ranks, "bf16")
        return {(case.family, case.ranks, case.stride) for cases in series for case in cases}

    assert groups(1, 1) == set()
    assert groups(8, 8) == {("collective", 8, 1), ("p2p", 2, 1)}
    assert groups(16, 8) == {*(("collective", *g) for g in ((8, 1), (16, 1), (2, 8))), ("p2p", 2, 1), ("p2p", 2, 8)}
    assert groups(4, 1) == {("collective", 4, 1), ("p2p", 2, 1)}


def test_time_is_shared_out():
    """A clock that only measuring advances: every series is measured, at least at its smallest case, in any time."""
    series = [
        [Case(family="matmul", op="linear", dtype="fp32", m=n, n=n, k=n) for n in (64, 128, 256, 512, 1024)],
        [Case(family="memory", op="copy", dtype="fp32", n=n, bytes_moved=8 * n) for n in (2**14, 2**16, 2**18)],
    ]
    clock = [0.0]

    def measure(case: Case, share_s: float) -> Measurement | Skipped:
        seconds = case.flops / 1e9 + case.nbytes / 1e9
        clock[0] += max(share_s, 5 * seconds)
        return Measurement(case=case, seconds=seconds, repeats=3)

    found = spend(series, 1.0, lambda: clock[0], measure, lambda _: None)
    assert [type(result) for result in found] == [Measurement] * 3 + [Skipped] * 2 + [Measurement] * 3
    assert clock[0] <= 1.2
    assert isinstance(found[3], Skipped)
    assert found[3].why.startswith("would take")
    clock[0] = 0.0
    found = spend(series, 0.0, lambda: clock[0], measure, lambda _: None)
    assert [index for index, result in enumerate(found) if isinstance(result, Measurement)] == [0, 5]


def test_an_error_skips_the_case(monkeypatch: pytest.MonkeyPatch):
    import autoptd.profile.measure as measure

    real = measure.time_op

    def broken(case: Case, *rest: object) -> tuple[float, int]:
        if case.dtype == "fp16":
            raise RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Half'\nand more")
        return real(case, *rest)

    monkeypatch.setattr(measure, "time_op", broken)
    told: list[str] = []
    shown = nullcontext(lambda case, how, total: told.append(f"{case}: {how}"))
    monkeypatch.setattr(measure, "_bar", lambda show: shown)
    found = measure.measure(0.3, 1)
    failed = [skipped for skipped in found.skipped if skipped.case.dtype == "fp16"]
    assert failed[0].why == "RuntimeError: \"addmm_impl_cpu_\" not implemented for 'Half'"
    assert any(line.endswith(failed[0].why) for line in told)
    assert found.of("collective", "p2p") == ()
    cluster = fit(found)
    assert cluster.device.matmul_flops_per_s.fp16 == cluster.device.matmul_flops_per_s.bf16
    assert cluster.levels[0].source.startswith("not measured, taken from local")


# --- the command --------------------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_two_processes_measure_and_the_file_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out, points, again = (tmp_path / name for name in ("c.toml", "points.json", "again.toml"))
    start = time.monotonic()
    assert cli.main(["profile", "-o", str(out), "--points", str(points), "--time-limit", "2", "--processes", "2"]) == 0
    assert time.monotonic() - start < 60
    said = capsys.readouterr().out
    assert "all_reduce of 2 ranks" in said
    assert f"saved to {out}; the points are in {points}" in said
    kept = ProfileRecord.load(points)
    assert kept.world == 2
    families = {(point.case.family, point.case.op) for point in kept.points}
    assert {("collective", name) for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")} <= families
    assert {family for family, _ in families} >= {"matmul", "attention", "memory", "launch", "p2p"}

    cluster = Cluster.load(out)
    assert cluster.levels[0].ranks is None
    assert cluster.source == kept.origin
    assert cli.main(["profile", "--from", str(points), "-o", str(again), "--json"]) == 0
    assert again.read_text("utf-8") == out.read_text("utf-8")
    assert Cluster.from_data(json.loads(capsys.readouterr().out)["cluster"]) == cluster

    words = ["plan", "nanogpt", "--world", "2", "--cluster", str(out), "--batch", "2", "--seq", "32", "--json"]
    assert cli.main(words) == 0
    assert json.loads(capsys.readouterr().out)["cluster"]["name"] == cluster.name


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-o", "{tmp}/no/c.toml"], "does not exist"),
        (["-o", "{tmp}"], "it is a folder"),
        (["-o", "{tmp}/c.toml", "--points", "{tmp}/no/p.json"], "does not exist"),
        (["-o", "{tmp}/c.toml", "--from", "{tmp}/no.json"], "cannot read the file of points"),
        (["-o", "{tmp}/c.toml", "--from", "{tmp}/no.json", "--processes", "2"], "--from measures nothing"),
        (["--time-limit", "0"], "'0' is not a number of seconds"),
        (["--processes", "0"], "'0' is not a whole number from 1"),
    ],
)
def test_bad_usage_is_refused_before_anything_is_measured(
    words: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    import autoptd.profile.measure as measure

    monkeypatch.setattr(measure, "measure", lambda *_: pytest.fail("measured"))
    assert cli.main(["profile", *(word.format(tmp=tmp_path) for word in words)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.ranks
def test_interrupted_it_writes_nothing(tmp_path: Path):
    command = [sys.executable, "-m", "autoptd.cli.main", "profile", "-o", "c.toml", "--points", "p.json"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs of a shell ignore SIGINT
    )
    time.sleep(6)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors.splitlines()[-1]) == (130, "autoptd: interrupted")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ranks
def test_a_process_that_cannot_start_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    from autoptd.errors import RuntimeFault
    from autoptd.profile.measure import measure

    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "sitecustomize.py").write_text("raise SystemExit('no licence')\n")
    with pytest.raises(RuntimeFault, match=r"process [01] ended with code 1"):
        measure(1.0, 2)
    assert "no licence" in capfd.readouterr().err


@pytest.mark.ranks
def test_a_process_that_fails_says_why_and_ends_the_others(capfd: pytest.CaptureFixture[str]):
    from autoptd.errors import RuntimeFault
    from autoptd.profile.world import launch

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RuntimeFault, match=r"process 1 ended with code 1(?s:.*)ValueError: out of luck"):
        launch(2, one_fails, "out of luck")
    assert "ERROR" not in capfd.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.ranks
def test_the_store_of_launched_processes_listens_on_loopback_alone():
    from autoptd.profile.world import launch

    assert not launch(2, listening)


def test_a_gpu_that_others_use_is_refused():
    from autoptd.errors import ClusterError
    from autoptd.profile.measure import checked_context

    assert checked_context(739049472) == 739049472
    with pytest.raises(ClusterError, match=r"45\.6 GiB of this GPU are used by another process"):
        checked_context(48_981_803_008)


def test_a_launch_in_training_takes_the_host_longer_than_one_in_a_loop():
    """Autograd, the emitted program and the optimizer have their share: 2 to 100 times an op's own time."""
    x = torch.zeros(8)
    start = time.perf_counter()
    for _ in range(1000):
        x.add_(1.0)
    alone_s = (time.perf_counter() - start) / 1000
    seconds, steps = dispatch_s(torch.device("cpu"))
    assert steps > 1 and 2 * alone_s < seconds < 1e-2


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
def test_medians_of_ranks_are_found_by_counting(world: int) -> None:
    """The median of each value over the ranks that have it is exact, for even and odd numbers of ranks."""
    draw = random.Random(world)
    rows: list[list[float | None]] = [
        [draw.choice([None, 1e-6, 3e-5, 10 ** draw.uniform(-7, 2)]) for _ in range(40)] + [None] for _ in range(world)
    ]

    def body(c: Communicators) -> list[float | None]:
        network = object.__new__(Network)
        network.sums = lambda values: c.world.all_reduce(torch.tensor(values, dtype=torch.int64)).tolist()  # type: ignore[method-assign]
        return network.medians(rows[c.rank])

    known = [[x for x in column if x is not None] for column in zip(*rows, strict=True)]
    expected = [statistics.median(each) if each else None for each in known]
    assert all(found == expected for found in run_lockstep(Mesh(dp=world), body))
