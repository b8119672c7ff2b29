"""Cluster files that were made to mislead, to hang or to fill a machine."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import pytest

import autoptd.cli.main as cli
from autoptd.cost_models import wiring
from autoptd.cost_models.cluster import Cluster
from autoptd.errors import ClusterError
from tests.hostile.bounded import plain, refused, run

TEXT = (files("autoptd.cost_models.clusters") / "dgx-h100.toml").read_text("utf-8")


def replaced(pattern: str, by: str) -> str:
    found, count = re.subn(pattern, lambda _: by, TEXT, count=1, flags=re.MULTILINE)
    assert count
    return found


def wired(gpus: int, links: int) -> str:
    """A unit without a switch, all of its GPUs wired to each other."""
    rows = ", ".join(str([links * (i != j) for j in range(gpus)]) for i in range(gpus))
    head, _, levels = re.sub(r"(?ms)^\[levels\.in_switch\].*?(?=^\[)", "", TEXT).partition("[[levels]]")
    levels = re.sub(r"ranks = \d+", f"ranks = {gpus}\nwiring = [{rows}]", levels, count=1)
    return f"{head}[[levels]]{levels}"


def pools(count: int) -> str:
    return TEXT + "".join(f"[[others]]\nranks = {i + 1}\n" for i in range(count))


REFUSED: dict[str, tuple[Callable[[], str], str]] = {
    "2,000 × 2,000 wiring": (lambda: wired(2000, 1), "too large"),
    "200 × 200 wiring": (lambda: wired(200, 1), "at most 16 items"),
    "10^9 links": (lambda: wired(8, 10**9), "more than 64"),
    "ragged wiring": (lambda: wired(8, 1).replace("wiring = [[0, 1", "wiring = [[0", 1), "table of 8 by 8"),
    "10^6 pools": (lambda: pools(10**6), "too large"),
    "1,000 pools": (lambda: pools(1000), "and 980 more"),
    "10^4 levels": (lambda: TEXT + "[[levels]]\nname = 'x'\n" * 10**4, "has 20000 error|at most"),
    "20,000 unknown keys": (lambda: "".join(f"k{i} = 1\n" for i in range(20_000)) + TEXT, "and 19,"),
    "a key of 10^5 parts": (lambda: ".".join(["a"] * 10**5) + " = 1\n" + TEXT, "30 parts at line 1"),
    "quoted parts": (lambda: " . ".join(["'a'", '"b"'] * 10**4) + " = 1\n" + TEXT, "30 parts"),
    "a header of 10^5 parts": (lambda: f"{TEXT}\n[{'.'.join(['a'] * 10**5)}]\n", "30 parts"),
    "10^5 nested lists": (lambda: f"x = {'[' * 10**5}{']' * 10**5}\n{TEXT}", "not a TOML file"),
    "10^4 nested tables": (lambda: f"x = {'{a=' * 10**4}1{'}' * 10**4}\n{TEXT}", "not a TOML file"),
    "10^5 digits": (lambda: replaced(r"^memory_bytes = .*", f"memory_bytes = {'9' * 10**5}"), "not a TOML file"),
    "4,000 digits": (lambda: replaced(r"^memory_bytes = .*", f"memory_bytes = {'9' * 4000}"), "memory_bytes"),
    "no end of memory": (lambda: replaced(r"^memory_bytes = .*", "memory_bytes = inf"), "memory_bytes"),
    "no rate": (lambda: replaced(r"^memory_bytes_per_s = .*", "memory_bytes_per_s = nan"), "memory_bytes_per_s"),
    "negative latency": (lambda: replaced(r"^latency_s = .*", "latency_s = -1.0"), "latency_s"),
    "a name of 10^5 characters": (lambda: replaced(r"^name = .*", f'name = "{"x" * 10**5}"'), "at most 200"),
    "an escape in a name": (lambda: replaced(r"^name = .*", r'name = "x\u001b[2J"'), "one line of printable text"),
    "a line in a name": (lambda: replaced(r"^name = .*", r'name = "x\nautoptd: ok"'), "one line of printable text"),
    "an override in a name": (lambda: replaced(r"^name = .*", r'name = "x\u202e"'), "one line of printable text"),
    "an escape in a key": (lambda: '"k\\u001b[2J\\u202e" = 1\n' + TEXT, "unknown key"),
    "an escape in the syntax": (lambda: "x = \x1b[2J\n" + TEXT, "not a TOML file"),
    "quotes without end": (lambda: "'" * 200_000, "not a TOML file"),
    "brackets without end": (lambda: "[" * 200_000, "not a TOML file"),
    "a word without end": (lambda: "a" * 200_000, "not a TOML file"),
    "spaces without end": (lambda: "a" + " " * 200_000 + ".", "not a TOML file"),
    "200 MB": (lambda: "#" * (200 * 2**20), "too large"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_cluster_file_is_refused_at_once(case: str, config_file: Path, tmp_path: Path) -> None:
    text, said = REFUSED[case]
    path = tmp_path / "cluster.toml"
    path.write_text(text())
    message = refused("plan", config_file, "--world", "8", "--cluster", path)
    assert re.search(said, message), message
    assert plain(message) and len(message) < 20_000


def test_what_is_no_plain_file_is_refused_at_once(config_file: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "device.toml").symlink_to("/dev/zero")
    for name in ("pipe.toml", "device.toml"):
        assert "does not exist" in refused("plan", config_file, "--world", "8", "--cluster", tmp_path / name)


@pytest.mark.parametrize(("gpus", "links"), [(8, 64), (16, 64)])
def test_wiring_is_answered_soon_or_refused(gpus: int, links: int, config_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "wired.toml"
    path.write_text(wired(gpus, links))
    ended = run("plan", config_file, "--world", "16", "--batch", "16", "--fix", "tp=2", "--cluster", path)
    assert not ended.flaw, ended.flaw
    assert ended.code == 0 or "too many cycles through" in ended.err


def test_rings_of_units_that_are_wired_all_to_all() -> None:
    """n GPUs have (n - 1) / 2 rings without a common link (Walecki 1892), each way round."""
    for gpus, links, rings in ((4, 1, 1), (7, 1, 3), (8, 1, 3), (8, 2, 7), (5, 3, 6)):
        table = tuple(tuple(links * (i != j) for j in range(gpus)) for i in range(gpus))
        assert wiring.parallel_rings(table, tuple(range(gpus))) == 2 * rings
    with pytest.raises(ClusterError, match="too many cycles through 16 GPUs"):
        wiring.parallel_rings(tuple(tuple(int(i != j) for j in range(16)) for i in range(16)), tuple(range(16)))


@pytest.mark.parametrize(
    "words", ["--world 1000000000000", "--world 100000000 --batch 1000000000000", f"--batch {10**15}"]
)
def test_worlds_and_batches_that_nobody_has(words: str, config_file: Path) -> None:
    world = [] if "--world" in words else ["--world", "8"]
    message = refused("plan", config_file, *words.split(), *world)
    assert "give at most" in message


def test_the_largest_batch_and_world_are_still_planned(config_file: Path) -> None:
    ended = run("plan", config_file, "--world", "65536", "--batch", str(2**40))
    assert ended.code == 0 and not ended.flaw, ended


def test_descriptions_show_no_control_characters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x\x1b[2J\u202e.toml"
    assert cli.main(["plan", "nanogpt", "--world", "8", "--cluster", str(path)]) == 2
    path.write_text("[[")
    assert cli.main(["plan", "nanogpt", "--world", "8", "--cluster", str(path)]) == 2
    said = capsys.readouterr()
    assert plain(said.err) and said.err.count("autoptd: ") == 2 and "x\\x1b[2J\\u202e.toml" in said.err
    assert plain(Cluster.load("dgx-h100").describe())
