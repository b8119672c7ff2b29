"""Names of segments and their kinds, taken from module paths of the user's model."""

from __future__ import annotations

import itertools
import re
from collections import Counter

from torch import fx

from autoptd.passes.graph import module_path, op_name


def name_kinds(signatures: list[str], names: list[str]) -> dict[str, str]:
    """Return a unique name for each signature: the most common name of its segments, with `*` for numbers."""
    called: dict[str, Counter[str]] = {}
    for signature, name in zip(signatures, names, strict=True):
        called.setdefault(signature, Counter())[re.sub(r"\d+", "*", name)] += 1
    kinds: dict[str, str] = {}
    taken: set[str] = set()
    for signature, counter in called.items():
        name = counter.most_common(1)[0][0]
        numbers = (f"{name}#{n}" for n in itertools.count(2))
        kinds[signature] = next(kind for kind in itertools.chain([name], numbers) if kind not in taken)
        taken.add(kinds[signature])
    return kinds


def segment_name(nodes: list[fx.Node]) -> str:
    """Return the modules that the nodes come from, as in `transformer.h.0.{ln_1,attn}`."""
    paths = [p.split(".") for n in nodes if (p := module_path(n))]
    if not paths:
        return "loss" if any(op_name(n).endswith("cross_entropy") or "loss" in op_name(n) for n in nodes) else "model"
    common = common_prefix(paths)
    children = list(dict.fromkeys(p[len(common)] for p in paths if len(p) > len(common)))
    prefix = ".".join(common)
    if len(children) <= 1:
        return ".".join([*common, *children])
    return f"{prefix}.{{{','.join(children)}}}" if prefix else f"{{{','.join(children)}}}"


def common_prefix(paths: list[list[str]]) -> list[str]:
    return [names[0] for names in itertools.takewhile(lambda names: len(set(names)) == 1, zip(*paths, strict=False))]
