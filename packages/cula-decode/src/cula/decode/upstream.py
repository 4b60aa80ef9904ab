"""The decode calls of upstream cuLA (inclusionAI/cuLA), as thin adapters.

For code written against that package: same arguments and defaults, on `cula.decode.kda_decode` and
`cula.decode.lightning_decode`. What differs, and why:

- Any GPU or CPU, any head dimensions, bfloat16 pools, strided inputs, slots with padding between
  them; nothing is compiled anew for another batch or pool size.
- A slot index that is negative or out of range names no slot, and its output row is zero; upstream
  leaves it unwritten.
- A state of the wrong layout is refused wherever its shape tells; upstream's K = V = 128 hides it.
- `cu_seqlens` is honoured: packed sequences may have several tokens. Upstream ignores it.
- `linear_attention_decode` honours `s_offsets`; upstream takes state b for sequence b.
- What upstream takes without looking at it is refused where it would change the result.
"""

import torch

from cula.common.checks import (
    INDEX_DTYPES,
    readable,
    require,
    require_cu_seqlens,
    require_flags,
    require_number,
    require_tensor,
)
from cula.common.layouts import STATE_DTYPES, to_v_first
from cula.decode import op

SOFTPLUS_THRESHOLD = 20.0  # beyond it log(1 + e^x) is x in float32


def kda_decode(
    A_log: torch.Tensor,
    dt_bias: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor | None,
    initial_state_indices: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    out: torch.Tensor | None = None,
    state_layout: str = "vk",
) -> torch.Tensor:
    """Upstream's one-token step of Kimi Delta Attention with the softplus gate.

    Args:
        A_log: ``[HV]``. dt_bias: ``[HV, K]``, ``[HV * K]`` or None. The log decay (natural
            logarithm) is ``-e^A_log softplus(a + dt_bias)``.
        q, k, v: one token a sequence, ``[N, 1, H, K]`` and ``[N, 1, HV, V]``, or packed
            ``[1, N, ...]``; with `cu_seqlens` packed sequences of any lengths.
        a: raw gates ``[N, 1, HV, K]``, packed ``[1, N, HV, K]`` or ``[N, HV, K]``; the last two
            dimensions may be one of HV * K.
        b: logits of beta, ``[N, 1, HV]``, packed ``[1, N, HV]`` or ``[N, HV]``.
        initial_state_source: the pool, ``[slots, HV, V, K]``, or with ``state_layout="kv"``
            ``[slots, HV, K, V]``; float32 or bfloat16; updated in place. None: sequences start
            from zero and their final states are dropped.
        initial_state_indices: ``[N]``, int32 or int64: each sequence's slot; None: its number.
        cu_seqlens: ``[N + 1]``, int32 or int64.
        scale: the factor on the output, ``K ** -0.5`` by default.
        use_qk_l2norm_in_kernel: normalise q and k.
        softplus_beta, softplus_threshold: 1, and at least 20: the softplus itself.
        out: of v's shape and dtype, to write into.
        state_layout: "vk" or "kv".

    Returns:
        o, of v's shape and dtype: ``out`` if given.

    Raises:
        NotImplementedError: another softplus.
        TypeError, ValueError: as `cula.decode.kda_decode`.
    """
    require(
        softplus_beta == 1.0,
        "softplus_beta",
        softplus_beta,
        "only 1 is supported",
        NotImplementedError,
    )
    require_number("softplus_threshold", softplus_threshold)
    require(
        softplus_threshold >= SOFTPLUS_THRESHOLD,
        "softplus_threshold",
        softplus_threshold,
        f"must be at least {SOFTPLUS_THRESHOLD:g}: a lower one would change the gate",
        NotImplementedError,
    )
    require(
        state_layout in ("vk", "kv"), "state_layout", repr(state_layout), "must be 'vk' or 'kv'"
    )
    for arg, x in (("q", q), ("k", k), ("v", v)):
        require_tensor(arg, x, shape=[None] * 4, dims="[N, 1, heads, channels] or [1, N, ..]")
    B, T, HV, V = v.shape
    K = k.shape[3]
    require(
        B == 1 or T == 1,
        "v",
        f"shape {list(v.shape)}",
        "must be [N, 1, HV, V] or [1, N, HV, V]; cula.decode.kda_decode takes several tokens",
    )
    a = _tokens_of("a", a, (B, T), [(HV, K), (HV * K,)])
    b = _tokens_of("b", b, (B, T), [(HV,)])
    if out is None:
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
    require_tensor("out", out, shape=v.shape, dims="v's", dtypes=(v.dtype,), device=v.device)
    tokens = (q, k, v, a, b, out)
    if cu_seqlens is None and B == 1 and T > 1:  # packed, one token each: no copy
        tokens = tuple(x.transpose(0, 1) for x in tokens)
    N = tokens[2].shape[0]
    if cu_seqlens is not None:
        N = require_cu_seqlens(cu_seqlens, batch=B, tokens=T, device=v.device)
    state, indices = initial_state_source, initial_state_indices
    if indices is not None:
        _require_slots("initial_state_indices", indices, N, v.device)
    keep = state is not None
    if state is None:
        state = v.new_zeros((N, HV, V, K), dtype=torch.float32)
        if indices is not None:  # a negative one still means no output
            own = torch.arange(N, dtype=indices.dtype, device=indices.device)
            indices = torch.where(indices < 0, indices, own)
    else:
        dims, matrix = ("[slots, HV, V, K]", (V, K))
        if state_layout == "kv":
            dims, matrix = "[slots, HV, K, V]", (K, V)
        require_tensor(
            "initial_state_source",
            state,
            shape=(None, HV, *matrix),
            dims=dims,
            dtypes=STATE_DTYPES,
            device=q.device,
        )
        if state_layout == "kv":
            state = to_v_first(state)
    *inputs, target = tokens
    op.kda_decode(
        *inputs,
        state,
        state_indices=indices,
        cu_seqlens=cu_seqlens,
        update_state=keep,
        A_log=A_log,
        dt_bias=dt_bias,
        scale=scale,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=True,
        out=target,
    )
    return out


