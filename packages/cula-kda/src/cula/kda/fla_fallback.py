"""Kimi Delta Attention by flash-linear-attention, 0.4.2 to 0.6, where no kernel of ours applies.

What an older version does not know is done here instead: grouped value heads, the sigmoid of beta,
the gate without A_log. States are K-first float32 throughout.
"""

import inspect
from contextlib import nullcontext

import torch

from cula.common.dims import Dims
from cula.common.fla import fla_function, fla_missing
from cula.common.gates import apply_beta
from cula.common.ragged import Scan, scan, sequences_of
from cula.kda.reference import KdaForm, KdaInputs

CHUNK_KDA = "fla.ops.kda.chunk_kda"
MAX_KEY_DIM = 256
MAX_GRID = 65535  # FLA launches a grid row per (sequence, value head)


def missing(dims: Dims, sequences: int) -> str | None:
    """Why FLA cannot run a call of this size, or None."""
    if dims.K > MAX_KEY_DIM:
        return f"K = {dims.K}, and FLA's chunk_kda takes at most {MAX_KEY_DIM}"
    if max(sequences, dims.B) * dims.HV > MAX_GRID:
        return f"{sequences} sequences x {dims.HV} heads are more than FLA's {MAX_GRID} grid rows"
    return fla_missing()


def chunk(
    form: KdaForm,
    inputs: KdaInputs,
    initial: torch.Tensor | None,
    *,
    safe_gate: bool,
    **options: object,
) -> tuple[torch.Tensor, ...]:
    """FLA's `chunk_kda`, differentiable: (o, K-first final state) and, if asked for, h.

    Args:
        initial: K-first float32 states, or None.
        safe_gate: whether the log decay is at least -5 everywhere.
        options: further keywords of FLA's; those left at None are not passed on.

    Raises:
        NotImplementedError: the installed FLA lacks a keyword that was set.
    """
    function = fla_function(CHUNK_KDA)
    known = inspect.signature(function).parameters
    # 0.5.1 brought state_v_first, and with it all of grouped value heads and chunk_size.
    recent = "state_v_first" in known
    q, k, v, g, beta, A_log, dt_bias = inputs
    if v.shape[2] != q.shape[2] and not recent:
        q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    if form.beta != "given" and "use_beta_sigmoid_in_kernel" in known:
        options["use_beta_sigmoid_in_kernel"] = True
        options["allow_neg_eigval"] = form.beta == "sigmoid2"
    else:
        beta = apply_beta(form.beta, beta)
    if form.gate.form in ("softplus", "bounded"):
        bias = None if dt_bias is None else dt_bias.flatten()
        options.update(use_gate_in_kernel=True, A_log=A_log, dt_bias=bias)
        options["lower_bound"] = form.gate.lower_bound
    else:
        g = form.gate.log_decay(g, A_log, dt_bias)
    for name, value in list(options.items()):
        if value is None:
            del options[name]
        elif name not in known and not (recent and name == "chunk_size") and not _is_gate(name):
            raise NotImplementedError(f"{name}: {value}; the installed FLA's chunk_kda lacks it")
    # FLA insists on this mode for h, and a compiled call is not in it.
    inference = "return_intermediate_states" in options
    with torch.inference_mode() if inference else nullcontext():
        return function(
            q,
            k,
            v,
            g,
            beta,
            scale=form.scale,
            initial_state=initial,
            use_qk_l2norm_in_kernel=form.l2norm,
            safe_gate=safe_gate,
            **options,
        )


def _is_gate(name: str) -> bool:
    """Whether FLA takes this keyword without naming it in its signature."""
    return name in ("A_log", "dt_bias")


def forward(
    form: KdaForm,
    inputs: KdaInputs,
    initial: torch.Tensor | None,
    *,
    cu_seqlens: torch.Tensor | None = None,
    every: int | None = None,
) -> Scan:
    """As `reference.kda_forward`, by FLA.

    With `every` it waits for the GPU and launches FLA for every interval: by itself, FLA keeps
    states along the way in the inputs' dtype only.
    """
    batch, tokens = inputs.v.shape[:2]
    bounded = form.gate.lower_bound is not None
    if every is None:
        o, final = chunk(
            form,
            inputs,
            initial,
            safe_gate=bounded,
            output_final_state=True,
            cu_seqlens=cu_seqlens,
        )
        return Scan(o.flatten(0, 1), final)

    def step(x: list[torch.Tensor], state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        part = KdaInputs(*x, inputs.A_log, inputs.dt_bias)
        o, final = chunk(form, part, state, safe_gate=bounded, output_final_state=True)
        return o, final

    sequences = sequences_of(batch, tokens, cu_seqlens)
    shape = inputs.v.shape[2:]
    if initial is None:
        K = inputs.q.shape[-1]
        initial = inputs.q.new_zeros((len(sequences), shape[0], K, shape[1]), dtype=torch.float32)
    flat = [x.flatten(0, 1) for x in inputs[:5]]
    return scan(sequences, step, flat, initial, o_shape=shape, every=every)
