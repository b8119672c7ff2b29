"""The wheel holds every package and file of the tree; `python -m tests.wheel_check` installs and runs it."""

from __future__ import annotations

import distutils.core
from pathlib import Path

import pytest
from setuptools.command.build_py import build_py

from tests.wheel_check import ROOT, files


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> build_py:
    """Return setuptools' command that copies files into a wheel, by `setup.py` and `pyproject.toml`; writes nothing."""
    monkeypatch.chdir(ROOT)
    command = distutils.core.run_setup("setup.py", stop_after="config").get_command_obj("build_py")
    command.ensure_finalized()
    return command


def test_every_folder_with_python_files_is_a_package(built: build_py):
    folders = {(name, path.parent) for name, path in files() if path.suffix == ".py"}
    assert set(built.packages) == {str(Path(name).parent).replace("/", ".") for name, _ in folders}


def test_every_file_is_built(built: build_py):
    modules = {path for _, _, path in built.find_all_modules()}
    data = {str(Path(folder) / name) for _, folder, _, names in built.data_files for name in names}
    assert {str(ROOT / path) for path in modules | data} == {str(path) for _, path in files()}
