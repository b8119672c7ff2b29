"""Keyed randomness: what a dropout drops depends on where it stands, not on who ran before it.

The seed of a mask is a hash of (seed, step, dp rank, microbatch, key of the op, shard). Ranks of a tp group agree on a
replicated tensor (shard 0 for all) and differ on a split one (shard = tp rank); a recompute of the same microbatch
draws the same mask; the cut into stages plays no part, because the key is the op's name in the model.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch


@dataclass
class DropoutKey:
    """Where training stands; the executor moves `step` and `microbatch`. Not `active`: dropout is the identity."""

    seed: int = 0
    dp_rank: int = 0
    step: int = 0
    microbatch: int = 0
    active: bool = True

    def draw_seed(self, key: str, shard: int = 0) -> int:
        """63 bits for one op of one microbatch."""
        where = f"{self.seed}/{self.step}/{self.dp_rank}/{self.microbatch}/{key}/{shard}"
        return int.from_bytes(hashlib.blake2b(where.encode(), digest_size=8).digest(), "big") >> 1

    def generator(self, key: str, shard: int, device: torch.device) -> torch.Generator:
        """A fresh generator for one op of one microbatch."""
        return torch.Generator(device).manual_seed(self.draw_seed(key, shard))
