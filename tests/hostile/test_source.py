"""Emitted and exported programs contain only code of autoptd, whatever the names of models, plans and files."""

from __future__ import annotations

import ast
import builtins
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autoptd.codegen.custom_grad import own_file
from autoptd.codegen.emit import Program, load_stage
from autoptd.codegen.expressions import call_text, value_text
from autoptd.codegen.lines import wrapped
from autoptd.codegen.names import GLOBALS
from autoptd.codegen.quoting import code_of, is_name, literal, numbered, plain_name
from autoptd.errors import TraceError
from autoptd.passes.custom_grad.ops import OwnFunction
from autoptd.passes.fold import Folded
from autoptd.passes.sharding.sharding import Sharding

from .hostile_models import CALL, KINDS, MARK, PAYLOADS, harmless, planned, renamed, written


@pytest.fixture(autouse=True)
def no_mark_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No payload has run by the end of a test."""
    monkeypatch.chdir(tmp_path)
    yield
    assert not (tmp_path / MARK).exists()


def test_a_payload_that_is_run_leaves_its_mark(tmp_path: Path):
    exec(f"x = ({literal('a')});{CALL}")
    assert (tmp_path / MARK).exists()
    (tmp_path / MARK).unlink()


# --- emitted programs ---------------------------------------------------------------------------------------------


@cache
def plain(form: tuple[bool, ...]) -> tuple[Folded, Sharding]:
    """Model with harmless names, each a Python identifier or not as `form` says."""
    return planned({kind: harmless(kind, "a" if good else "-") for kind, good in zip(KINDS, form, strict=True)})


ALL_NAMES = (True,) * len(KINDS)


def program_called(names: dict[str, str], title: str = "title") -> tuple[Program, Program]:
    """Return the program of a model with these names, and that of the same model with harmless names."""
    folded, sharding = plain(ALL_NAMES)
    formed = {harmless(kind): harmless(kind, names.get(kind, "a")) for kind in KINDS}
    usual = written(*renamed(folded, sharding, formed), "title")
    called = {harmless(kind): text for kind, text in names.items()}
    return written(*renamed(folded, sharding, called), title), usual


def shape(source: str) -> Counter[str]:
    """Return the nodes of a syntax tree, without names and texts given by the model."""
    found: Counter[str] = Counter()
    for node in ast.walk(ast.parse(source)):
        text = type(node).__name__
        if isinstance(node, ast.Name) and (node.id in GLOBALS or hasattr(builtins, node.id)):
            text += f" {node.id}"
        if isinstance(node, ast.alias):
            text += f" {node.name.partition('.')[0] in ('autoptd', 'torch')}"
        found[text] += 1
    return found


def check(made: Program, usual: Program) -> None:
    """Assert that both programs have one shape and that the program can be imported."""
    assert made.files.keys() == usual.files.keys()
    for name, source in made.files.items():
        assert shape(source) == shape(usual.files[name]), name
    for stage in range(2):
        with torch.device("meta"):
            load_stage(made, stage)(SimpleNamespace(rank=0, size=2))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "input"])
@pytest.mark.parametrize("text", PAYLOADS.values(), ids=PAYLOADS)
def test_a_name_is_never_run(kind: str, text: str):
    made, usual = program_called({kind: text})
    check(made, usual)


@pytest.mark.parametrize("text", PAYLOADS.values(), ids=PAYLOADS)
def test_an_input_has_a_name_or_is_refused(text: str):
    if is_name(text) and text not in GLOBALS:
        check(*program_called({"input": text}))
        return
    with pytest.raises(TraceError, match="an input of the model is called") as caught:
        program_called({"input": text})
    assert caught.value.fix


@pytest.mark.parametrize("text", PAYLOADS.values(), ids=PAYLOADS)
def test_a_title_is_never_run(text: str):
    check(*program_called({}, title=text))


SEEDS = st.sampled_from([*PAYLOADS.values(), *GLOBALS, "Stage", "Stage0", "Tensor", "BF16", "range", "zip", "LAYERS"])
TEXTS = st.text(st.characters(exclude_characters="."), min_size=1, max_size=12)
NAMES = st.one_of(SEEDS, TEXTS, st.builds("".join, st.lists(SEEDS, min_size=2, max_size=3)))


@settings(max_examples=60)
@given(st.fixed_dictionaries({kind: NAMES for kind in KINDS if kind != "input"}), NAMES)
def test_any_names_at_once(names: dict[str, str], title: str):
    apart = {  # "c" with a "p" after it would be "cp", which is refused
        kind: f"{text}_{kind}" if kind in ("module", "parameter", "buffer") else text for kind, text in names.items()
    }
    made, usual = program_called(apart, title)
    check(made, usual)
    stack, held = apart["stack"], set[str]()
    for stage in range(2):
        with torch.device("meta"):
            held |= dict(load_stage(made, stage)(SimpleNamespace(rank=0, size=2)).named_parameters()).keys()
    leaves = (apart["parameter"], f"{apart['module']}.weight", f"{apart['module']}.bias")
    assert held == {f"{stack}.{i}.{leaf}" for i in range(3) for leaf in leaves}


def test_a_real_trace_with_names_of_every_kind():
    """Names as torch's tracer passes them on; it turns some into plain identifiers."""
    names = {
        "module": PAYLOADS["call"],
        "parameter": PAYLOADS["call in a docstring"],
        "buffer": PAYLOADS["comment"],
        "class": PAYLOADS["call on a line"],
        "stack": PAYLOADS["call in an f-string"],
        "input": "x",
    }
    check(written(*planned(names), "title"), program_called(names)[1])


