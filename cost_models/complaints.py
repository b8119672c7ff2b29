"""What is wrong with a file that a person wrote: one line per field, with its path and the nearest valid key."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from autoptd.errors import AutoptdError, nearest

_SHOWN = 80  # characters of a value or a key in a message


def read_text(path: Path, what: str, kind: type[AutoptdError], fix: str) -> str:
    """The text of a file. Raises `kind`, whose message calls it `what`, where it cannot be read or is not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise kind(f"cannot read the {what} {path}: {error.strerror}", where=str(path), fix=fix) from error
    except ValueError as error:  # not UTF-8, or a path that no file can have
        raise kind(f"the {what} {path} is not UTF-8 text: {error}", where=str(path), fix=fix) from error


def one_line(text: str) -> str:
    """The same. Raises ValueError where a character is a control character, ends the line, or has no form."""
    if not text.isprintable():
        raise ValueError("should be one line of printable text")
    return text


def describe_mistakes(error: ValidationError, model: type[BaseModel]) -> str:
    """`levels[0].bytes_per_s: input should be greater than 0, got -3.0`, one line per mistake."""
    return "\n".join(_line(mistake, model) for mistake in error.errors(include_url=False))


def _line(mistake: Any, model: type[BaseModel]) -> str:
    path, kind = mistake["loc"], mistake["type"]
    where = path_text(path) or "(the whole file)"
    if kind == "extra_forbidden":
        return f"{where}: unknown key; {nearest(str(path[-1]), _keys_at(model, path[:-1]))}"
    if kind == "missing":
        return f"{where}: missing, please add it"
    message = mistake["msg"].removeprefix("Value error, ")
    given = mistake["input"]
    shown = "" if isinstance(given, (dict, BaseModel)) else f", got {brief(repr(given))}"
    return f"{where}: {message[:1].lower()}{message[1:]}{shown}"


def brief(text: str) -> str:
    """At most so many characters."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def path_text(path: tuple[str | int, ...]) -> str:
    """`levels[0].bytes_per_s`; a key that is no plain word in quotes, `strategies["h.0"]`."""
    text = "".join(map(_step, path))
    return text.removeprefix(".")


def _step(part: str | int) -> str:
    if isinstance(part, int):
        return f"[{part}]"
    return f".{part}" if re.fullmatch(r"[\w-]{1,60}", part) else f"[{brief(json.dumps(part, ensure_ascii=True))}]"


def _keys_at(model: type[BaseModel], path: tuple[str | int, ...]) -> list[str]:
    """Keys that the (nested) model at `path` knows; between models the path names rows and entries of tables."""
    for part in path:
        if isinstance(part, str) and part in model.model_fields:
            model = next(_models_in(model.model_fields[part].annotation), model)
    return list(model.model_fields)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models_in(inner)
