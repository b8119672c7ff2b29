"""Bounded reading of files that a person wrote or received, and error texts about their fields.

An error has one line per field, with its path and the nearest valid key. Only regular files of limited size are read,
and only JSON with a limited number of values, so that checking any file is fast.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, get_args

from pydantic import BaseModel, ValidationError

from autoptd.errors import AutoptdError, nearest

MIB = 2**20
_MOST_BYTES = 16 * MIB
_MOST_VALUES = 1_000_000  # of JSON: finding this many mistakes takes seconds and a gigabyte
_MISTAKES = 20  # most mistakes in one message
_SHOWN = 80  # most characters of a value or a key in a message


def read_text(path: Path, what: str, kind: type[AutoptdError], fix: str, most_bytes: int = _MOST_BYTES) -> str:
    """Return the text of a regular file, called `what` in messages. Raises `kind` if it cannot be read, is a pipe or a
    device, has more than `most_bytes`, or is not UTF-8.
    """
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # opening a pipe would block
            found = os.fstat(file.fileno())
            if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
                raise kind(f"the {what} {path} is not a regular file", where=str(path), fix=f"save it to a file; {fix}")
            raw = file.read(most_bytes + 1)
    except OSError as error:
        raise kind(f"cannot read the {what} {path}: {error.strerror}", where=str(path), fix=fix) from error
    except ValueError as error:  # a path that no file can have
        raise kind(f"there is no {what} {str(path)!r}: {error}", where=repr(str(path)), fix=fix) from error
    if len(raw) > most_bytes:
        size = f"{max(found.st_size, len(raw)):,} bytes"
        raise kind(f"the {what} {path} is too large: {size}, at most {most_bytes:,}", where=str(path), fix=fix)
    try:
        return raw.decode("utf-8")
    except ValueError as error:
        raise kind(f"the {what} {path} is not UTF-8 text: {error}", where=str(path), fix=fix) from error


def read_json(path: Path, what: str, kind: type[AutoptdError], fix: str, most_bytes: int = _MOST_BYTES) -> Any:
    """Return the value of a JSON file. Raises `kind` as `read_text` and `parse_json` do."""
    return parse_json(read_text(path, what, kind, fix, most_bytes), what, kind, str(path), fix)


def parse_json(
    text: str,
    what: str,
    kind: type[AutoptdError],
    where: str,
    fix: str,
    pairs: Callable[[list[tuple[str, Any]]], Any] = dict,
) -> Any:
    """Return the value of a JSON text. Raises `kind` if it is not JSON, is nested too deep, or has too many values."""
    if (commas := text.count(",")) > _MOST_VALUES:
        raise kind(f"the {what} has too many values: {commas:,} commas, at most {_MOST_VALUES:,}", where=where, fix=fix)
    try:
        return json.loads(text, object_pairs_hook=pairs, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        place = f"{where} line {error.lineno} column {error.colno}".strip()
        raise kind(f"the {what} is not JSON: {error.msg}", where=place, fix=fix) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; too deep nesting
        raise kind(f"the {what} is not JSON: {brief(str(error))}", where=where, fix=fix) from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def one_line(text: str) -> str:
    """Return `text`. Raises ValueError if it has a control character, a line break or another unprintable character."""
    if not text.isprintable():
        raise ValueError("should be one line of printable text")
    return text


def describe_mistakes(error: ValidationError, model: type[BaseModel]) -> str:
    """Return one line per mistake, up to a limit: `levels[0].bytes_per_s: input should be greater than 0, got -3.0`."""
    lines = [_line(mistake, model) for mistake in error.errors(include_url=False)[:_MISTAKES]]
    more = error.error_count() - len(lines)
    return "\n".join([*lines, f"and {more:,} more"] if more else lines)


def _line(mistake: Any, model: type[BaseModel]) -> str:
    path, kind = mistake["loc"], mistake["type"]
    where = path_text(path) or "(the whole file)"
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{where}: unknown key; {nearest(str(path[-1]), _keys_at(model, path[:-1]))}"
    if kind == "missing":
        return f"{where}: missing, please add it"
    message = mistake["msg"].removeprefix("Value error, ")
    given = mistake["input"]
    shown = "" if isinstance(given, (dict, BaseModel)) else f", got {quoted(given)}"
    return f"{where}: {message[:1].lower()}{message[1:]}{shown}"


def brief(text: str) -> str:
    """Return the text, cut to at most 80 characters."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def quoted(value: object) -> str:
    """Return a value's repr, cut to the length for a message."""
    try:
        return brief(repr(value))
    except RecursionError:
        return f"a deeply nested {type(value).__name__}"


def path_text(path: tuple[str | int, ...]) -> str:
    """Return `levels[0].bytes_per_s`, with keys that are no plain words in quotes: `strategies["h.0"]`."""
    text = "".join(map(_step, path))
    return text.removeprefix(".")


def _step(part: str | int) -> str:
    if isinstance(part, int):
        return f"[{part}]"
    return f".{part}" if re.fullmatch(r"[\w-]{1,60}", part) else f"[{brief(json.dumps(part, ensure_ascii=True))}]"


def _keys_at(model: type[BaseModel], path: tuple[str | int, ...]) -> list[str]:
    """Return the keys of the nested model at `path`; parts of the path that name no model are rows or table entries."""
    fields = _fields(model)
    for part in path:
        if isinstance(part, str) and part in fields:
            fields = next(_fields_in(fields[part]), fields)
    return list(fields)


def _fields(model: type) -> dict[str, Any]:
    """Return the types of a model's fields, or of a dataclass's; none of any other class."""
    if issubclass(model, BaseModel):
        return {name: field.annotation for name, field in model.model_fields.items()}
    return {field.name: field.type for field in dataclasses.fields(model)} if dataclasses.is_dataclass(model) else {}


def _fields_in(annotation: Any) -> Iterator[dict[str, Any]]:
    if isinstance(annotation, type) and (found := _fields(annotation)):
        yield found
    for inner in get_args(annotation):
        yield from _fields_in(inner)
