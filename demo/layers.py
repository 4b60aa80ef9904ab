"""A toy language model of one linear-attention layer a family: how cuLA's calls sit in a model.

Everything is random but fixed by a seed; what is generated means nothing, but each token depends
on the state that all tokens before it left behind, as in a real model.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch

VOCABULARY, HIDDEN = 1000, 256
LOWER_BOUND = -5.0  # KDA's gate: log decay a token, between this and 0


@dataclass(frozen=True)
class Sizes:
    """How much the demo does.

    Attributes:
        batch: prompts, side by side.
        prompt: tokens of each.
        new: tokens generated after each.
        heads: attention heads.
        dim: their dimension, K = V.
    """

    batch: int
    prompt: int
    new: int
    heads: int
    dim: int = 128


class ToyModel:
    """Embedding, projections to q, k and v, and a head over the vocabulary. A family adds the rest.

    Attributes:
        name: the family's.
        prefill_call, decode_call: the names of the calls it shows.
        constants: what its calls take besides each token's inputs.
    """

    name: str
    prefill_call: Literal["kda_prefill", "lightning_prefill"]
    decode_call: Literal["kda_decode", "lightning_decode"]
    constants: dict[str, Any]

    def __init__(self, sizes: Sizes, device: torch.device, seed: int = 0) -> None:
        """Draw the weights.

        Args:
            sizes: heads and dimension.
            device: where everything lives.
            seed: of all that is random.
        """
        self.sizes, self.device = sizes, device
        self._random = torch.Generator(device).manual_seed(seed)
        width = sizes.heads * sizes.dim
        self.embedding = self.draw(VOCABULARY, HIDDEN)
        self.to_q, self.to_k, self.to_v = (self.draw(HIDDEN, width) for _ in range(3))
        self.to_logits = self.draw(width, VOCABULARY)

    def draw(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Normal random numbers, scaled so that a product over the first dimension stays normal."""
        options = {"generator": self._random, "device": self.device}
        return (torch.randn(shape, **options) * shape[0] ** -0.5).to(dtype)

    def prompts(self) -> torch.Tensor:
        """Returns: token ids [batch, prompt]."""
        shape = (self.sizes.batch, self.sizes.prompt)
        return torch.randint(VOCABULARY, shape, generator=self._random, device=self.device)

    def new_state(self) -> torch.Tensor:
        """Returns: a zero state pool, one slot a prompt, [slots, HV, V, K] fp32."""
        s = self.sizes
        return torch.zeros(s.batch, s.heads, s.dim, s.dim, device=self.device)

    def inputs(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What the attention call reads for these tokens, [B, T, ...] each.

        Args:
            tokens: ids [B, T].

        Returns:
            q, k, v and whatever else the family's call takes per token.
        """
        x = self.embedding[tokens] * HIDDEN**0.5
        heads = (*tokens.shape, self.sizes.heads, self.sizes.dim)
        q, k, v = ((x @ weight).view(heads) for weight in (self.to_q, self.to_k, self.to_v))
        return q, k, v, *self.gates(x)

    def gates(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The family's further inputs per token; none by default."""
        return ()

    def next_tokens(self, o: torch.Tensor) -> torch.Tensor:
        """Greedy choice after the last token.

        Args:
            o: attention output [B, T, HV, V].

        Returns:
            Token ids [B, 1].
        """
        return (o[:, -1:].flatten(2) @ self.to_logits).argmax(-1)

    def prefill(self, inputs, state: torch.Tensor, out: torch.Tensor, backend: str) -> torch.Tensor:
        """Run whole prompts; ``state`` then holds what is known of each."""
        raise NotImplementedError

    def decode(self, inputs, state: torch.Tensor, out: torch.Tensor, backend: str) -> torch.Tensor:
        """Run one token a prompt, from ``state``, which is updated in place."""
        raise NotImplementedError

    def exact(self, inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """The float64 recurrence over whole sequences: o, and the final state V-first."""
        raise NotImplementedError


class KdaModel(ToyModel):
    """Kimi Delta Attention: a gate a channel, and a step size a head, from every token."""

    name = "KDA"
    prefill_call, decode_call = "kda_prefill", "kda_decode"

    def __init__(self, sizes: Sizes, device: torch.device, seed: int = 0) -> None:
        super().__init__(sizes, device, seed)
        width = sizes.heads * sizes.dim
        self.to_gate, self.to_beta = self.draw(HIDDEN, width), self.draw(HIDDEN, sizes.heads)
        self.constants = {
            "A_log": self.draw(sizes.heads, dtype=torch.float32),
            "dt_bias": self.draw(width, dtype=torch.float32),
            "lower_bound": LOWER_BOUND,
        }

    def gates(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        raw = (x @ self.to_gate).view(*x.shape[:2], self.sizes.heads, self.sizes.dim)
        return raw, (x @ self.to_beta).float().sigmoid()

    def prefill(self, inputs, state, out, backend):
        from cula.kda import kda_prefill

        return kda_prefill(*inputs, state=state, **self.constants, out=out, backend=backend)

    def decode(self, inputs, state, out, backend):
        from cula.decode import kda_decode

        return kda_decode(*inputs, state, **self.constants, out=out, backend=backend)

    def exact(self, inputs):
        from cula.common.recurrence import kda_log_decay, kda_steps, l2_normalise

        q, k, v, raw, beta = inputs
        exact = torch.float64
        g = kda_log_decay(raw, **self.constants, dtype=exact)
        q, k = l2_normalise(q, dtype=exact), l2_normalise(k, dtype=exact)
        o, state = kda_steps(q, k, v, g, beta, None, self.sizes.dim**-0.5, dtype=exact)
        return o, state.mT


class LightningModel(ToyModel):
    """Lightning Attention: one fixed decay a head."""

    name = "Lightning"
    prefill_call, decode_call = "lightning_prefill", "lightning_decode"

    def __init__(self, sizes: Sizes, device: torch.device, seed: int = 0) -> None:
        super().__init__(sizes, device, seed)
        from cula.common.recurrence import lightning_log_decay

        self.decay = lightning_log_decay(sizes.heads, layer_idx=12, num_layers=24, device=device)
        self.constants = {"g_gamma": self.decay}

    def prefill(self, inputs, state, out, backend):
        from cula.lightning import lightning_prefill

        return lightning_prefill(*inputs, self.decay, state=state, out=out, backend=backend)

    def decode(self, inputs, state, out, backend):
        from cula.decode import lightning_decode

        return lightning_decode(*inputs, self.decay, state, out=out, backend=backend)

    def exact(self, inputs):
        from cula.common.recurrence import lightning_steps

        scale = self.sizes.dim**-0.5
        o, state = lightning_steps(*inputs, self.decay, None, scale, dtype=torch.float64)
        return o, state.mT


MODELS = (KdaModel, LightningModel)
