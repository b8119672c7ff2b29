"""Options of several commands about costs: `--price`, `--tokens` and `--samples`.

Nothing here imports torch, so `--help` and usage errors are printed at once.
"""

from __future__ import annotations

import argparse
import math
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autoptd.explain.costs import CostQuestion

_UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_NUMBER = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE]\+?[0-9]+)?"


def add_cost_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options to a command."""
    command.add_argument(
        "--price",
        type=read_price,
        metavar="X",
        help="price of a device-hour, as 2.5 or '2.5 EUR' (default: the cluster's)",
    )
    run = command.add_mutually_exclusive_group()
    run.add_argument(
        "--tokens", type=read_amount, metavar="N", help="time and cost to train on N tokens, as 300B or 1T"
    )
    run.add_argument("--samples", type=read_amount, metavar="N", help="time and cost to train on N samples, as 90M")


def cost_question(arguments: argparse.Namespace) -> CostQuestion:
    """Return what the options of a command ask."""
    from autoptd.explain.costs import CostQuestion

    price, currency = arguments.price or (None, None)
    return CostQuestion(price, currency, arguments.tokens, arguments.samples)


def asks_cost(arguments: argparse.Namespace) -> str:
    """Return the first of the options that is given, or an empty string."""
    return next((f"--{n}" for n in ("price", "tokens", "samples") if getattr(arguments, n) is not None), "")


def read_price(text: str) -> tuple[float, str | None]:
    """Parse `2.5` or `2.5 EUR` to a price and a currency, if there is one. Raises argparse.ArgumentTypeError."""
    found = re.fullmatch(rf"\s*({_NUMBER})\s*([^\W\d_]{{1,12}}|[€$£¥₩₹])?\s*", text)
    value = float(found[1]) if found else 0.0
    if not found or not 0 < value <= 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a price of a device-hour, for example 2.5 or '2.5 EUR'")
    return value, found[2]


def read_amount(text: str) -> float:
    """Parse a number of tokens or samples: `300B`, `1.5T`, `1e12`. Raises argparse.ArgumentTypeError."""
    found = re.fullmatch(rf"({_NUMBER})\s*([A-Za-z]*)", text.strip())
    if found and found[2] not in _UNITS:
        known = "k, M, B (or G) and T"
        raise argparse.ArgumentTypeError(f"{text!r} has the unknown unit {found[2]!r}; known: {known}")
    value = float(found[1]) * _UNITS[found[2]] if found else math.nan
    if not 1 <= value <= 1e24:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to 1e24, for example 300B or 1T")
    return value
