"""Reference pages, generated from docstrings and from the parser of the command line, as Markdown for MyST."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Iterator
from typing import Any

import autoptd
from autoptd.cli.main import _parser

_WIDTH = 90  # columns of a usage line
_OPTION = re.compile(r"(?<![\w-])(--[a-z][\w-]*)")
_PARAMETER = re.compile(r"^    (\w+): ")


def api() -> str:
    """Return the page of the public names, with their docstrings."""
    parts = ["# Python", "Everything that `import autoptd` offers. Other modules may change without notice."]
    for name in sorted(autoptd.__all__, key=lambda name: (inspect.isclass(getattr(autoptd, name)), name)):
        value = getattr(autoptd, name)
        parts.append(f"## {name}")
        if inspect.isclass(value):
            members = "\n\n".join(_member(member, value) for member in _members(value))
            parts.append(_directive("class", name, f"{_text(value)}\n\n{members}", fence="`````"))
        else:
            parts.append(_directive("function", f"{name}{_signature(value)}", _text(value)))
    return "\n\n".join(["```{py:currentmodule} autoptd\n```", *parts]) + "\n"


def _members(cls: type) -> Iterator[str]:
    """Yield the public methods and properties that autoptd's own classes define, sorted."""
    for name in dir(cls):
        owner = next((base for base in cls.__mro__ if name in vars(base)), object)
        if not name.startswith("_") and owner.__module__.startswith("autoptd") and inspect.getdoc(vars(owner)[name]):
            value = inspect.getattr_static(cls, name)
            if callable(value) or isinstance(value, classmethod | staticmethod | property) or hasattr(value, "func"):
                yield name


def _member(name: str, cls: type) -> str:
    value = inspect.getattr_static(cls, name)
    if callable(value) or isinstance(value, classmethod | staticmethod):
        bound = getattr(cls, name)
        own = not isinstance(value, classmethod | staticmethod)
        option = "" if own else f":{type(value).__name__}:\n\n"
        return _directive("method", f"{name}{_signature(bound, skip=own)}", option + _text(bound))
    return _directive("property", name, _text(value))


def _directive(kind: str, signature: str, text: str, fence: str = "```") -> str:
    return f"{fence}{{py:{kind}}} {signature}\n{text}\n{fence}"


def _signature(function: Any, skip: bool = False) -> str:
    """Return the parameters of a function, without quotes around annotations; `skip`: without the first, `self`."""
    found = inspect.signature(function)
    shown = found.replace(parameters=list(found.parameters.values())[skip:])
    return re.sub(r"(?<=: |> )'([^']*)'", r"\1", str(shown))


def _text(value: Any) -> str:
    """Return a docstring as Markdown: the entries of its "Args:" become a list."""
    lines: list[str] = []
    arguments = False
    for line in (inspect.getdoc(value) or "").splitlines():
        entry = _PARAMETER.match(line)
        if line == "Args:":
            arguments = True
        elif arguments and entry:
            lines.append(f"- **{entry[1]}**: {line[entry.end() :]}")
        elif arguments and line.startswith("        "):
            lines[-1] += f" {line.strip()}"
        else:
            arguments = arguments and not line
            lines.append(line)
    return "\n".join(lines)


def command_line() -> str:
    """Return the page of all commands with their options."""
    parser = _parser()
    parts = ["# Command line", _plain(parser.description or ""), f"{_plain(parser.epilog or '').capitalize()}."]
    for command in _commands(parser):
        parts += [f"## {command.prog}", _plain(command.description or ""), f"```text\n{_usage(command)}\n```"]
        parts.append(f"```{{program}} {command.prog}\n```")
        parts += [_option(action, command.prog) for action in command._actions if _is_own(action)]
    return "\n\n".join(parts) + "\n"


def _commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parser of each command, and of the commands below it."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield command
                yield from _commands(command)


def _is_own(action: argparse.Action) -> bool:
    return not isinstance(action, argparse._HelpAction | argparse._SubParsersAction)


def _usage(parser: argparse.ArgumentParser) -> str:
    parser.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=_WIDTH)  # type: ignore[assignment]
    return parser.format_usage().strip()


def _option(action: argparse.Action, prog: str) -> str:
    choices = f"{{{','.join(map(str, action.choices))}}}" if action.choices else ""
    value = "" if action.nargs == 0 else str(action.metavar or choices or action.dest.upper())
    names = ", ".join(action.option_strings)
    text = (action.help or "") % {**vars(action), "prog": prog}
    return f"```{{option}} {f'{names} {value}'.strip()}\n{_plain(text)}\n```"


def _plain(text: str) -> str:
    """Return text as Markdown: none of its characters means anything there, and options are code."""
    return _OPTION.sub(r"`\1`", re.sub(r"([\\`*_<\[])", r"\\\1", text))
