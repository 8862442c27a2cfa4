"""FLOPs of training a model, by formula; with a device's peak (``devices``) they make its MFU.

Owns the formula, of forward and backward together and for each token::

    6 * N + 12 * L * a * s

N are the weights of matrix products, the output projection among them and embeddings (look-ups) not, also
where the two are tied; L blocks, whose query heads are ``a`` wide together, see ``s`` tokens. This is model
FLOPs utilisation as in PaLM (Chowdhery et al. 2022, appendix B), nanoGPT and torchtitan, and the
operations that Megatron-LM counts (Narayanan et al. 2021, section 5.1, without recomputation): a multiply-add
is two, a backward pass is twice its forward, and nothing is taken off for a causal mask, a window, or
documents that do not see each other. What is computed a second time counts once: this is not hardware
FLOPs utilisation.
"""

from __future__ import annotations

from oobleckd.planner.profile import Profile

_FLOAT = 4  # bytes of a parameter


def per_token(weights: int, num_blocks: int, attention: int, sequence: int) -> float:
    """N, L, a and s as above."""
    return 6.0 * weights + 12.0 * num_blocks * attention * sequence


def of_profile(profile: Profile) -> float:
    """A token of the model that ``profile`` is of. One that an older version measured does not say: then 6 a
    parameter, without those of the embedding, its first layer. Attention's own products are left out of that,
    so it is more than the formula by norms and biases at most (below 0.1 % of a model that is worth a
    cluster); 0 of a model without blocks.
    """
    known = profile.flops_per_token
    return known or 6.0 * sum(layer.param_bytes for layer in profile.layers[1:]) / _FLOAT
