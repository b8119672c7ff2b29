"""The page about what was measured on a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import fill

from benchmarks.gpu.rows import Row, table

TITLES = {
    "parity": (
        "Plans against one process",
        "All ranks are threads that share the GPU. In float64: the largest difference of a gradient, or of a "
        "parameter after two steps, at most 1e-10. In bf16: the distance of all gradients from float64, at most "
        "three times that of the plain model in bf16.",
    ),
    "profile": (
        "Rates of kernels",
        "`autoptd profile`: rates of single ops, and what the cost models predict with the fitted constants.",
    ),
    "steps": (
        "Time and memory of a step",
        "Predicted with the constants of `autoptd profile` and measured, one process on NCCL, bf16 with AdamW and "
        "float32 main parameters.",
    ),
    "tokens": (
        "Against the plain model",
        "Tokens per second in alternating steps: the emitted program, and the plain model under `torch.autocast`, "
        "both compiled and with fused AdamW and clipping.",
    ),
}


def page(about: Mapping[str, str], rows: Sequence[Row]) -> str:
    """Return Markdown. about: date, device, version of torch, and a note if there is one."""
    lines = [
        "# On a GPU",
        "",
        f"Measured on {about['date']} on one {about['device']} with torch {about['torch']}, written by",
        "",
        "    python -m benchmarks.gpu && python -m benchmarks.gpu --page docs/gpu.md",
        "",
        *([fill(about["note"], 100), ""] if about.get("note") else []),
    ]
    for section, (title, text) in TITLES.items():
        found = [row for row in rows if row.section == section]
        if found:
            lines += [f"## {title}", "", fill(text, 100), "", table(found), ""]
    return "\n".join(lines)