# --- the pieces ---------------------------------------------------------------------------------------------------


@given(st.text(st.characters(), max_size=20), st.text(st.characters(), max_size=5))
def test_literals_are_what_was_written(text: str, after: str):
    assert ast.literal_eval(literal(text)) == text
    assert eval(numbered(text, after), {"i": 5}) == f"{text}5{after}"
    assert len(literal(text).splitlines()) == 1
    assert code_of(literal(text)).strip("_\"'") == ""
    line = f"x = f({literal(text)}, g({literal(after)}), {literal(text)})  # {len(text)}"
    assert ast.dump(ast.parse(wrapped(line))) == ast.dump(ast.parse(line))


@given(st.text(st.characters(), max_size=20))
def test_a_plain_name_is_one_or_nothing(text: str):
    assert not plain_name(text) or plain_name(text).isidentifier()
    if is_name(text):
        assert ast.parse(f"self.{text} = {text}").body[0].value.id == text  # type: ignore[attr-defined]


class Loud(str):
    """String whose repr is a call."""

    __slots__ = ()

    def __repr__(self) -> str:
        return CALL


class Louder(float):
    __slots__ = ()
    __repr__ = Loud.__repr__


class Loudest:
    __repr__ = Loud.__repr__


@pytest.mark.parametrize(
    "value", [Loud("a"), Louder(1.5), Louder("inf"), [Loud("b")], (Louder(2),), *PAYLOADS.values()]
)
def test_arguments_of_ops_are_literals(value: Any):
    assert eval(value_text(value)) == value
    assert eval(call_text("dict", (), {"class": value, CALL: value, "a": value})) == {
        "class": value,
        CALL: value,
        "a": value,
    }


@pytest.mark.parametrize("value", [Loudest(), [Loudest()], {"a": Loudest()}, Loudest])
def test_an_object_is_refused(value: Any):
    with pytest.raises(TraceError, match="an op is given"):
        value_text(value)


@pytest.mark.parametrize("text", PAYLOADS.values(), ids=PAYLOADS)
def test_own_functions_are_imported_by_names_alone(text: str, monkeypatch: pytest.MonkeyPatch):
    """The class may be in a module of any name, under any name in it, in a file of any name."""
    sources = []
    for home, name in ((f"m{text}", "Own"), ("hostile_home", text), ("hostile_home", f"Own{text}")):
        module = ModuleType("hostile_home")
        monkeypatch.setitem(sys.modules, home, module)
        cls = type("Own", (torch.autograd.Function,), {"forward": staticmethod(lambda ctx, x: x)})
        cls.forward.__code__ = cls.forward.__code__.replace(co_filename=f"/a/{text.replace(chr(0), '')}")  # type: ignore[attr-defined]
        cls.__module__, cls.__qualname__ = home, name.replace("\udc80", "").replace("\0", "")
        setattr(module, name, cls)
        graph = torch.fx.Graph()
        graph.output(graph.call_function(OwnFunction(cls, "Own", (True,)), (graph.placeholder("x"),)))  # type: ignore[arg-type]
        sources.append(own_file(graph).source)
        tree = ast.parse(sources[-1])
        kinds = {type(node) for node in tree.body}
        assert kinds <= {ast.Expr, ast.Import, ast.Assign, ast.FunctionDef}
        assert sum(isinstance(node, ast.Expr) for node in tree.body) == 1  # only the docstring
        assert not [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id in ("open", "touch")]
