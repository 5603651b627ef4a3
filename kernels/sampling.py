"""From logits to tokens: counter-based Gumbel noise, filters, penalties. Reference versions.

All functions work on float32 rows [N, V] and are row-wise: a row's result does not depend on its
neighbours. Banned tokens have the logit -inf.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

WORD = 0xFFFFFFFF


def noise_keys(seed: int, position: int) -> tuple[int, int]:
    """Two 32-bit keys for the noise of one (seed, absolute position), by splitmix64.

    Source of the mixer: Steele, Lea, Flood, "Fast splittable pseudorandom number generators"
    (2014). Plain integers, so that every backend starts from the same keys.
    """
    mixed = _splitmix64(_splitmix64(seed) ^ position)
    return mixed & WORD, mixed >> 32


NOISE_CHUNK = 1 << 16  # numbers made at once: small enough to stay in the cache, 3 times faster


def gumbel_noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise G(seed, position, token), the same in any batch.

    keys: [N, 2] int64, each in 0 .. 2**32 - 1, from `noise_keys`; token_ids: [V] int32. Returns
    [N, V] float32.

    Each token's random bits are `hash(hash(token ^ key0) ^ key1)`; G = -log(-log(1 - u)) with
    u in (0, 1). The tail that decides (large G) lies at small u, where float32 is finest.
    """
    noise = torch.empty(len(keys), len(token_ids), dtype=torch.float32, device=keys.device)
    rows = max(1, NOISE_CHUNK // len(token_ids))
    for part, key in zip(torch.split(noise, rows), torch.split(_as_int32(keys), rows), strict=True):
        bits = _hash32_(_hash32_(token_ids ^ key[:, :1]).bitwise_xor_(key[:, 1:]))
        # 31 of the bits; half a step keeps u above 0, the clamp below 1.
        uniform = bits.bitwise_right_shift_(1).bitwise_and_(0x7FFFFFFF).to(torch.float32)
        uniform.add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2**-24)
        torch.neg(uniform.neg_().log1p_().neg_().log_(), out=part)
    return noise


@dataclass(frozen=True)
class FilterParams:
    """Row-wise filters, [N] each, neutral where a row does not filter."""

    top_k: Tensor  # int64; vocab_size = all
    top_p: Tensor  # float32; 1 = all
    min_p: Tensor  # float32; 0 = all


TOP_CANDIDATES = 1024  # rows whose top-p set is larger are sorted whole


def filter_logits(logits: Tensor, params: FilterParams) -> Tensor:
    """Keep a row's top-k, then of those its top-p, and tokens above min-p; ban the rest.

    logits: [N, V], already divided by the temperature. Ties with the last kept token are kept.
    min-p keeps tokens with p >= min_p * max p.
    """
    best = logits.max(dim=-1, keepdim=True).values
    threshold = best + params.min_p[:, None].log()  # log(0) = -inf keeps all
    ranked = bool((params.top_k < logits.shape[1]).any() or (params.top_p < 1).any())
    if ranked:
        threshold = threshold.maximum(_rank_threshold(logits, params))
    return logits.masked_fill(logits < threshold, -math.inf)


def _rank_threshold(logits: Tensor, params: FilterParams) -> Tensor:
    """Logit of the last token that top-k and top-p keep, [N, 1]."""
    vocab_size = logits.shape[1]
    count = min(TOP_CANDIDATES, vocab_size)
    threshold, decided = _threshold_among(logits, params, count)
    if not bool(decided.all()):
        rest = (~decided).nonzero()[:, 0]
        subset = FilterParams(params.top_k[rest], params.top_p[rest], params.min_p[rest])
        threshold[rest], _ = _threshold_among(logits[rest], subset, vocab_size)
    return threshold


def _threshold_among(logits: Tensor, params: FilterParams, count: int) -> tuple[Tensor, Tensor]:
    """The threshold looked for among the `count` largest logits: [N, 1], and [N] whether found."""
    top = logits.topk(count, dim=-1).values  # [N, count], descending
    rank = torch.arange(count, device=logits.device)
    in_top_k = rank[None] < params.top_k[:, None]
    # Top-p works on what top-k left, renormalised. With an open top-k, over the whole row.
    open_k = params.top_k >= logits.shape[1]
    closed_total = top.masked_fill(~in_top_k, -math.inf).logsumexp(-1)
    total = torch.where(open_k, _logsumexp(logits), closed_total)
    probs = (top - total[:, None]).exp().masked_fill(~in_top_k, 0)
    mass_before = probs.cumsum(-1) - probs
    kept = in_top_k & ((mass_before < params.top_p[:, None]) | (rank[None] == 0))
    kept |= in_top_k & (params.top_p[:, None] >= 1)
    last = kept.sum(-1) - 1
    # An open top-k whose last candidate is kept, or a closed one beyond them, needs more of them.
    decided = (params.top_k <= count) | (open_k & (last < count - 1)) | (count == logits.shape[1])
    no_limit = open_k & (params.top_p >= 1)
    threshold = top.gather(1, last[:, None])
    threshold = threshold.masked_fill(no_limit[:, None], -math.inf)
    return threshold, decided | no_limit


def _logsumexp(logits: Tensor) -> Tensor:
    """[N]. Row by row: on several threads a lone row rounds otherwise than in a batch."""
    return torch.stack([row.logsumexp(-1) for row in logits])


def penalize(logits: Tensor, counts: Tensor, in_prompt: Tensor, penalties: Tensor) -> Tensor:
    """Apply repetition, presence and frequency penalties.

    logits: [N, V]; counts: [N, V] how often a token was generated; in_prompt: [N, V] bool;
    penalties: [N, 3] repetition, presence, frequency. Repetition as in CTRL (Keskar et al. 2019):
    positive logits are divided, negative ones multiplied, for tokens of prompt and output.
    """
    repetition, presence, frequency = penalties[:, :, None].unbind(1)
    generated = counts > 0
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(generated | in_prompt, scaled, logits)
    return logits - presence * generated - frequency * counts


def _splitmix64(state: int) -> int:
    mask = (1 << 64) - 1
    state = (state + 0x9E3779B97F4A7C15) & mask
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return state ^ (state >> 31)


def _hash32_(x: Tensor) -> Tensor:
    """A 32-bit bijection with low bias, in place ("lowbias32", Wellons, "hash-prospector", 2018).

    int32 arithmetic wraps; masking makes the arithmetic right shift a logical one.
    """
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= 0x7FEB352D
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= _signed(0x846CA68B)
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def _as_int32(words: Tensor) -> Tensor:
    """[...] int64 in 0 .. 2**32 - 1, reinterpreted as int32."""
    return (words - ((words >> 31) << 32)).to(torch.int32)
