"""Parts of a block that only some families have: experts, of which a token goes to a few, and latent keys.

Owns their parameters, products and the bytes that they keep for the backward. Does not put blocks together
(``analytic``). Counted for a token: ``hidden`` is how wide hidden states are, ``half`` whether linear layers
round to bfloat16, ``experts`` whether products of experts do.
"""

from __future__ import annotations

import msgspec

FULL = 4  # bytes of a float32
HALF = 2  # bytes of a bfloat16
NUMBER = 8  # bytes of a token's number, of its position, or of the place of a row


class Experts(msgspec.Struct, frozen=True):
    """``num`` gated MLPs of ``ffn`` wide, a token going through ``per_token`` of them that the router names,
    and through one more, ``shared`` wide, that all tokens share.

    ``shared_gate``: this is scaled, by one number a token. ``router_bias``, ``bias``: of the router, and of
    all products of the experts. ``full_router``: it reads its weights as float32, so there is no rounded copy
    of them.
    """

    num: int
    per_token: int
    ffn: int
    shared: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    bias: bool = False
    full_router: bool = False

    def weights(self, hidden: int) -> int:
        """Of all matrix products of the block's MLP."""
        return self.num * 3 * hidden * self.ffn + self._dense_weights(hidden)

    def active_weights(self, hidden: int) -> int:
        """Of those that a token goes through."""
        return self.expert_weights(hidden) + self._dense_weights(hidden)

    def expert_weights(self, hidden: int) -> int:
        """Of the experts that a token goes through."""
        return self.per_token * 3 * hidden * self.ffn

    def biases(self, hidden: int) -> int:
        """Parameters that are no weights."""
        return self.num * (self.bias * (2 * self.ffn + hidden) + self.router_bias)

    def idle_params(self, hidden: int) -> int:
        """Parameters of the experts that a token does not go through."""
        return (self.num - self.per_token) * self._of_expert(hidden)

    def rounded(self, hidden: int, *, experts: bool) -> int:
        """Parameters of which there is a copy in bfloat16 where linear layers round, ``experts`` or not."""
        router = 0 if self.full_router else self.num * (hidden + self.router_bias)
        of_experts = self.num * self._of_expert(hidden) if experts else 0
        return router + self._shared_weights(hidden) + of_experts

    def tensors(self, hidden: int) -> list[tuple[int, ...]]:
        """Shapes of its parameters; experts are one tensor for each of their products."""
        shared = [(self.shared, hidden)] * 3 if self.shared else []
        biases = [(self.num, 2 * self.ffn), (self.num, hidden)] if self.bias else []
        return [
            (self.num, hidden),
            *([(self.num,)] if self.router_bias else []),
            (self.num, 2 * self.ffn, hidden),
            (self.num, hidden, self.ffn),
            *biases,
            *shared,
            *([(1, hidden)] if self.shared_gate else []),
        ]

    def kept_bytes(self, hidden: int, *, half: bool, experts: bool) -> int:
        """What a token keeps behind the norm before it. ``experts``: whether they round, too."""
        # Products of experts are not among those that autocast rounds: a job says it. (D-costs-002)
        number = HALF if experts else FULL
        # Gate, up, the activation, their product; experts with biases clamp the gate, in three steps more.
        width, places = (7, 4) if self.bias else (4, 3)
        rows = self.per_token * (number * (2 * hidden + width * self.ffn) + FULL + places * NUMBER)
        router = FULL * self.num + (FULL + NUMBER) * self.per_token
        product = HALF if half else FULL
        inputs = 1 + 2 * bool(self.shared) + self.shared_gate if half else 1
        shared = 4 * self.shared + self.shared_gate * (hidden + 1)
        return rows + router + product * (inputs * hidden + shared)

    def product_bytes(self, hidden: int, *, half: bool, experts: bool) -> int:
        """Of these the results of products; those of experts with biases, which are added in place, are made
        again.
        """
        number = HALF if experts else FULL
        rows = 0 if self.bias else self.per_token * number * (2 * self.ffn + hidden)
        shared = 2 * self.shared + hidden if self.shared else 0
        return rows + (HALF if half else FULL) * (self.num + shared)

    def _of_expert(self, hidden: int) -> int:
        """Parameters of one."""
        return 3 * hidden * self.ffn + self.bias * (2 * self.ffn + hidden)

    def _shared_weights(self, hidden: int) -> int:
        return 3 * hidden * self.shared + self.shared_gate * hidden

    def _dense_weights(self, hidden: int) -> int:
        """Of the router, and of what all tokens go through."""
        return self.num * hidden + self._shared_weights(hidden)


class Latent(msgspec.Struct, frozen=True):
    """Multi-head latent attention: queries and keys come from narrow ones, which have norms.

    ``queries``, ``keys``: how wide these are (0: queries come from hidden states at once). A head has
    ``plain`` and ``rotary`` numbers of queries and keys, and ``values``; all share the rotary keys.
    """

    queries: int
    keys: int
    plain: int
    rotary: int
    values: int

    def matrices(self, hidden: int, heads: int) -> list[tuple[int, int]]:
        """Shapes of the weights of all its products."""
        query = heads * (self.plain + self.rotary)
        from_hidden = [(self.queries, hidden), (query, self.queries)] if self.queries else [(query, hidden)]
        return [
            *from_hidden,
            (self.keys + self.rotary, hidden),
            (heads * (self.plain + self.values), self.keys),
            (hidden, heads * self.values),
        ]

    @property
    def norms(self) -> int:
        """Parameters of the norms of what is narrow."""
        return self.queries + self.keys

    @property
    def biased(self) -> int:
        """Biases of what is computed from hidden states, where these have some."""
        return self.queries + self.keys + self.rotary

    def attention(self, heads: int) -> int:
        """How wide all query heads are together, on the average of queries and values."""
        return heads * (self.plain + self.rotary + self.values) // 2

    def kept_bytes(self, hidden: int, heads: int, *, half: bool, length: int) -> int:
        """What a token keeps of it behind the norm before it. ``length``: of its sequence, where attention
        keeps its probabilities, else 0.
        """
        product = HALF if half else FULL
        narrow = self.queries + self.keys
        of_norms = (FULL + product) * narrow
        inputs = product * ((2 if half else 1) * hidden + narrow)
        into, out = heads * (2 * (self.plain + self.rotary) + self.values), heads * self.values
        # Plain attention computes in float32; its result is the output projection's input.
        attention = FULL * (into + heads * length) if length else product * into
        return of_norms + inputs + attention + product * out
