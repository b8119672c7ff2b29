"""Code of documents that is not run: its commands parse, and every name and keyword of autoptd that it uses exists.

    ```py                a fragment: it reads names that the page does not define
    indented lines       commands `autoptd …`, and Python
    `inline code`        expressions such as `par.report()`, and commands

Names are followed through attributes, calls and assignments, as far as annotations say what these return. `par`, `plan`
and `traced` are what the documents always call so.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shlex
import textwrap
import typing
from collections.abc import Iterator
from typing import Any

import autoptd
from autoptd.cli.main import _parser

_FRAGMENT = re.compile(r"^```py\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_FENCES = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_INDENTED = re.compile(r"(?:^(?: {4}.*)?\n)+", re.MULTILINE)
_INLINE = re.compile(r"`([^`\n]+(?:\n[^`\n]+)?)`")
_CONVENTIONS = {"par": autoptd.Parallel, "plan": autoptd.Plan, "traced": autoptd.TracedModel}


def python_of(text: str) -> Iterator[str]:
    """Yield the Python of a page that no test runs: fragments, indented blocks that are Python, inline expressions."""
    yield from _FRAGMENT.findall(text)
    prose = _FENCES.sub("", text)
    for block in _INDENTED.findall(prose):
        code = textwrap.dedent(block).strip()
        if re.search(r"\bautoptd\.\w+\(|^(?:import|from) ", code, re.MULTILINE) and "autoptd." in code:
            yield code
    for code in _INLINE.findall(prose):
        code = " ".join(code.split()).replace("…", "...")
        if re.search(r"\b(?:autoptd|answers|par|plan|traced)\.\w", code) and _parses(code):
            yield code


def wrong_names(code: str) -> list[str]:
    """Return what a piece of Python uses of autoptd that does not exist: attributes, imports, keywords of calls."""
    found = _Names()
    found.visit(ast.parse(code))
    return found.wrong


def wrong_inline_commands(text: str) -> list[str]:
    """Return inline commands whose command or options do not exist; their arguments may be left out."""
    commands = _parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    wrong = []
    for code in _INLINE.findall(_FENCES.sub("", text)):
        if not re.match(r"autoptd [a-z]", code):
            continue
        name, *words = shlex.split(" ".join(code.split()), comments=True)[1:]
        options = [word.partition("=")[0] for word in words if word.startswith("-") and word.strip("-")]
        known: Any = commands.get(name)
        if known is not None and known._subparsers is not None and words:
            known = known._subparsers._group_actions[0].choices.get(words[0])
        if known is None or any(option not in known._option_string_actions for option in options):
            wrong.append(code)
    return wrong


def _parses(code: str) -> bool:
    try:
        ast.parse(code)
    except SyntaxError:
        return False
    return True


class _Names(ast.NodeVisitor):
    """Follow names through a piece of code. A value is a module, function or class; an object counts as its class;
    None: unknown."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.known: dict[str, Any] = {"autoptd": autoptd, "answers": importlib.import_module("autoptd.answers")}
        self.known |= _CONVENTIONS

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._imported(alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = self._imported(node.module or "")
        for alias in node.names:
            if module is not None:
                self.known[alias.asname or alias.name] = self._attribute(module, alias.name, ast.unparse(node))

    def visit_Assign(self, node: ast.Assign) -> None:
        value = self._value(node.value)
        for target in node.targets:
            if isinstance(target, ast.Name):
                self.known[target.id] = value
            else:
                self.visit(target)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._value(node)

    def visit_Call(self, node: ast.Call) -> None:
        self._value(node)

    def _imported(self, name: str) -> Any:
        if name.partition(".")[0] != "autoptd":
            return None
        try:
            return importlib.import_module(name)
        except ImportError:
            self.wrong.append(f"import {name}")
            return None

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Name(id=name):
                return self.known.get(name)
            case ast.Attribute(value=of, attr=name):
                owner = self._value(of)
                return None if owner is None else self._attribute(owner, name, ast.unparse(node))
            case ast.Call(func=func, args=args, keywords=keywords):
                for part in (*args, *(keyword.value for keyword in keywords)):
                    self.visit(part)
                called = self._value(func)
                return None if called is None else self._called(called, node)
        self.generic_visit(node)
        return None

    def _attribute(self, owner: Any, name: str, said: str) -> Any:
        if inspect.ismodule(owner):
            if hasattr(owner, name):
                return getattr(owner, name)
            try:
                return importlib.import_module(f"{owner.__name__}.{name}")
            except ImportError:
                self.wrong.append(said)
                return None
        if not inspect.isclass(owner):
            return None
        hints = _hints(owner)
        value = inspect.getattr_static(owner, name, None)
        if (
            value is None
            and name not in hints
            and not any(name in vars(c).get("__annotations__", {}) for c in owner.__mro__)
        ):
            self.wrong.append(said)
        if isinstance(value, property):
            return _hints(value.fget).get("return")
        return hints.get(name) if value is None else getattr(owner, name)

    def _called(self, called: Any, node: ast.Call) -> Any:
        try:
            parameters = inspect.signature(called).parameters.values()
        except (TypeError, ValueError):
            return None
        names = {p.name for p in parameters if p.kind is not inspect.Parameter.POSITIONAL_ONLY}
        if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
            self.wrong += [
                f"{ast.unparse(node.func)}({k.arg}=…)" for k in node.keywords if k.arg and k.arg not in names
            ]
        return called if inspect.isclass(called) else _hints(called).get("return")


def _hints(of: Any) -> dict[str, Any]:
    """Return the types that are annotated, where their names can be looked up; only those that are classes."""
    try:
        found = typing.get_type_hints(of)
    except (NameError, TypeError):
        return {}
    return {name: hint for name, hint in found.items() if inspect.isclass(hint)}
