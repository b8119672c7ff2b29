"""Build the site into a folder (default: `site`), from pages that are collected in a temporary one.

    python -m docs.generator [FOLDER]

Any warning of Sphinx, such as a link that leads nowhere, fails the build.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from sphinx.cmd.build import main as sphinx

from docs.generator.pages import ROOT, collect

HERE = Path(__file__).parent


def main(out: str = "site") -> int:
    target = ROOT / out
    with tempfile.TemporaryDirectory(prefix="autoptd-docs-") as folder:
        collect(Path(folder) / "pages")
        shutil.rmtree(target, ignore_errors=True)
        folders = [f"{folder}/pages", str(target)]
        code = sphinx(["-q", "-W", "--keep-going", "-b", "html", "-c", str(HERE), "-d", f"{folder}/trees", *folders])
    if code == 0:
        print(f"built: open {target / 'index.html'}")
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
