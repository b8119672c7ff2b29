"""Writing and importing the files of an emitted program.

out/__init__.py     its title
out/blocks.py       one class per distinct block or part of one, and the loss counts
out/own.py          imports of the user's functions with backward passes of their own, if there are any
out/stage_0.py …    one class per distinct stage; stages that differ only in layer numbers share a file
out/plan.json       the plan that it was written from
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Any

from autoptd.codegen.blocks import name_blocks, piece_starts
from autoptd.codegen.custom_grad import NAME as OWN
from autoptd.codegen.custom_grad import own_file
from autoptd.codegen.lines import wrapped
from autoptd.codegen.loss import FUNCTIONS
from autoptd.codegen.quoting import code_of, in_docstring, replace_code
from autoptd.codegen.stage import StageSource, write_stage
from autoptd.outputs import make_folder, private_folder, read_own, refuse_unwritable, write_whole
from autoptd.passes.fold import Cut, Folded
from autoptd.passes.sharding.sharding import Sharding

_MARK = "Written by autoptd from a plan"
_IMPORTING = Lock()  # so that a rank that is a thread does not see a partial import of another
_HEADER = '''"""{title}

Written by autoptd from a plan; `tp` is the tensor-parallel axis, the same code runs on each of its {ranks} ranks.
{tokens}Placements: B whole, Bp whole with a partial gradient, S<dim> split, P a partial value.
"""

from __future__ import annotations

'''
_IMPORTS = {
    "Tensor": "from torch import Tensor",
    "nn": "from torch import nn",
    "torch": "import torch",
    "F": "import torch.nn.functional as F",
    "ops": "from autoptd.ops import library as ops",
    "Axis": "from autoptd.ops.tp_axis import Axis",
    "Tokens": "from autoptd.ops.cp_axis import Tokens",
    "Experts": "from autoptd.ops.expert_axis import Experts",
    "Replicas": "from autoptd.ops.dp_axis import Replicas",
    "DropoutKey": "from autoptd.ops.dropout import DropoutKey",
}
_STAGE_NAMES = ("Count", "Stage", "Wire", "buffer", "compose", "parameter", "submodule")
_DTYPES = {"BF16": "torch.bfloat16", "FP16": "torch.float16", "FP32": "torch.float32", "FP64": "torch.float64"}


@dataclass(frozen=True)
class StageSpec:
    """Inclusive segment indices of a stage, and its recomputation: segment -> policy."""

    first: int
    last: int
    recompute: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Program:
    """The source files of an emitted program, and the class of every stage."""

    files: dict[str, str]  # name -> source
    stages: tuple[tuple[str, str], ...]  # (file, class)
    objects: Mapping[str, Any] = field(default_factory=dict)  # functions that no file can import, by name in `own.py`

    def write(self, directory: str | Path) -> Path:
        """Write all files and return the folder. Raises PlanFileError if one cannot be written; then none is."""
        path = make_folder(Path(directory))
        for name in self.files:
            refuse_unwritable(path / name)
        for stale in path.glob("stage_*.py"):  # an earlier plan's would mislead
            if stale.name not in self.files:
                with suppress(OSError):  # another user's, or not a regular file
                    if _MARK.encode() in read_own(stale):
                        stale.unlink()
        for name, source in self.files.items():
            write_whole(path / name, source)
        return path


def emit_program(
    folded: Folded,
    sharding: Sharding,
    stages: Sequence[StageSpec],
    title: str,
    *,
    loss_in_place: bool = False,
    regather: bool = False,
    fast_dropout: bool = False,
    rings: bool = False,
    sizes: Mapping[str, int] | None = None,
) -> Program:
    """Write the source of every distinct stage and block of a plan. `regather`: re-gather in backward; `rings`:
    multiply around the ring of tp. `sizes`: those of a microbatch, for which memory was planned; without them, tensors
    are not freed before their functions return."""
    starts = {i for s in stages for i in piece_starts(s.first, s.last, s.recompute)}
    layout = name_blocks(
        folded,
        starts,
        loss_in_place=loss_in_place,
        regather=regather,
        fast_dropout=fast_dropout,
        rings=rings,
        sizes=sizes,
    )
    title = in_docstring(title)
    written = [write_stage(layout, sharding, s.first, s.last, s.recompute) for s in stages]
    blocks: dict[str, str] = {}
    for stage in written:
        for name, source in stage.blocks.items():
            assert blocks.setdefault(name, source) == source, f"two blocks are called {name}"
    functions = [blocks.pop(name) for name in FUNCTIONS if name in blocks]
    files = {"__init__.py": f'"""{title}, written by autoptd."""\n'}
    head = partial(_header, ranks=sharding.ranks, cut=folded.cut)
    files["blocks.py"] = _file(head(f"Blocks of {title}."), "\n\n".join([*blocks.values(), *functions]))
    own = own_file(folded.traced.graph.graph)
    files |= {OWN: own.source} if own.source else {}
    where: list[tuple[str, str]] = [("", "")] * len(stages)
    for members in _same_but_for_numbers(written):
        label = _label(members)
        name, cls = f"stage_{label}.py", f"Stage{label.title().replace('_', '')}"
        source = _stage_source(written, members, cls, stages)
        word = f"Stage {members[0]}" if len(members) == 1 else f"Stages {', '.join(map(str, members))}"
        files[name] = _file(head(f"{word} of {title}."), source, uses=blocks)
        for i in members:
            where[i] = (name, cls)
    return Program(files, tuple(where), own.objects)


def _same_but_for_numbers(written: Sequence[StageSource]) -> list[list[int]]:
    groups: dict[str, list[int]] = {}
    for i, stage in enumerate(written):
        groups.setdefault(_template(stage.body)[0] if i > 0 else f"0:{i}", []).append(i)
    return list(groups.values())


_RANGE = re.compile(r"range\((\d+), (\d+)(?:, (\d+))?\)")


def _template(body: str) -> tuple[str, list[tuple[int, ...]]]:
    """Return the source with layer ranges replaced by lookups, and the ranges."""
    numbers = [tuple(int(g) for g in m.groups() if g is not None) for m in _RANGE.finditer(code_of(body))]
    holes = iter(range(len(numbers)))
    lengths = [len(range(*n)) for n in numbers]
    text = replace_code(_RANGE, lambda _: f"range(*LAYERS[stage][{next(holes)}])", body)
    return text + repr(lengths), numbers


def _label(members: Sequence[int]) -> str:
    if len(members) == 1:
        return str(members[0])
    if list(members) == list(range(members[0], members[-1] + 1)):
        return f"{members[0]}_to_{members[-1]}"
    return "_".join(map(str, members))


def _stage_source(written: Sequence[StageSource], members: Sequence[int], cls: str, stages: Sequence[StageSpec]) -> str:
    body = written[members[0]].body
    doc = "; ".join(f"{i}: segments {stages[i].first} to {stages[i].last}" for i in members)
    head = f'class {cls}(Stage):\n    """{doc if len(members) > 1 else doc.partition(": ")[2].capitalize()}."""\n\n'
    if len(members) == 1:
        return head + body
    table = [f"    {i}: {_template(written[i].body)[1]!r}," for i in members]
    text = _template(body)[0].rpartition("[")[0]
    text = re.sub(
        r"(def __init__\(self, tp: Axis, dropout: [^)]*)\) -> None:", r"\1, *, stage: int) -> None:", text, count=1
    )
    layers = "# stage -> the layer numbers of its blocks\nLAYERS: dict[int, list[tuple[int, ...]]] = {\n"
    return layers + "\n".join(table) + "\n}\n\n\n" + head + text


def _header(title: str, ranks: int, cut: Cut | None) -> str:
    if cut is None:
        return _HEADER.format(title=title, ranks=ranks, tokens="")
    held = "an early and a late part" if cut.zigzag else "one part"
    tokens = f"`cp` is the axis of the {cut.ranks} ranks that share the tokens of a sample; each has {held} of them.\n"
    return _HEADER.format(title=title, ranks=ranks, tokens=tokens)


def _file(head: str, source: str, uses: dict[str, str] | None = None) -> str:
    code = code_of(source)

    def reads(name: str) -> bool:
        return re.search(rf"(?<![\w.]){name}\b", code) is not None

    constants = [f"{name} = {text}" for name, text in _DTYPES.items() if reads(name)]
    lines = [text for name, text in _IMPORTS.items() if reads(name) or (constants and name == "torch")]
    recompute = [n for n in ("keep", "recompute", "spare") if re.search(rf"(?<!\.)\b{n}\(", code)]
    lines += ["from autoptd.ops.offload import offload"] if re.search(r"(?<!\.)\boffload\(", code) else []
    lines += [f"from autoptd.ops.recompute import {', '.join(recompute)}"] if recompute else []
    stage = [n for n in _STAGE_NAMES if re.search(rf"(?<![\w.]){n}\(|\({n}\):|: {n}\b", code)]
    lines += [f"from autoptd.ops.stage import {', '.join(stage)}"] if stage else []
    torch_names = sorted({m for line in lines if (m := line.removeprefix("from torch import ")) != line})
    lines = [line for line in lines if not line.startswith("from torch import ")]
    lines += [f"from torch import {', '.join(torch_names)}"] if torch_names else []
    third = sorted((line for line in lines if "autoptd" not in line), key=lambda x: (not x.startswith("import"), x))
    ours = sorted(line for line in lines if "autoptd" in line)
    local = ["from . import own"] if reads("own") else []
    if uses is not None:
        used = [n for n in [*sorted(uses), *FUNCTIONS] if reads(n)]
        local += [f"from .blocks import {', '.join(used)}"] if used else []
    sections = ["\n".join(part) for part in (third, ours, local) if part]
    head += "\n\n".join(sections) + "\n"
    return head + ("\n" + "\n".join(constants) + "\n" if constants else "") + "\n\n" + wrapped(source)


def load_stage(program: Program, stage: int, directory: str | Path | None = None) -> Any:
    """Import the class of a stage from its file, written to `directory` or a temporary folder of the process.

    The class is called as `(tp, dropout=None) -> Stage`.
    """
    with _IMPORTING:
        return _load_stage(program, stage, directory)


def _load_stage(program: Program, stage: int, directory: str | Path | None) -> Any:
    objects = [f"{name} {id(what)}" for name, what in program.objects.items()]  # alive while the package is loaded
    digest = hashlib.sha256("\0".join([*program.files.values(), *objects]).encode()).hexdigest()[:16]
    package = f"autoptd_program_{digest}"
    if package not in sys.modules:
        if directory is None:
            directory = private_folder() / package
        path = program.write(directory)
        _import(package, path / "__init__.py")
        if program.objects:
            vars(_import(f"{package}.own", path / OWN)).update(program.objects)
    name, cls = program.stages[stage]
    module = f"{package}.{name.removesuffix('.py')}"
    if module not in sys.modules:
        root = sys.modules[package].__file__
        assert root is not None
        _import(module, Path(root).parent / name)
    made = getattr(sys.modules[module], cls)
    return partial(made, stage=stage) if hasattr(sys.modules[module], "LAYERS") else made


def _import(name: str, path: Path) -> ModuleType:
    places = [str(path.parent)] if path.name == "__init__.py" else None
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=places)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
