"""What is known of a decode kernel when it is compiled. Does not import cutlass."""

from dataclasses import dataclass

STAGE = 4  # tokens staged in shared memory at a time when a step has several


@dataclass(frozen=True)
class DecodeConfig:
    """The compile key. Dtypes are "bf16", "fp16", "fp32", "int32", "int64", or None for an argument
    that is absent.

    K, V             channels of a key (a multiple of 32) and of a value (of the block's rows)
    warps, v_per_thread, lanes
                     a block's share of a head's state (tile.py)
    io               dtype of q, k, v and the output
    state, v_first   the states' dtype and layout
    single           one token per sequence, dense; else their number is a run-time value
    reads            whether there is an initial state
    writes           where the final state goes: "none", "in_place" or "separate"
    state_indices    dtype of the slots' names, [N] or, if slot_per_token, [N, tokens]; absent:
                     sequence n has slot n
    token_states     the state after every token is stored
    pdl              programmatic dependent launch (sm_90 and later)
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
    """Adds Kimi Delta Attention's inputs.

    gate             "given", "softplus", "bounded" or "sigmoid" (bounded without A_log)
    g, A_log, dt_bias, beta_dtype
                     dtypes
    flat_bias        dt_bias is [HV * K], not [HV, K]
    beta             "given", "sigmoid" or "sigmoid2" (doubled)
    l2norm           q and k are normalised in the kernel
    """

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
    """Nothing to add: the decay is a float32 per head."""

    def kernel(self):
        from cula.decode.kernels.lightning import LightningDecode

        return LightningDecode(self)
