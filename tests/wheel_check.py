"""Check of the distribution: build it, install it outside the checkout, and run it there.

    python -m tests.wheel_check

The source distribution is built from a copy of the checkout, and the wheel from the source distribution, each by a
build frontend in its own environment. The wheel is installed into a fresh environment. Its dependencies (above all
torch) come from the environment of this Python, by a .pth file; the editable install there stays invisible, since
Python does not run .pth files of folders added that way. Every module must come from the wheel, and every command work.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = {"autoptd": ROOT / "autoptd", "autoptd/passes": ROOT / "passes", "autoptd/cost_models": ROOT / "cost_models"}
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "out", "site")

# Run in the fresh environment: import every module, and check that none comes from elsewhere.
IMPORTED = """
import importlib, pkgutil, sys
import autoptd
names = [found.name for found in pkgutil.walk_packages(autoptd.__path__, "autoptd.")]
for name in names:
    importlib.import_module(name)
files = [module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "autoptd"]
assert all(file.startswith(sys.prefix) for file in files), files
print(len(files), "modules, all of", autoptd.__path__[0])
"""

# Run in the fresh environment: train all ranks of a plan in one process.
TRAINED = """
import torch
import autoptd
from autoptd.testing.parity import train_in_lockstep
from autoptd.models.nanogpt import NanoGPT, GPTSizes

model = NanoGPT(GPTSizes(vocab=64, max_seq=16, width=32, layers=2, heads=4)).double()
arguments = dict(world=4, cluster="local", batch=8, precision="fp64", fix={"dp": 2, "tp": 2, "micro": 2})
parallel = autoptd.parallelize(model, **arguments)
ids = torch.randint(64, (8, 16))
ours = train_in_lockstep(parallel, [{"idx": ids, "targets": ids}])
plain = model(ids, ids)
assert abs(ours.losses[0] - float(plain)) < 1e-10, (ours.losses, plain)
print("loss of a step in lockstep:", ours.losses[0], "and in one process:", float(plain))
"""


def main() -> int:
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="autoptd-wheel-") as folder:
        wheel = build(Path(folder))
        python = install(wheel, Path(folder) / "venv")
        elsewhere = Path(folder) / "elsewhere"
        elsewhere.mkdir()
        run_all(python, elsewhere)
    print(f"OK the wheel works without a checkout ({time.monotonic() - started:.0f} s)")
    return 0


def build(folder: Path) -> Path:
    """Build the source distribution and, from it, the wheel; check that both hold every file; return the wheel."""
    shutil.copytree(ROOT, folder / "source", ignore=LEFT_OUT)
    run([sys.executable, "-m", "build", "--outdir", str(folder / "dist"), str(folder / "source")], folder)
    (wheel,), (source,) = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = {name for name in archive.namelist() if ".dist-info/" not in name}
    with tarfile.open(source) as archive:
        in_source = {name.partition("/")[2] for name in archive.getnames()}
    wanted = dict(files())
    assert in_wheel == wanted.keys(), f"the wheel differs in {sorted(in_wheel ^ wanted.keys())}"
    missing = {str(path.relative_to(ROOT)) for path in wanted.values()} - in_source
    assert not missing, f"the source distribution lacks {sorted(missing)}"
    print(f"{wheel.name} and {source.name} hold all {len(wanted)} files")
    return wheel


def files() -> Iterator[tuple[str, Path]]:
    """Yield every file of the packages: its name in the wheel, and its path in the checkout."""
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield f"{package}/{path.relative_to(folder)}", path


def install(wheel: Path, where: Path) -> Path:
    """Create an environment with the wheel, and with the dependencies of this Python; return its interpreter."""
    venv.create(where, with_pip=True)
    python = where / "bin" / "python"
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "-q"]
    run([*pip, "uninstall", "--yes", "setuptools"], where)  # some versions of Python install an old one
    run([*pip, "install", "--no-index", "--no-deps", str(wheel)], where)
    here = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    there = sysconfig.get_path("purelib", vars={"base": str(where)})
    (Path(there) / "dependencies.pth").write_text("\n".join(here) + "\n", "utf-8")
    run([*pip, "install", "--no-index", str(wheel)], where)  # installed already: fails if a dependency is missing
    return python


def run_all(python: Path, folder: Path) -> None:
    """Run the first commands of a new user in an empty folder."""
    autoptd = str(python.parent / "autoptd")
    run([autoptd, "--help"], folder)
    for code in (IMPORTED, TRAINED):
        print(run([str(python), "-c", code], folder), end="")
    arguments = ["--world", "4", "--cluster", "dgx-h100", "--batch", "8", "--seq", "64", "--fix", "tp=2"]
    for command in (
        ["models"],
        ["clusters"],
        ["plan", "gpt2", *arguments, "-o", "plan.json"],
        ["explain", "plan.json"],
        ["simulate", "plan.json"],
        ["emit", "plan.json", "-o", "program"],
        ["export", "plan.json", "--to", "torch"],
        ["verify", "plan.json"],
    ):
        since = time.monotonic()
        run([autoptd, *command], folder)
        print(f"autoptd {' '.join(command)}: {time.monotonic() - since:.1f} s")


def run(command: list[str], folder: Path) -> str:
    """Run a command and return its output; if it fails, exit with all of its output."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "AUTOPTD"))}
    env = {**clean, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)[:200]}\nexit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
