"""Corruption of a file: of its fields, its text, its bytes, or of the object at its path."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEEP = 3000  # levels of nesting

NUMBERS = ["0", "-1", "1", "2", "3", "7", "64", "-0.0", "0.5", "1e308", "1e400", "-1e400", "NaN", "Infinity", "1e-320"]
NUMBERS += [str(2**31), str(2**53 + 1), str(2**62), str(2**63), str(10**400), "1" * 5000]
STRINGS = ["", " ", "S0", "S1", "B", "Bp", "P", "S99999999999", "S0/0", "S1/3", "a\nb", "\0", "\x1b[31m", "Ω" * 200]
STRINGS += ["../../etc/passwd", "/dev/null", "{0}", "%s", "x" * 3000, "bf16", "gpipe", "zero-bubble-v", "full", "True"]
OTHERS = ["null", "true", "false", "[]", "{}", "[[]]", "[null]", '{"": null}', "[1, 2]", '["S0", "B"]']


class Raw(str):
    """Text written to the file verbatim, where JSON would quote it."""


def junk(rng: random.Random) -> Any:
    """Return a value of another type, or an extreme one."""
    kind = rng.randrange(4)
    if kind == 0:
        return Raw(rng.choice(NUMBERS))
    if kind == 1:
        return rng.choice(STRINGS)
    if kind == 2:
        return Raw(rng.choice(OTHERS))
    return Raw("[" * (depth := rng.choice([3, 50, DEEP])) + "]" * depth)


# --- data ---------------------------------------------------------------------------------------------------------


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values in a JSON value."""
    inside = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path] * bool(path) + [found for key, value in inside for found in places(value, (*path, key))]


def pick(data: Any, rng: random.Random) -> tuple[Any, Any]:
    """Return a container and a key of it: a top-level field first, then a random descent, so that no field is rare."""
    while True:
        key = rng.choice(list(data) if isinstance(data, dict) else range(len(data)))
        inner = data[key]
        if not isinstance(inner, (dict, list)) or not inner or rng.random() < 0.25:
            return data, key
        data = inner


def remove(data: Any, rng: random.Random) -> None:
    holder, key = pick(data, rng)
    del holder[key]


def rename(data: Any, rng: random.Random) -> None:
    holder, key = pick(data, rng)
    if isinstance(holder, dict):
        name = rng.choice([f"{key}x", key[:-1], key.upper(), "", "b", "a.b", "a\nb", *holder])
        holder[name] = holder.pop(key)


def replace(data: Any, rng: random.Random) -> None:
    holder, key = pick(data, rng)
    holder[key] = junk(rng)


def nudge(data: Any, rng: random.Random) -> None:
    """Replace a value by a plausible one of the same type."""
    holder, key = pick(data, rng)
    old = holder[key]
    match old:
        case bool():
            holder[key] = not old
        case int():
            holder[key] = rng.choice([old + 1, old - 1, old * 2, -old, 1, 2, 4])
        case float():
            holder[key] = rng.choice([old * 2, old / 2, -old, 0.0])
        case str():
            same = [value for value in _strings(holder) if value != old]
            holder[key] = rng.choice([*same, *STRINGS[:10]])


def swap(data: Any, rng: random.Random) -> None:
    """Exchange two values."""
    holder, key = pick(data, rng)
    other = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    holder[key], holder[other] = holder[other], holder[key]


def stretch(data: Any, rng: random.Random) -> None:
    """Shorten, lengthen, repeat or empty a list."""
    lists = [x for x in (_at(data, path) for path in places(data)) if isinstance(x, list) and x]
    if not lists:
        return
    chosen = rng.choice(lists)
    how = rng.randrange(4)
    if how == 0:
        chosen.pop(rng.randrange(len(chosen)))
    elif how == 1:
        chosen.insert(rng.randrange(len(chosen) + 1), rng.choice(chosen))
    elif how == 2:
        chosen.extend(list(chosen) * rng.choice([1, 50]))
    else:
        chosen.clear()


def transplant(data: Any, rng: random.Random) -> None:
    """Overwrite a value by another one of the file, of any type."""
    holder, key = pick(data, rng)
    source, name = pick(data, rng)
    holder[key] = json.loads(json.dumps(source[name]))


def _strings(holder: Any) -> list[str]:
    return [x for x in (holder.values() if isinstance(holder, dict) else holder) if isinstance(x, str)]


