"""Curves for TensorBoard: the numbers of `Parallel.report()`, written by one rank."""

from __future__ import annotations

import os
from types import TracebackType
from typing import TYPE_CHECKING, Any

from autoptd.errors import RuntimeFault
from autoptd.runtime.report import StepReport

if TYPE_CHECKING:
    from autoptd.parallel import Parallel

_LEFT_OUT = ("step",)


class Tracker:
    """Writes how training goes to a folder of TensorBoard's; rank 0 does, on others nothing happens.

    Raises RuntimeFault on rank 0 where TensorBoard is not installed, and where the folder cannot be written.
    """

    def __init__(self, parallel: Parallel, directory: str | os.PathLike[str]) -> None:
        self._parallel = parallel
        self._writer: Any = _writer(directory) if parallel.rank == 0 else None

    def write(self, **others: float) -> StepReport:
        """The numbers since the last report, and others by name, under the step that was just done."""
        report = self._parallel.report()
        if self._writer is not None:
            for name, value in {**report.to_data(), **others}.items():
                if name not in _LEFT_OUT:
                    self._writer.add_scalar(f"train/{name}", value, report.step)
        return report

    def close(self) -> None:
        """Write what is still in memory."""
        if self._writer is not None:
            self._writer.close()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _writer(directory: str | os.PathLike[str]) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise RuntimeFault(
            f"TensorBoard cannot be imported: {error}", where="track", fix="pip install 'autoptd[track]'"
        ) from error
    try:
        return SummaryWriter(os.fspath(directory))
    except OSError as error:
        raise RuntimeFault(
            f"curves cannot be written: {error.strerror}",
            where=os.fspath(directory),
            fix="name a folder that you may write to",
        ) from error
