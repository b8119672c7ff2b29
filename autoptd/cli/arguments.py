"""Parsers of command-line values: `--fix`, `--assume`, `--sweep`, counts and times.

Nothing here imports torch, so `--help` and usage errors are printed at once.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Collection
from typing import Any, NoReturn

from autoptd.errors import AutoptdError, nearest
from autoptd.search.constraints.assumed import ASSUMABLE, MEANT, only_predicted

SCHEDULE_KINDS = ("1f1b", "gpipe", "interleaved", "zero-bubble", "zero-bubble-v")

# Names that `--fix`, `--assume` and `--sweep` accept -> the type, or the values, of each.
FIXABLE: dict[str, Callable[[str], object] | tuple[str, ...]] = {
    "dp": int,
    "tp": int,
    "pp": int,
    "cp": int,
    "ep": int,
    "etp": int,
    "micro": int,
    "virtual": int,
    "shards": int,
    "zero": int,
    "recompute": ("auto", "none", "selective", "ops", "full", "offload"),
    "schedule": SCHEDULE_KINDS,
    "overlap": ("dp", "ep", "p2p", "tp"),  # several, or none
    "kernels": ("eager", "fused", "compiled"),
    "cut_solver": ("dynamic", "ilp"),
    "attention": ("torch", "flash", "triton", "cudnn"),
    "context": ("ring", "ulysses"),
    "dispatch": ("rows", "slices", "merged"),
    "dropout": ("exact", "fast"),
    "fp8": ("mxfp8", "tensor", "block"),
    "routing": ("balanced", "natural"),
    "loss": ("auto", "kept", "in_place", "chunked"),
    "gathers": ("kept", "again"),
    "gradients": ("main", "compute", "both", "fused"),
    "bucket_bytes": int,
    "splits": ("megatron",),
    "stages": ("balanced", "even", "layers"),
    "sends": ("whole", "slices"),
    "memory": ("check", "ignore"),
    "sequence_parallel": ("true", "false"),
    "max_tp": int,
    "headroom": float,
    "offload": float,
}
COUNTED = ("world", "batch", "seq")  # `--sweep` accepts these too: numbers from 1,
NAMED = ("cluster",)  # and names
SWEPT = (*COUNTED, *NAMED, *FIXABLE)
FIXED = tuple(name for name in FIXABLE if name not in ("attention", "fp8"))  # names of `--fix`


class UsageError(AutoptdError, ValueError):
    """A mistake in the command line itself."""


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises UsageError instead of exiting, so that all errors are reported alike."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Return the arguments. Raises UsageError, for an unknown option with the closest of its command.

        An empty value, as of an unset variable of a shell, is none: with it, nothing would be saved without a word.
        """
        found, unknown = self.parse_known_args(args, namespace)
        command = getattr(found, "parser", self)
        for option in command._actions:
            if option.option_strings and getattr(found, option.dest, None) == "":
                names = "/".join(option.option_strings)
                raise UsageError(f"argument {names}: the value is empty", fix="give one, or leave the option out")
        if unknown:
            options = [name for name in command._option_string_actions if name.startswith("--")]
            close = difflib.get_close_matches(unknown[0], options, n=1)
            meant = f"did you mean {close[0]}? " if close and unknown[0].startswith("--") else ""
            fix = f"{meant}see `{command.prog} --help`"
            raise UsageError(f"unrecognized arguments: {' '.join(unknown)}", fix=fix)
        return found

    def error(self, message: str) -> NoReturn:
        """Raise UsageError for a mistake that argparse found."""
        fix = f"see `{self.prog} --help`"
        if "required: COMMAND" in message:
            fix += ", or begin with `autoptd plan llama3-8b --world 64`"
        if (
            typed := re.search(r"argument COMMAND: invalid choice: '([^']*)' \(choose from (.*)\)", message)
        ) is not None:
            message = f"there is no command {typed[1]!r}"
            fix = nearest(typed[1], re.findall(r"[\w-]+", typed[2]))
        raise UsageError(message, fix=fix)


