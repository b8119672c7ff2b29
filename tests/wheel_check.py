"""Build the distributions that users install, install them away from the checkout, and run them there.

    python -m tests.wheel_check

The source distribution is built from a copy of the checkout, the wheel from the source distribution, each by a build
frontend in an environment of its own. The wheel is installed in a fresh environment. Its dependencies (torch above
all) are read from the environment of this Python by a .pth file; the editable install there is invisible, since .pth
files in such a folder are not processed. Every module must then come from the wheel, and every command work.
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
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "out")

# Run in the fresh environment: every module can be imported, and comes from the wheel.
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

# All ranks of a plan in one process.
TRAINED = """
import torch
import autoptd
from autoptd.testing.parity import train_in_lockstep
from autoptd.models.nanogpt import NanoGPT, GPTSizes

model = NanoGPT(GPTSizes(vocab=64, max_seq=16, width=32, layers=2, heads=4)).double()
asked = dict(world=4, cluster="local", batch=8, precision="fp64", fix={"dp": 2, "tp": 2, "micro": 2})
parallel = autoptd.parallelize(model, **asked)
ids = torch.randint(64, (8, 16))
ours = train_in_lockstep(parallel, [{"idx": ids, "targets": ids}])
plain = model(ids, ids)
assert abs(ours.losses[0] - float(plain)) < 1e-10, (ours.losses, plain)
print("a step in lockstep: loss", ours.losses[0], "and of one process", float(plain))
"""


def main() -> int:
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="autoptd-wheel-") as folder:
        wheel = build(Path(folder))
        python = install(wheel, Path(folder) / "venv")
        elsewhere = Path(folder) / "elsewhere"
        elsewhere.mkdir()
        run_all(python, elsewhere)
    print(f"OK the wheel works where there is no checkout ({time.monotonic() - started:.0f} s)")
    return 0


def build(folder: Path) -> Path:
    """Build the wheel from the source distribution; both hold every file of the packages."""
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
    """Yield every file of the packages: its name in the wheel, and its path here."""
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield f"{package}/{path.relative_to(folder)}", path


def install(wheel: Path, where: Path) -> Path:
    """Return the Python of a fresh environment with the wheel, and its dependencies from this environment."""
    venv.create(where, with_pip=True)
    python = where / "bin" / "python"
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "-q"]
    run([*pip, "uninstall", "--yes", "setuptools"], where)  # an old one comes with some versions of Python
    run([*pip, "install", "--no-index", "--no-deps", str(wheel)], where)
    here = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    there = sysconfig.get_path("purelib", vars={"base": str(where)})
    (Path(there) / "dependencies.pth").write_text("\n".join(here) + "\n", "utf-8")
    run([*pip, "install", "--no-index", str(wheel)], where)  # already installed: fails if a dependency is missing
    return python


def run_all(python: Path, folder: Path) -> None:
    """Run a newcomer's first commands in an empty folder."""
    autoptd = str(python.parent / "autoptd")
    run([autoptd, "--help"], folder)
    for code in (IMPORTED, TRAINED):
        print(run([str(python), "-c", code], folder), end="")
    asked = ["--world", "4", "--cluster", "dgx-h100", "--batch", "8", "--seq", "64", "--fix", "tp=2"]
    for command in (
        ["models"],
        ["clusters"],
        ["plan", "gpt2", *asked, "-o", "plan.json"],
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
    """Run a command and return its output; exit with all of it if it fails."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "AUTOPTD"))}
    env = {**clean, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)[:200]}\nended with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
