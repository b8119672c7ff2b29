"""Formatting of errors as they leave the package.

    call        shows the user's own frames, then what, where and fix. Frames within this package and torch and chained
                errors are hidden; `AUTOPTD_DEBUG=1` shows them all.
    torchrun    several ranks often end with the same error text. The first prints it in full, the others one line
                that names it. The launcher's table of failures quotes both.

Ranks agree on the first by a key of the launcher's store that is written once. Without a store, or if it does not
answer, each rank prints its own error. An error with another text is always printed in full.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from inspect import isfunction, signature
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from autoptd.caller_modes import usual_modes
from autoptd.errors import AutoptdError, InputsError, nearest
from autoptd.outputs import to_stderr, write_whole

if TYPE_CHECKING:
    import torch.distributed as dist

P = ParamSpec("P")
T = TypeVar("T")
Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

DEBUG = "AUTOPTD_DEBUG"
_ANSWER_S = 2.0  # timeout of the launcher's store


def public(call: Callable[P, T]) -> Callable[P, T]:
    """Wrap a public function so that an AutoptdError leaves it without the package's frames and chained errors.

    An unknown keyword is an InputsError. The function runs in torch's usual modes, whatever those of the caller are.
    """
    names = [p.name for p in signature(call).parameters.values() if p.kind is not p.VAR_KEYWORD]
    takes_any = len(names) < len(signature(call).parameters)

    @wraps(call)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            if not takes_any and (unknown := next((name for name in kwargs if name not in names), "")):
                raise _unknown_keyword(call.__name__, unknown, kwargs[unknown], names)
            with usual_modes():
                return call(*args, **kwargs)
        except AutoptdError as error:
            if debugging():
                raise
            found = error
        if found.__cause__ is not None and hasattr(found, "add_note"):
            found.add_note(f"  more   {DEBUG}=1 shows the error that caused this one")
        if "TORCHELASTIC_RUN_ID" in os.environ and not isinstance(sys.excepthook, PrintOnce):
            sys.excepthook = PrintOnce(sys.excepthook)
        raise found.with_traceback(None) from None

    return called


def _unknown_keyword(function: str, name: str, value: object, names: list[str]) -> InputsError:
    fix = nearest(name, [n for n in names if n != "self"])
    if "fix" in names and not fix.startswith("did you mean"):
        fix = f"a choice of the plan is passed as fix={{{name!r}: {value!r}}}; {fix}"
    return InputsError(f"{function} has no keyword {name!r}", where=name, fix=fix)


def public_methods(cls: type[T]) -> type[T]:
    """Apply `public` to every method and property of a class without a leading underscore."""
    for name, member in list(vars(cls).items()):
        if name.startswith("_"):
            continue
        if isfunction(member):
            setattr(cls, name, public(member))
        elif isinstance(member, property) and member.fget is not None:
            setattr(cls, name, member.getter(public(member.fget)))
    return cls


def debugging() -> bool:
    """Return whether errors are shown with all frames and chained errors."""
    return os.environ.get(DEBUG, "0") not in ("", "0")


@dataclass(frozen=True)
class PrintOnce:
    """A rank's `sys.excepthook`, which prints one line for an AutoptdError that another rank has printed in full."""

    before: Hook

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        rank = os.environ.get("RANK", "")
        if not isinstance(error, AutoptdError):
            self.before(kind, error, trace)
            return
        text = f"{kind.__name__}: {error}"
        printer = _first_rank(text, rank)
        if printer == rank:
            self.before(kind, error, trace)
        else:
            with redirect_stderr(io.StringIO()):  # other hooks do more than print: they notify other ranks
                self.before(kind, error, trace)
            text = f"{kind.__name__}: {error.what} (rank {printer} shows the details)"
            to_stderr(f"rank {rank}: {text}")
        _record(text)


def _first_rank(text: str, rank: str) -> str:
    """Return the first rank with this error in this attempt; `rank` itself if there is none or no store answers."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        store = _store()
        return store.compare_set(f"autoptd/said/{attempt}/{digest}", "", rank).decode() if store else rank
    except (RuntimeError, OSError, ValueError):  # raised by torch's stores
        return rank


def _store() -> dist.Store | None:
    """Connect to the store of torchrun's agent; None if there is none."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    from torch.distributed import TCPStore

    address, port = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", ""))
    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=_ANSWER_S), wait_for_workers=False)


def _record(text: str) -> None:
    """Write `text` for the launcher's table, in the format of torchelastic's `record`; an existing file is kept."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or Path(path).exists():
        return
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    with suppress(AutoptdError):  # the table then shows only the rank and its exit code
        write_whole(Path(path), json.dumps({"message": {"message": text, "extraInfo": extra}}))