def fused_sigmoid_gating_delta_rule_update(
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor | None,
    softplus_beta: float,
    softplus_threshold: float,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor | None,
    initial_state_indices: torch.Tensor | None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    is_kda: bool = False,
    out: torch.Tensor | None = None,
    state_layout: str = "vk",
) -> torch.Tensor:
    """SGLang's name and order of arguments for `kda_decode`, without the norm by default.

    Args:
        is_kda: must be True: there is no gated delta rule with one gate per head here.

    Raises:
        NotImplementedError: `is_kda` is False, and as `kda_decode`.
        TypeError, ValueError: as `kda_decode`.
    """
    if is_kda and is_kda is not True:
        require_flags(is_kda=is_kda)
    require(is_kda, "is_kda", is_kda, "only KDA, is_kda=True, is supported", NotImplementedError)
    return kda_decode(
        A_log,
        dt_bias,
        q,
        k,
        v,
        a,
        b,
        initial_state_source,
        initial_state_indices,
        cu_seqlens=cu_seqlens,
        scale=scale,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        softplus_beta=softplus_beta,
        softplus_threshold=softplus_threshold,
        out=out,
        state_layout=state_layout,
    )


def linear_attention_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    s: torch.Tensor,
    out: torch.Tensor,
    softmax_scale: float,
    stride_q: int,
    stride_k: int,
    stride_v: int,
    stride_s: int,
    stride_o: int,
    s_offsets: torch.Tensor | None,
    decay_scales: torch.Tensor,
    HEAD_DIM: int,
    K_SPLIT_DIM: int,
    V_SPLIT_DIM: int,
) -> None:
    """Upstream's one-token step of Lightning Attention, into ``out`` and the states.

    Args:
        q, k, v, out: ``[B, H, D]``.
        s: the states, V-first: the pool ``[slots * H, V, K]`` (heads of a slot together) or
            ``[slots, H, V, K]``; float32 or bfloat16; updated in place.
        softmax_scale: the factor on the output.
        stride_q, stride_k, stride_v, stride_s, stride_o: have no effect; the tensors' own strides
            count.
        s_offsets: ``[B]``, int32 or int64: each sequence's slot; None: its number.
        decay_scales: ``[H]``, float32, at least 0: the state decays by ``exp(-decay)`` a token.
        HEAD_DIM: D.
        K_SPLIT_DIM, V_SPLIT_DIM: upstream's tiles; have no effect.

    Raises:
        TypeError, ValueError: as `cula.decode.lightning_decode`.
    """
    for arg, x in (("q", q), ("k", k), ("v", v), ("out", out)):
        require_tensor(arg, x, shape=[None] * 3, dims="[B, H, D]")
    require(q.shape[2] == HEAD_DIM, "HEAD_DIM", HEAD_DIM, f"must be q's last size, {q.shape[2]}")
    heads, matrix = v.shape[1], (v.shape[2], q.shape[2])
    require_tensor(
        "decay_scales", decay_scales, shape=(heads,), dims="[H]", dtypes=(torch.float32,)
    )
    if decay_scales.device.type == "cpu" and heads and readable(decay_scales):
        smallest = decay_scales.min().item()
        require(smallest >= 0, "decay_scales", f"smallest value {smallest}", "must be at least 0")
    if s_offsets is not None:
        _require_slots("s_offsets", s_offsets, v.shape[0], v.device)
    require_tensor("s", s)
    if s.dim() == 3:
        require_tensor("s", s, shape=(None, *matrix), dims="[slots * H, V, K]")
        require(
            s.shape[0] % heads == 0,
            "s",
            f"shape {list(s.shape)}",
            f"its first size must be a multiple of the {heads} heads",
        )
        s = s.unflatten(0, (s.shape[0] // heads, heads))
    tokens = (x.unsqueeze(1) for x in (q, k, v))
    op.lightning_decode(
        *tokens,
        -decay_scales,
        s,
        state_indices=s_offsets,
        scale=softmax_scale,
        out=out.unsqueeze(1),
    )


def _require_slots(arg: str, indices: torch.Tensor, N: int, device: torch.device) -> None:
    require_tensor(arg, indices, shape=(N,), dims="[N]", dtypes=INDEX_DTYPES, device=device)


def _tokens_of(
    arg: str, x: torch.Tensor, rows: tuple[int, int], ends: list[tuple[int, ...]]
) -> torch.Tensor:
    """x as [B, T, ...]: given so, or as [B * T, ...]; `ends` are the shapes that may follow."""
    require_tensor(arg, x)
    shapes = [(*start, *end) for end in ends for start in (rows, (rows[0] * rows[1],))]
    require(
        tuple(x.shape) in shapes,
        arg,
        f"shape {list(x.shape)}",
        f"must be {' or '.join(str(list(shape)) for shape in shapes)}",
    )
    return x.reshape(*rows, *ends[0])