def _at(data: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        data = data[key]
    return data


DATA: list[Callable[[Any, random.Random], None]] = [
    *[remove, rename, replace, replace, nudge, nudge, nudge, swap, stretch, transplant]
]


def spoil_data(data: Any, rng: random.Random) -> None:
    """Make one to three mistakes in place; mostly one, since a file is refused for the first that is found."""
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        if data:
            rng.choice(DATA)(data, rng)


def written(data: Any) -> str:
    """Return `data` as JSON, with `Raw` text verbatim."""
    match data:
        case Raw():
            return data
        case dict():
            return "{" + ", ".join(f"{json.dumps(key)}: {written(value)}" for key, value in data.items()) + "}"
        case list():
            return "[" + ", ".join(map(written, data)) + "]"
        case _:
            return json.dumps(data)


# --- text ---------------------------------------------------------------------------------------------------------


def spoil_lines(text: str, rng: random.Random) -> str:
    """Remove, double, move or rename lines, or change their values; for TOML, where a line is a field."""
    lines = text.splitlines()
    i = rng.randrange(len(lines))
    how = rng.randrange(7)
    if how == 0:
        del lines[i]
    elif how == 1:
        lines.insert(rng.randrange(len(lines)), lines[i])
    elif how == 2:
        lines[i] = re.sub(r"\w+", lambda found: found[0] + rng.choice(["x", "."]), lines[i], count=1)
    elif how == 3:
        lines[i] = re.sub(r"\d+", lambda _: rng.choice(NUMBERS[:-1]), lines[i], count=1)
    else:
        fields = [n for n, line in enumerate(lines) if re.match(r"[\w.]+ = ", line)]
        i = rng.choice(fields)
        lines[i] = lines[i].partition(" = ")[0] + " = " + _toml_value(rng)
    return "\n".join(lines) + "\n"


def _toml_value(rng: random.Random) -> str:
    words = {"NaN": "nan", "Infinity": "inf", "null": "", '{"": null}': '{"" = 1}', "[null]": "[inf]"}
    value = junk(rng)
    return words.get(value, value) if isinstance(value, Raw) else json.dumps(value)


# --- tokens -------------------------------------------------------------------------------------------------------

_TOKEN = re.compile(r'"[^"\n]*"|[\w.+-]+|\s+|.')


def spoil_tokens(text: str, rng: random.Random) -> str:
    """Remove, double, swap or replace words, strings and brackets; for any language."""
    tokens = _TOKEN.findall(text)
    for _ in range(rng.choice([1, 1, 2, 4, 8])):
        i, j = rng.randrange(len(tokens)), rng.randrange(len(tokens))
        how = rng.randrange(6)
        if how == 0:
            tokens[i] = ""
        elif how == 1:
            tokens[i] *= rng.choice([2, 3, 100])
        elif how == 2:
            tokens[i], tokens[j] = tokens[j], tokens[i]
        elif how == 3:
            tokens[i] = tokens[j]
        elif how == 4:
            tokens[i] = rng.choice([*NUMBERS, *OTHERS])
        else:
            tokens[i] = json.dumps(rng.choice(STRINGS))
    return "".join(tokens)


# --- bytes --------------------------------------------------------------------------------------------------------


def spoil_bytes(raw: bytes, rng: random.Random) -> bytes:
    """Return the bytes truncated, flipped, doubled, in another encoding, with a byte-order mark, or empty."""
    at, how = rng.randrange(len(raw)), rng.randrange(9)
    if how == 0:
        return raw[:at]
    if how == 1:
        return raw[:at] + bytes([raw[at] ^ 1 << rng.randrange(8)]) + raw[at + 1 :]
    if how == 2:
        return raw[:at] + rng.randbytes(rng.randrange(1, 20)) + raw[at:]
    if how == 3:
        return raw[:at] + raw[at + rng.randrange(1, 200) :]
    if how == 4:
        return b"\xef\xbb\xbf" + raw
    if how == 5:
        return raw.decode().encode(rng.choice(["utf-16", "utf-32", "utf-16-le"]))
    if how == 6:
        return raw[:at] + b"\0" * rng.randrange(1, 9) + raw[at:]
    if how == 7:
        return raw + raw
    return b""


# --- paths --------------------------------------------------------------------------------------------------------


def spoil_path(path: Path, rng: random.Random) -> None:
    """Replace the file by a folder, nothing, a link to itself, or a file without read permission."""
    path.unlink()
    how = rng.randrange(4)
    if how == 0:
        path.mkdir()
    elif how == 1:
        path.symlink_to(path)
    elif how == 2:
        path.symlink_to(path.parent / "nowhere")
    else:
        path.write_bytes(b"secret")
        path.chmod(0)
