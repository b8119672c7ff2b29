"""A configuration of the same model, as narrow as its plan allows.

With T tp ranks, C cp ranks and M = T·C (of experts T·C·E, with E ep ranks), a size n becomes the smallest n' ≥ floor
that splits as n does:

    n' ≡ n (mod M)                           vocabulary, width of the MLP, positions
    gcd(n', M) = gcd(n, M)                   heads, key-value heads, experts; two experts on each rank of several
    model width = heads × head width         the head width is even (rotary embeddings rotate pairs)

In a mixture of experts, widths are also multiples of 16 bytes in 16-bit types, as grouped matmuls need them. Sizes that
divide by the ranks still do, and others still do not. The fields are those of Hugging Face configurations; any other
field is unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

_WIDTH = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "num_heads")
_KEY_HEADS = ("num_key_value_heads",)
_HEAD_WIDTH = ("head_dim", "d_kv", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
_INNER = (
    *("intermediate_size", "n_inner", "d_ff", "moe_intermediate_size", "shared_expert_intermediate_size"),
    *("intermediate_size_mlp", "q_lora_rank", "kv_lora_rank"),
)
_VOCABULARY = ("vocab_size",)
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_GROUPS = ("n_group",)
_CHOSEN = ("num_experts_per_tok",)
_POSITIONS = ("max_position_embeddings", "n_positions")
_GROUPED = 8  # elements: row alignment of grouped matmuls
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


@dataclass(frozen=True)
class Ranks:
    """The ranks over which the sizes of a model are split. `scale`: a factor on the smallest sizes."""

    tp: int = 1
    cp: int = 1
    ep: int = 1
    scale: int = 1

    @property
    def all(self) -> int:
        return self.tp * self.cp


def congruent(size: int, floor: int, modulus: int) -> int:
    """Return the smallest number ≥ `floor` with the remainder of `size`, but at most `size`."""
    return min(size, floor + (size - floor) % modulus)


def same_divisors(count: int, floor: int, ranks: int) -> int:
    """Return the smallest number ≥ `floor` with the same gcd with `ranks` as `count`, but at most `count`."""
    wanted = math.gcd(count, ranks)
    return next((n for n in range(min(floor, count), count) if math.gcd(n, ranks) == wanted), count)


def narrow(config: Mapping[str, Any], ranks: Ranks, tokens: int) -> dict[str, Any]:
    """Return the fields of a configuration that change -> their new values. `tokens`: the new length of a sample."""

    def given(names: tuple[str, ...]) -> dict[str, int]:
        return {n: config[n] for n in names if isinstance(config.get(n), int) and not isinstance(config.get(n), bool)}

    grain = _GROUPED if given(_EXPERTS) else 1
    found = _attention(given, ranks, max(2, grain))
    width = next((found[n] for n in _WIDTH if n in found), 0)
    rest = math.lcm(ranks.all * ranks.scale, grain)
    found |= {n: congruent(x, 2 * width + 4, rest) for n, x in given(_INNER).items()}
    found |= {n: congruent(x, 24 * ranks.scale, ranks.all) for n, x in given(_VOCABULARY).items()}
    chosen = {n: min(x, 2) for n, x in given(_CHOSEN).items()}
    groups = max(given(_GROUPS).values(), default=1)
    found |= chosen | {n: _experts(x, groups, max(4, *chosen.values(), 0), ranks) for n, x in given(_EXPERTS).items()}
    found |= {n: congruent(x, tokens + 1, ranks.all) for n, x in given(_POSITIONS).items()}
    words = min((found[n] for n in _VOCABULARY if n in found), default=0)
    found |= {n: words - 1 for n, x in given(_TOKENS).items() if x >= words > 0}
    found |= _image(given, ranks)
    return {name: value for name, value in found.items() if value != config[name]}


def _attention(given: Callable[[tuple[str, ...]], dict[str, int]], ranks: Ranks, grain: int) -> dict[str, int]:
    """Return new widths, heads and head widths; a head width is a multiple of `grain`."""
    heads, widths = given(_HEADS), given(_WIDTH)
    if not heads or not widths:
        return {}
    (head_name, count), (width_name, width) = next(iter(heads.items())), next(iter(widths.items()))
    groups = given(_KEY_HEADS)
    # heads of their own keys are two at least: a dim of one is broadcast by other ops
    shared = {n: same_divisors(x, 2 if x == count > 1 else 1, ranks.all) for n, x in groups.items()}
    found = dict(shared)
    if shared:
        old, new = next(iter(groups.values())), next(iter(shared.values()))
        wanted, most = math.gcd(count, ranks.all), count // old
        each_group = range(min(2, most), most)  # queries per key head: several if the model has several
        found[head_name] = new * next((r for r in each_group if math.gcd(new * r, ranks.all) == wanted), most)
    else:
        found[head_name] = same_divisors(count, min(2, count), ranks.all)
    divides = width % ranks.all == 0
    least = math.lcm(4 * ranks.scale, grain)
    each = next(d for d in range(least, 1 << 20, grain) if not divides or (found[head_name] * d) % ranks.all == 0)
    if width % count == 0 and each >= width // count:
        return {}
    found[width_name] = found[head_name] * each
    parts = given(_HEAD_WIDTH)  # equal ones stay equal, others keep their ratio: a split into equal parts is another op
    return found | {n: each * x // min(parts.values()) for n, x in parts.items()}


def _experts(count: int, groups: int, least: int, ranks: Ranks) -> int:
    """Return fewer experts in as many groups: at least two on each rank, and two in each group of several."""
    each, split = count // groups, ranks.all * ranks.ep
    floor = max(-(-max(least, 2 * ranks.all, 2 * ranks.ep) // groups), 2 if groups > 1 else 1)

    def splits_alike(n: int) -> bool:
        """Return whether groups of n experts split over tp as the planned ones, and all experts over ep."""
        pairs = ((n, each, ranks.all), (groups * n, count, split))
        return all(math.gcd(new, by) == math.gcd(old, by) for new, old, by in pairs)

    return groups * next((n for n in range(min(floor, each), each) if splits_alike(n)), each)


def _image(given: Callable[[tuple[str, ...]], dict[str, int]], ranks: Ranks) -> dict[str, int]:
    """Return a small image size with patches of two pixels, with the same number of patches modulo the ranks."""
    if not (sizes := given(("image_size",))) or not (patches := given(("patch_size",))):
        return {}
    old = (sizes["image_size"] // patches["patch_size"]) ** 2 + 1
    side = next((k for k in range(2, 64) if (k * k + 1) % ranks.all == old % ranks.all), 0)
    return {"image_size": 2 * side, "patch_size": 2} if side else {}


def wider(ranks: Ranks) -> Ranks:
    """Return the next attempt after sizes that were too small for the plan."""
    return replace(ranks, scale=2 * ranks.scale)
