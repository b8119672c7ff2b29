"""What is wrong with a file that a person wrote: one line per field, with its path and the nearest valid key."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError

from autoptd.errors import nearest


def describe_mistakes(error: ValidationError, model: type[BaseModel]) -> str:
    """`levels[0].bytes_per_s: input should be greater than 0, got -3.0`, one line per mistake."""
    return "\n".join(_line(mistake, model) for mistake in error.errors(include_url=False))


def _line(mistake: Any, model: type[BaseModel]) -> str:
    path, kind = mistake["loc"], mistake["type"]
    where = _path_text(path) or "(the whole file)"
    if kind == "extra_forbidden":
        return f"{where}: unknown key; {nearest(str(path[-1]), _keys_at(model, path[:-1]))}"
    if kind == "missing":
        return f"{where}: missing, please add it"
    message = mistake["msg"].removeprefix("Value error, ")
    given = mistake["input"]
    shown = "" if isinstance(given, (dict, BaseModel)) else f", got {given!r}"
    return f"{where}: {message[:1].lower()}{message[1:]}{shown}"


def _path_text(path: tuple[str | int, ...]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def _keys_at(model: type[BaseModel], path: tuple[str | int, ...]) -> list[str]:
    """Keys that the (nested) model at `path` knows."""
    for part in path:
        if isinstance(part, str):
            model = _model_in(model.model_fields[part].annotation)
    return list(model.model_fields)


def _model_in(annotation: Any) -> type[BaseModel]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = [a for a in getattr(annotation, "__args__", ()) if isinstance(a, type) and issubclass(a, BaseModel)]
    assert inner, f"{annotation} holds no model"
    return inner[0]
