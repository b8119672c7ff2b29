"""The case of one seed: the first model drawn from it that trains by itself."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autoptd.nest import Nest
from benchmarks.coverage.alone import train_alone
from benchmarks.coverage.check import FIX
from benchmarks.coverage.mutated.bases import BASES
from benchmarks.coverage.mutated.draw import Draw
from benchmarks.coverage.mutated.library import MODELS, library_model
from benchmarks.coverage.mutated.pictures import PICTURES

ATTEMPTS = 50
OWN = {**BASES, **PICTURES}
FROM_LIBRARY = 4  # every so many seeds, one model is of transformers
MESHES = (  # odd sizes do not split
    FIX,
    {"tp": 1, "pp": 2, "dp": 4},
    {"tp": 2, "pp": 1, "dp": 4},
    {"tp": 1, "pp": 1, "dp": 8},
)
Loss = Callable[[Any], Tensor]


@dataclass(frozen=True)
class Drawn:
    """A model, its batch, its loss if `forward` does not return it, and what was drawn."""

    model: nn.Module
    batch: dict[str, Any]
    loss: Loss | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Mutated:
    """A model mutated at random."""

    seed: int
    meshes: tuple[Mapping[str, int], ...] = MESHES

    @property
    def base(self) -> str:
        names = list(MODELS) if self.of_library else list(OWN)
        return names[(self.seed // FROM_LIBRARY if self.of_library else self.seed) % len(names)]

    @property
    def of_library(self) -> bool:
        return self.seed % FROM_LIBRARY == FROM_LIBRARY - 1

    @property
    def name(self) -> str:
        return f"{self.base} {self.seed}"

    @property
    def family(self) -> str:
        return "mutated"

    @property
    def loss(self) -> Loss | None:
        return self.drawn.loss

    def build(self) -> tuple[nn.Module, dict[str, Any]]:
        """Return the model in float64 and training mode, and its batch."""
        return self.drawn.model, dict(self.drawn.batch)

    @functools.cached_property
    def drawn(self) -> Drawn:
        """The first model of this seed that trains by itself, with a finite loss and gradient."""
        last: Exception | None = None
        for attempt in range(ATTEMPTS):
            draw = Draw.of(self.seed, attempt)
            torch.manual_seed(self.seed)
            try:
                return self.attempted(draw)
            except Exception as error:  # noqa: BLE001  a drawn model fails in its own way
                last = error
        raise LookupError(f"no model of seed {self.seed} trains by itself") from last

    def attempted(self, draw: Draw) -> Drawn:
        """Draw one model. Raises whatever it raises if it does not train by itself."""
        loss: Loss | None = None
        if self.of_library:
            model, batch, loss = library_model(draw, self.base)
        else:
            model, batch = OWN[self.base](draw)
            model = model.double().train()
        train_alone(copy.deepcopy(model), Nest.of(batch).flat(batch))
        return Drawn(model, batch, loss, tuple(draw.notes))