class Together(argparse.Action):
    """An option whose values add up where it is given several times."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: object, option: object = None) -> None:
        before, given = getattr(namespace, self.dest) or {}, dict(values)  # type: ignore[call-overload]
        if twice := sorted(before.keys() & given.keys()):
            raise argparse.ArgumentError(self, f"{', '.join(twice)} given twice")
        setattr(namespace, self.dest, {**before, **given})


def read_fix(text: str) -> dict[str, object]:
    """Parse `tp=8,overlap=dp,p2p` to {"tp": 8, "overlap": ("dp", "p2p")}. Raises argparse.ArgumentTypeError."""
    fixed = _read_choices(text, FIXABLE, "fixed")
    for name, value in fixed.items():
        if only_predicted(name, value):
            said = f"{name}={'+'.join(value) or 'none' if isinstance(value, tuple) else value}"
            raise argparse.ArgumentTypeError(
                f"{said} can only be predicted, since no generated program does it; give --assume {said}"
            )
    return fixed


def read_assume(text: str) -> dict[str, object]:
    """Parse `kernels=fused,overlap=dp`, as `read_fix` does. Raises argparse.ArgumentTypeError."""
    return _read_choices(text, ASSUMABLE, "assumed")


def _read_choices(text: str, known: Collection[str], done: str) -> dict[str, object]:
    fixed: dict[str, object] = {}
    for item in re.sub(r",(?=\s*(?:dp|p2p|tp)\s*(?:,|$))", "+", text).split(","):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not value:
            raise argparse.ArgumentTypeError(f"{item!r} is not NAME=VALUE, for example tp=8")
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} cannot be {done}; {nearest(name, known, MEANT)}")
        if name in fixed:
            raise argparse.ArgumentTypeError(f"{name!r} is {done} twice")
        fixed[name] = _fixed_value(name, value)
    return fixed


def read_sweep(text: str) -> tuple[str, tuple[object, ...]]:
    """Parse `world=8,16` to ("world", (8, 16)), and `world=8..64` to 8, 16, 32 and 64; a value of overlap is `dp+p2p`.
    Raises argparse.ArgumentTypeError."""
    name, equals, values = (part.strip() for part in text.partition("="))
    if not equals or not values:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE,VALUE,…, for example world=8,16,32")
    if name not in SWEPT:
        raise argparse.ArgumentTypeError(f"{name!r} cannot be swept; {nearest(name, SWEPT, MEANT)}")
    points: list[object] = []
    for value in (each for part in values.split(",") for each in _doubled(name, part.strip())):
        if not value:
            raise argparse.ArgumentTypeError(f"{text!r} has an empty value")
        point = value if name in NAMED else count(value) if name in COUNTED else _fixed_value(name, value)
        if point in points:
            raise argparse.ArgumentTypeError(f"{text!r} has {value} twice")
        points.append(point)
    return name, tuple(points)


def _doubled(name: str, value: str) -> list[str]:
    """Return the numbers that `8..64` stands for, 8 and its doubles up to 64; other values as they are."""
    first, dots, last = (part.strip() for part in value.partition(".."))
    if not dots or FIXABLE.get(name, int) is not int:
        return [value]
    if not first or not last:
        raise argparse.ArgumentTypeError(f"{value!r} is not FIRST..LAST, for example 8..64")
    least, most = count(first), count(last)
    if least > most:
        raise argparse.ArgumentTypeError(f"{value!r} begins with the larger number; {last}..{first} is meant")
    return [str(least << doublings) for doublings in range((most // least).bit_length())]


def _fixed_value(name: str, value: str) -> object:
    kind = FIXABLE[name]
    if name == "overlap":
        return _streams(value)
    if name == "sequence_parallel" and value in ("true", "false"):
        return value == "true"
    if isinstance(kind, tuple):
        if value not in kind:
            raise argparse.ArgumentTypeError(f"{name} is one of {', '.join(kind)}, not {value!r}")
        return value
    if kind is float:
        return _share(name, value)
    least = 0 if name in ("shards", "zero") else 1
    if not value.isascii() or not value.isdecimal() or int(value) < least:
        raise argparse.ArgumentTypeError(f"{name} is a whole number from {least}, not {value!r}")
    return kind(value)


def _share(name: str, value: str) -> float:
    try:
        share = float(value)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1 or (share == 1 and name == "headroom"):
        most = "less than 1" if name == "headroom" else "at most 1"
        raise argparse.ArgumentTypeError(f"{name} is a fraction, at least 0 and {most}, not {value!r}")
    return share


def read_split(text: str) -> tuple[str, str]:
    """Parse `*.q_proj.weight=S0` to its two sides. Raises argparse.ArgumentTypeError."""
    pattern, _, placement = (part.strip() for part in text.rpartition("="))
    if not pattern or not placement:
        raise argparse.ArgumentTypeError(f"{text!r} is not PATTERN=PLACEMENT, for example '*.q_proj.weight=S0'")
    return pattern, placement


def module_name(text: str) -> str:
    """Parse the name of a module, or a pattern of names."""
    if not text.strip():
        raise argparse.ArgumentTypeError("an empty name")
    return text.strip()


def all_fixed(arguments: argparse.Namespace) -> dict[str, object]:
    """Return the constraints of all options together. Raises UsageError for one that is given twice."""
    fixed: dict[str, object] = dict(arguments.fix or {})
    for name, value in (arguments.assume or {}).items():
        if name in fixed:
            raise UsageError(f"{name} is fixed and assumed", where=f"--assume {name}=", fix="leave one out")
        fixed[name] = value
    splits: dict[str, str] = {}
    for pattern, placement in arguments.split or ():
        if pattern in splits:
            raise UsageError(f"{pattern!r} is split twice", where="--split", fix="give it once")
        splits[pattern] = placement
    if splits and (every := fixed.get("splits")):
        splits = {"*": str(every), **splits}
    named = {"splits": splits, "cuts": tuple(arguments.cut or ()), "whole": tuple(arguments.whole or ())}
    return fixed | {name: value for name, value in named.items() if value}


def _streams(value: str) -> tuple[str, ...]:
    """Parse `dp+p2p` or `none`: the communication that overlaps with compute."""
    streams = FIXABLE["overlap"]
    assert isinstance(streams, tuple)
    named = () if value == "none" else tuple(part.strip() for part in value.split("+"))
    if wrong := [part for part in named if part not in streams]:
        raise argparse.ArgumentTypeError(f"overlap is none, or some of {', '.join(streams)}, not {wrong[0]!r}")
    return named


def count(text: str) -> int:
    """Parse a whole number from 1."""
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def seconds(text: str) -> float:
    """Parse a positive number of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value
