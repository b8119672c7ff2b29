"""Time that a browser takes for the page of a plan, from navigation until everything is drawn.

    python -m benchmarks.pages [PLAN.json …]     # default: plans of shipped models, which are planned first

For each page: its size, the time until it is parsed and its timeline drawn (`drawn`), and until the load event
(`loaded`), by the browser's own clock. Medians of `RUNS` new browsers.
"""

from __future__ import annotations

import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import autoptd
from autoptd.models import load_model

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
RUNS = 5
MODELS = ("llama3-70b", "gpt3-175b", "mixtral-8x7b")
_PROBE = """<script>
const drawn = performance.now();
addEventListener("load", () => {
  document.title = JSON.stringify({drawn, loaded: performance.now()});
});
</script></body>"""


def measure(page: str) -> dict[str, float]:
    """Return milliseconds from navigation to each moment, for a page in a new browser."""
    with tempfile.TemporaryDirectory(prefix="autoptd-page-") as folder:
        file = Path(folder) / "plan.html"
        file.write_text(page.replace("</body>", _PROBE), "utf-8")
        given = [f"--user-data-dir={folder}/profile", "--window-size=1280,1000", "--dump-dom"]
        command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", *given, file.as_uri()]
        found = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    title = re.search(r"<title>(\{.*?\})</title>", found.stdout)
    assert title is not None, "the page has not been loaded"
    times: dict[str, float] = json.loads(title[1])
    return times


def main(files: list[str]) -> None:
    if CHROMIUM is None:
        sys.exit("there is no chromium here")
    plans = [autoptd.Plan.load(file) for file in files]
    for name in () if files else MODELS:
        plan = autoptd.plan(load_model(name)[0], world=64, cluster="dgx-h100", others=True)
        plans.append(plan.model_copy(update={"model": name}))
    print("page                        KiB   drawn ms  loaded ms")
    for plan in plans:
        page = plan.to_html()
        runs = [measure(page) for _ in range(RUNS)]
        drawn, loaded = (statistics.median(run[name] for run in runs) for name in ("drawn", "loaded"))
        title = f"{plan.model} on {plan.world}"
        print(f"{title:24} {len(page.encode()) / 1024:6.0f} {drawn:10.0f} {loaded:10.0f}")


if __name__ == "__main__":
    main(sys.argv[1:])
