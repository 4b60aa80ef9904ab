"""Lightning Attention by flash-linear-attention, 0.4.2 to 0.6, where no kernel of ours applies.

FLA's simple GLA with a decay per head is the same recurrence; it takes any such decay, where FLA's
`chunk_lightning_attn` has its formula built in. States are K-first float32 throughout.
"""

import inspect
from typing import Any

import torch

from cula.common.dims import Dims
from cula.common.fla import fla_function, fla_missing
from cula.common.ragged import Scan, scan, sequences_of
from cula.lightning.reference import LightningForm, LightningInputs

CHUNK_SIMPLE_GLA = "fla.ops.simple_gla.chunk_simple_gla"
RECURRENT_SIMPLE_GLA = "fla.ops.simple_gla.fused_recurrent_simple_gla"
CHUNK = 64  # FLA's tile is this or divides it
MAX_GRID = 65535  # FLA launches a grid row per (sequence, head)


def missing(dims: Dims, sequences: int) -> str | None:
    """Why FLA cannot run a call of this size, or None."""
    if max(sequences, dims.B) * dims.HV > MAX_GRID:
        return f"{sequences} sequences x {dims.HV} heads are more than FLA's {MAX_GRID} grid rows"
    return fla_missing()


def chunk(
    form: LightningForm,
    inputs: LightningInputs,
    initial: torch.Tensor | None,
    *,
    output_final_state: bool = True,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    chunk_size: int | None = None,
) -> tuple[torch.Tensor, Any]:
    """FLA's `chunk_simple_gla`, differentiable: (o, K-first final state or None).

    FLA has no grouped value heads here, so q and k are repeated for them. `chunk_size` only sets
    FLA's tile; versions that choose it themselves do not get it.

    A final state after a partial chunk comes from FLA's recurrent kernel, which is slower: its
    chunked one weighs rows past a sequence's end by a growing power of the decay before it masks
    them, and where that overflows (g_gamma below about -1.4) the state is nan.
    """
    q, k, v, g_gamma = inputs
    if v.shape[2] != q.shape[2]:
        q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    if output_final_state and (cu_seqlens is not None or v.shape[1] % CHUNK):
        return fla_function(RECURRENT_SIMPLE_GLA)(
            q,
            k,
            v,
            g_gamma=g_gamma,
            scale=form.scale,
            initial_state=initial,
            output_final_state=True,
            cu_seqlens=cu_seqlens,
        )
    function = fla_function(CHUNK_SIMPLE_GLA)
    parameters = inspect.signature(function).parameters.values()
    options = {}
    # 0.4.2 names all its keywords, and chunk_size is not among them.
    if chunk_size is not None and any(p.kind is p.VAR_KEYWORD for p in parameters):
        options["chunk_size"] = chunk_size
    return function(
        q,
        k,
        v,
        g_gamma=g_gamma,
        scale=form.scale,
        initial_state=initial,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        **options,
    )


def forward(
    form: LightningForm,
    inputs: LightningInputs,
    initial: torch.Tensor | None,
    *,
    cu_seqlens: torch.Tensor | None = None,
    every: int | None = None,
) -> Scan:
    """As `reference.lightning_forward`, by FLA.

    With `every` it waits for the GPU and launches FLA for every interval: by itself, FLA returns no
    states along the way.
    """
    if every is None:
        o, final = chunk(form, inputs, initial, cu_seqlens=cu_seqlens)
        return Scan(o.flatten(0, 1), final)
    q, k, v, g_gamma = inputs
    sequences = sequences_of(*v.shape[:2], cu_seqlens)
    if initial is None:
        shape = (len(sequences), v.shape[2], q.shape[3], v.shape[3])
        initial = v.new_zeros(shape, dtype=torch.float32)
    return scan(
        sequences,
        lambda x, state: chunk(form, LightningInputs(*x, g_gamma), state),
        [x.flatten(0, 1) for x in (q, k, v)],
        initial,
        o_shape=v.shape[2:],
        every=every,
    )
