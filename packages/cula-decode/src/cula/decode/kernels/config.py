"""What is known of a decode kernel when it is compiled. No import of cutlass: a cached kernel needs none."""

from dataclasses import dataclass

STAGE = 4  # tokens staged in shared memory at a time when a step has several


@dataclass(frozen=True)
class DecodeConfig:
    """The compile key. Dtypes: "bf16", "fp16", "fp32", "int32", "int64"; None for an argument that is absent.

    K, V: channels of a key (a multiple of 32) and of a value (a multiple of 4 * v_per_thread * warps).
    warps, v_per_thread: a block's share of a head's state (tile.py). io: dtype of q, k, v and the output.
    single: one token per sequence, dense; else the number of tokens is a run-time value.
    reads, writes: whether there is an initial state; where the final one goes: "none", "in_place" or "separate".
    state_indices: dtype of the slot names, [N] or, if `slot_per_token`, [N, tokens]; absent: sequence n has slot n.
    pdl: launched with programmatic dependent launch (sm_90 and later).
    """

    K: int
    V: int
    warps: int
    v_per_thread: int
    lanes: int
    io: str
    state: str
    v_first: bool
    single: bool
    reads: bool
    writes: str
    state_indices: str | None
    slot_per_token: bool
    num_accepted_tokens: str | None
    cu_seqlens: str | None
    token_states: bool
    pdl: bool


@dataclass(frozen=True)
class KdaDecodeConfig(DecodeConfig):
    """gate: "given", "softplus", "bounded" or "sigmoid" (bounded without A_log); beta: "given", "sigmoid" or "sigmoid2".
    g, A_log, dt_bias, beta_dtype: dtypes; flat_bias: dt_bias is [HV * K]. l2norm: q and k are normalised in the kernel."""

    gate: str
    g: str
    A_log: str | None
    dt_bias: str | None
    flat_bias: bool
    beta: str
    beta_dtype: str
    l2norm: bool

    def kernel(self):
        from cula.decode.kernels.kda import KdaDecode

        return KdaDecode(self)


@dataclass(frozen=True)
class LightningDecodeConfig(DecodeConfig):
    def kernel(self):
        from cula.decode.kernels.lightning import LightningDecode

        return LightningDecode(self)
