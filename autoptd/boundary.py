"""Where errors leave the package: what a person is shown of them.

    call        the user's own frames, then what, where and fix. The frames within this package and torch, and errors
                behind this one, are left out: `AUTOPTD_DEBUG=1` shows them all.
    torchrun    ranks that end with the same words: the first of them says it, each other one says so in a line. The
                launcher's table of failures quotes both.

Ranks agree on who speaks by one key of the launcher's store, written once. Where there is none, or it does not answer,
each rank speaks for itself. A rank that says something else is never silenced.
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
from inspect import isfunction
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from autoptd.errors import AutoptdError
from autoptd.outputs import write_whole

if TYPE_CHECKING:
    import torch.distributed as dist

P = ParamSpec("P")
T = TypeVar("T")
Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

DEBUG = "AUTOPTD_DEBUG"
_ANSWER_S = 2.0  # of the launcher's store


def public(call: Callable[P, T]) -> Callable[P, T]:
    """What a person calls: an AutoptdError leaves it without what is behind it."""

    @wraps(call)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except AutoptdError as error:
            if debugging():
                raise
            found = error
        if found.__cause__ is not None and hasattr(found, "add_note"):
            found.add_note(f"  more   {DEBUG}=1 shows the error behind this one")
        if "TORCHELASTIC_RUN_ID" in os.environ and not isinstance(sys.excepthook, OneVoice):
            sys.excepthook = OneVoice(sys.excepthook)
        raise found.with_traceback(None) from None

    return called


def public_methods(cls: type[T]) -> type[T]:
    """Every method and property of a class that has no leading underscore is `public`."""
    for name, member in list(vars(cls).items()):
        if name.startswith("_"):
            continue
        if isfunction(member):
            setattr(cls, name, public(member))
        elif isinstance(member, property) and member.fget is not None:
            setattr(cls, name, member.getter(public(member.fget)))
    return cls


def debugging() -> bool:
    """Whether errors are shown with all that is behind them."""
    return os.environ.get(DEBUG, "0") not in ("", "0")


@dataclass(frozen=True)
class OneVoice:
    """`sys.excepthook` of a rank: an AutoptdError that another rank has said is one line here."""

    before: Hook

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        rank = os.environ.get("RANK", "")
        if not isinstance(error, AutoptdError):
            self.before(kind, error, trace)
            return
        text = f"{kind.__name__}: {error}"
        speaker = _first_to_say(text, rank)
        if speaker == rank:
            self.before(kind, error, trace)
        else:
            with redirect_stderr(io.StringIO()):  # other hooks do more than print: they tell other ranks
                self.before(kind, error, trace)
            text = f"{kind.__name__}: {error.what} (rank {speaker} says more)"
            sys.stderr.write(f"autoptd: rank {rank}: {text}\n")
            sys.stderr.flush()
        _record(text)


def _first_to_say(text: str, rank: str) -> str:
    """The rank that said this first in this attempt, `rank` itself if nobody did or nobody knows."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        store = _store()
        return store.compare_set(f"autoptd/said/{attempt}/{digest}", "", rank).decode() if store else rank
    except (RuntimeError, OSError, ValueError):  # of torch's stores
        return rank


def _store() -> dist.Store | None:
    """The store that torchrun's agent holds for its ranks."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    from torch.distributed import TCPStore

    address, port = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", ""))
    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=_ANSWER_S), wait_for_workers=False)


def _record(text: str) -> None:
    """For the launcher's table, in the form that torch's elastic `record` writes. What that wrote stays."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or Path(path).exists():
        return
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    with suppress(AutoptdError):  # the table then names the rank and its exit code alone
        write_whole(Path(path), json.dumps({"message": {"message": text, "extraInfo": extra}}))
