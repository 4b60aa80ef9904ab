"""A serving engine's calls, on ours: no gather, no scatter, no transposed copy.

Each class holds an engine's tensors the way that engine does (names, shapes, strides, what an index
means) and the few lines that hand them over. Every tensor of more than a number a sequence that
reaches our call has to be the engine's own memory, and every state has to end up where the engine
looks for it. On a machine with a GPU these run there, on kernels where there are.
"""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from cula.common import testing
from cula.common.dims import dims_of
from cula.common.kernel_args import loadable_states
from cula.common.recurrence import (
    kda_log_decay,
    kda_steps,
    l2_normalise,
    lightning_steps,
)
from cula.decode import kda_decode, kernel_plan, lightning_decode
from cula.decode.call import States
from cula.kda import kda_prefill
from cula.lightning import lightning_prefill

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
H, HV, K, V, SLOTS = 2, 2, 64, 64, 9
GATE = {"use_beta_sigmoid_in_kernel": True, "lower_bound": -5.0}


@pytest.fixture(autouse=True)
def default_device():
    torch.set_default_device(DEVICE)
    yield
    torch.set_default_device(None)


def assert_close(name, x, right, tolerance):
    """On a GPU float32 may go through TensorFloat-32, in a fallback."""
    testing.assert_close(name, x, right, tolerance if DEVICE == "cpu" else max(tolerance, 5e-3))


class Engine:
    """A layer's cache and one step's tensors. Slots lie apart: convolution states between them."""

    def __init__(self, tokens, *, v_first=True, dtype=torch.float32, seed=0):
        torch.manual_seed(seed)
        width = 2 * H * K + HV * V
        # q, k and v of a token are neighbours: what a fused projection and convolution leave.
        self.mixed_qkv = torch.randn(tokens, width)
        self.raw_g, self.raw_beta = torch.randn(tokens, HV * K), torch.randn(tokens, HV)
        self.A_log, self.dt_bias = torch.randn(HV), torch.randn(HV * K)
        matrix = HV * V * K
        page = torch.randn(SLOTS, matrix + 256).to(dtype)
        shape = (SLOTS, HV, V, K) if v_first else (SLOTS, HV, K, V)
        self.cache = page.as_strided(
            shape, (page.stride(0), *page[0, :matrix].view(shape[1:]).stride())
        )
        self.before = self.cache.clone()

    def qkv(self, *lead):
        """q, k, v as views [*lead, heads, channels] of the packed projection."""
        q, k, v = self.mixed_qkv.split((H * K, H * K, HV * V), dim=-1)
        return q.view(*lead, H, K), k.view(*lead, H, K), v.view(*lead, HV, V)

    def gates(self, *lead):
        return self.raw_g.view(*lead, HV, K), self.raw_beta.view(*lead, HV)

    def owns(self, *tensors):
        """Whether these are the engine's own memory."""
        mine = {
            x.untyped_storage().data_ptr()
            for x in (self.mixed_qkv, self.raw_g, self.raw_beta, self.cache)
        }
        return all(x.untyped_storage().data_ptr() in mine for x in tensors)

    def kda(self, rows, state):
        """The recurrence in float64 over some tokens: outputs [n, HV, V] and K-first states."""
        q, k, v = (x[rows].double() for x in self.qkv(len(self.mixed_qkv)))
        g, beta = (x[rows].double() for x in self.gates(len(self.mixed_qkv)))
        g = kda_log_decay(
            g, A_log=self.A_log.double(), dt_bias=self.dt_bias.double(), lower_bound=-5.0,
            dtype=torch.float64,
        )  # fmt: skip
        q, k, beta, states, outputs = l2_normalise(q), l2_normalise(k), beta.sigmoid(), [], []
        state = state.double()
        for t in range(len(q)):
            one = slice(t, t + 1)
            o, state = kda_steps(
                q[one], k[one], v[one], g[one], beta[one], state, K**-0.5, dtype=torch.float64
            )
            outputs.append(o)
            states.append(state)
        return torch.cat(outputs), states


def kernel_takes(states, q, k, v, out, monkeypatch):
    """Whether our decode kernel reads and writes states where they lie."""
    monkeypatch.setattr(kernel_plan, "arch_of", lambda device: "sm_90a")
    monkeypatch.setattr(kernel_plan, "missing_compiler", lambda: None)
    reason = kernel_plan.no_kernel(dims_of(q, k, v), states, torch.device("cuda"))
    assert reason is None, reason
    assert all(x.stride(-1) == 1 for x in (q, k, v, out))  # otherwise they would be copied
    return True


def unchanged_but(engine, slots):
    others = [s for s in range(SLOTS) if s not in slots]
    return torch.equal(engine.cache[others], engine.before[others])


# --- SGLang: pool [slots, HV, V, K], int32 indices, -1 pads, tokens in [1, T, heads, channels] ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sglang_decode(dtype, monkeypatch):
    """LinearAttnKernelBase.decode, and packed_decode, whose mixed_qkv is taken as it is."""
    e = Engine(4, dtype=dtype)
    cache_indices = torch.tensor([5, -1, 0, 8], dtype=torch.int32)
    q, k, v = e.qkv(4, 1)  # the engine's [1, 4, heads, channels] is x.transpose(0, 1)
    g, beta = e.gates(4, 1)
    assert torch.equal(e.qkv(1, 4)[0].transpose(0, 1), q)
    out = torch.empty(4, 1, HV, V)
    assert e.owns(q, k, v, g, beta, e.cache)
    assert kernel_takes(States(e.cache, True, indices=cache_indices), q, k, v, out, monkeypatch)
    kda_decode(
        q, k, v, g, beta, e.cache, state_indices=cache_indices, A_log=e.A_log, dt_bias=e.dt_bias,
        out=out, **GATE,
    )  # fmt: skip
    tolerance = 1e-5 if dtype == torch.float32 else 3e-3
    for n, slot in enumerate(cache_indices.tolist()):
        if slot < 0:
            assert out[n].eq(0).all()
            continue
        o, states = e.kda(slice(n, n + 1), e.before[slot].mT)
        assert_close("o", out[n], o, tolerance)
        assert_close("state", e.cache[slot].mT, states[-1], tolerance)
    assert unchanged_but(e, [5, 0, 8])


def test_sglang_extend_with_radix_states():
    """extend: mixed lengths, one request anew, states for the radix cache every 64 tokens."""
    lengths, cache_indices = [70, 1, 130], torch.tensor([4, 2, 7], dtype=torch.int32)
    e = Engine(sum(lengths))
    query_start_loc = torch.tensor([0, 70, 71, 201], dtype=torch.int32)
    has_initial_state = torch.tensor([True, True, False])
    track = torch.full((sum(lengths) // 64, HV, V, K), torch.nan)
    q, k, v = e.qkv(1, -1)
    g, beta = e.gates(1, -1)
    assert e.owns(q, k, v, g, beta, e.cache)
    o = kda_prefill(
        q, k, v, g, beta, state=e.cache, state_indices=cache_indices,
        has_initial_state=has_initial_state, cu_seqlens=query_start_loc, A_log=e.A_log,
        dt_bias=e.dt_bias, checkpoints=track, checkpoint_interval=64, **GATE,
    )  # fmt: skip
    for n, (start, end) in enumerate(pairwise(query_start_loc.tolist())):
        slot = int(cache_indices[n])
        first = e.before[slot].mT * bool(has_initial_state[n])
        right, states = e.kda(slice(start, end), first)
        assert_close("o", o[0, start:end], right, 1e-4)
        assert_close("state", e.cache[slot].mT, states[-1], 1e-4)
        for i in range(1, (end - start) // 64 + 1):
            assert_close("track", track[start // 64 + i - 1].mT, states[64 * i - 1], 1e-4)
    assert unchanged_but(e, [4, 2, 7])


def test_sglang_target_verify(monkeypatch):
    """target_verify: a chain of drafts; states stay, and each token's goes to the step's buffer."""
    N, steps = 3, 4
    e = Engine(N * steps)
    cache_indices = torch.tensor([6, 1, -1], dtype=torch.int32)
    # [requests, cache_steps, HV, V, K], of which the step uses the first N
    # (intermediate_state_indices is 0 .. N - 1) and as many steps as there are drafts.
    intermediate = torch.full((8, 6, HV, V, K), torch.nan)
    q, k, v = e.qkv(N, steps)
    g, beta = e.gates(N, steps)
    states = intermediate[:N, :steps]
    assert states.untyped_storage().data_ptr() == intermediate.untyped_storage().data_ptr()
    assert kernel_takes(
        States(e.cache, False, indices=cache_indices, tokens=states), q, k, v, v, monkeypatch
    )
    o = kda_decode(
        q, k, v, g, beta, e.cache, state_indices=cache_indices, update_state=False,
        token_states=states, A_log=e.A_log, dt_bias=e.dt_bias, **GATE,
    )  # fmt: skip
    assert torch.equal(e.cache, e.before)
    for n in range(2):
        right, each = e.kda(slice(n * steps, (n + 1) * steps), e.before[int(cache_indices[n])].mT)
        assert_close("o", o[n], right, 1e-5)
        for t in range(steps):
            assert_close("step", intermediate[n, t].mT, each[t], 1e-5)
    assert (
        o[2].eq(0).all()
        and intermediate[2:].isnan().all()
        and intermediate[:, steps:].isnan().all()
    )


# --- vLLM: slot 0 is the null block, the rest as above; tokens in [1, T, heads, channels] ---------


def without_null(e, indices):
    """vLLM's slot 0 names no state. Its pool without slot 0 is a view, and then -1 names none."""
    return e.cache[1:], indices - 1


def test_vllm_mixed_batch(monkeypatch):
    """Decodes before prefills, as vLLM orders them; each its own call, on slices."""
    e = Engine(3 + 80)
    indices = torch.tensor([3, 0, 8, 5, 2], dtype=torch.int32)  # 0: a padding row of the graph
    starts = torch.tensor([0, 1, 2, 3, 3 + 66, 3 + 80], dtype=torch.int32)
    has_initial_state = torch.tensor([True, False])
    pool, slots = without_null(e, indices)
    q, k, v = e.qkv(1, -1)
    g, beta = e.gates(1, -1)
    out = torch.empty(1, 83, HV, V)
    decode = [x[:, :3].transpose(0, 1) for x in (q, k, v, g, beta)]
    assert e.owns(pool, *decode)
    assert kernel_takes(
        States(pool, True, indices=slots[:3]), *decode[:3], out[:, :3].transpose(0, 1), monkeypatch
    )
    common = {"A_log": e.A_log, "dt_bias": e.dt_bias, **GATE}
    kda_decode(*decode, pool, state_indices=slots[:3], out=out[:, :3].transpose(0, 1), **common)
    kda_prefill(
        *(x[:, 3:] for x in (q, k, v, g, beta)), state=pool, state_indices=slots[3:],
        has_initial_state=has_initial_state, cu_seqlens=starts[3:] - 3, out=out[:, 3:], **common,
    )  # fmt: skip
    for n, (start, end) in enumerate(pairwise(starts.tolist())):
        slot = int(indices[n])
        if slot == 0:
            assert out[0, start:end].eq(0).all()
            continue
        fresh = n >= 3 and not has_initial_state[n - 3]
        right, states = e.kda(slice(start, end), e.before[slot].mT * (not fresh))
        assert_close("o", out[0, start:end], right, 1e-4)
        assert_close("state", e.cache[slot].mT, states[-1], 1e-4)
    assert unchanged_but(e, [3, 8, 5, 2])


def test_vllm_speculative_decode(monkeypatch):
    """spec_state_indices_tensor [n, 1 + S]: every token's state has a slot."""
    e = Engine(5)
    spec_query_start_loc = torch.tensor([0, 3, 5], dtype=torch.int32)  # 3 and 2 tokens
    spec_indices = torch.tensor([[1, 2, 3], [6, 7, 0]], dtype=torch.int32)
    num_accepted_tokens = torch.tensor([2, 1], dtype=torch.int32)
    pool, slots = without_null(e, spec_indices)
    q, k, v = e.qkv(1, -1)
    g, beta = e.gates(1, -1)
    states = States(
        pool, True, None, slots, accepted=num_accepted_tokens, cu_seqlens=spec_query_start_loc
    )
    assert kernel_takes(states, q, k, v, v, monkeypatch)
    o = kda_decode(
        q, k, v, g, beta, pool, state_indices=slots, cu_seqlens=spec_query_start_loc,
        num_accepted_tokens=num_accepted_tokens, A_log=e.A_log, dt_bias=e.dt_bias, **GATE,
    )  # fmt: skip
    for n, (start, end) in enumerate(pairwise(spec_query_start_loc.tolist())):
        first = int(spec_indices[n, num_accepted_tokens[n] - 1])
        right, each = e.kda(slice(start, end), e.before[first].mT)
        assert_close("o", o[0, start:end], right, 1e-5)
        for i, state in enumerate(each):
            assert_close("state", e.cache[int(spec_indices[n, i])].mT, state, 1e-5)
    assert unchanged_but(e, [1, 2, 3, 6, 7])


# --- Lightning: K-first float32 states, positive slopes, scale 1 ----------------------------------


def lightning(e, rows, state, slopes):
    q, k, v = (x[rows].double() for x in e.qkv(len(e.mixed_qkv)))
    return lightning_steps(q, k, v, -slopes.double(), state.double(), 1.0, dtype=torch.float64)


def test_vllm_lightning(monkeypatch):
    """linear_decode_forward_triton(q, k, v, kv_cache, slope_rate, slot_id, 32); prefill."""
    e = Engine(3 + 70, v_first=False)
    slope_rate = torch.tensor([0.5, 0.03]).view(HV, 1, 1)
    g_gamma = -slope_rate.view(-1)  # once, when the model is loaded
    slot_id = torch.tensor([4, -1, 0], dtype=torch.int64)
    pool = e.cache.mT  # a view: V-first by shape, K-first in memory
    # The engine's decode has q, k, v as [B, H, 1, D]: its transpose(1, 2).
    decode = [x[:3].unsqueeze(2).transpose(1, 2) for x in e.qkv(73)]
    assert decode[0].shape == (3, 1, H, K) and e.owns(pool, *decode)
    assert kernel_takes(States(pool, True, indices=slot_id), *decode, decode[2], monkeypatch)
    o = lightning_decode(*decode, g_gamma, pool, state_indices=slot_id, scale=1.0)
    assert o.view(3, HV * V).shape == (3, HV * V)  # what the engine returns
    assert o[1].eq(0).all()
    # Prefill: one call for all requests, in place of a loop that reads slots on the host.
    slots, starts = torch.tensor([7, 2]), torch.tensor([0, 6, 70], dtype=torch.int32)
    prefill = [x[None, 3:] for x in e.qkv(73)]
    assert e.owns(*prefill) and loadable_states(pool)
    p = lightning_prefill(
        *prefill, g_gamma, state=pool, state_indices=slots, cu_seqlens=starts, scale=1.0,
        has_initial_state=torch.tensor([False, True]),
    )  # fmt: skip
    for got, slot, rows, used in (
        (o[0], 4, slice(0, 1), 1),
        (o[2], 0, slice(2, 3), 1),
        (p[0, :6], 7, slice(3, 9), 0),
        (p[0, 6:], 2, slice(9, 73), 1),
    ):
        right, final = lightning(e, rows, e.before[slot] * used, slope_rate.view(-1))
        assert_close("o", got, right, 1e-4)
        assert_close("state", e.cache[slot], final, 1e-4)
    assert unchanged_but(e, [4, 0, 7, 2])


def test_sglang_seg_la():
    """seg_la_fwd(q, k, v, s, decay_scales, meta): lengths and slots per segment, -1 skips."""
    e = Engine(12, v_first=False)
    decay_scales = torch.tensor([0.7, 0.1])
    meta = SimpleNamespace(
        q_offsets=torch.tensor([0, 5, 6, 12], dtype=torch.int32),
        s_offsets=torch.tensor([3, -1, 8], dtype=torch.int32),
        s_scales=torch.tensor([0.0, 1.0, 1.0]),  # 0: the segment starts anew
    )
    q, k, v = (x[None] for x in e.qkv(12))
    o = lightning_prefill(
        q, k, v, -decay_scales, state=e.cache.mT, state_indices=meta.s_offsets,
        has_initial_state=meta.s_scales.bool(), cu_seqlens=meta.q_offsets, scale=1.0,
    )  # fmt: skip
    for rows, slot, used in ((slice(0, 5), 3, 0), (slice(6, 12), 8, 1)):
        right, final = lightning(e, rows, e.before[slot] * used, decay_scales)
        assert_close("o", o[0, rows], right, 1e-5)
        assert_close("state", e.cache[slot], final, 1e-5)
    assert unchanged_but(e, [3, 8])


# --- CUDA graphs ----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_a_decode_step_captured_and_replayed():
    """As engines decode: captured once for a padded batch, replayed on other slots."""
    e = Engine(4)
    indices = torch.tensor([3, 5, 0, 0], dtype=torch.int32)
    pool, slots = e.cache[1:], torch.empty_like(indices)
    tokens = [*e.qkv(4, 1), *e.gates(4, 1)]
    out = torch.empty(4, 1, HV, V)

    def step():
        torch.sub(indices, 1, out=slots)
        kda_decode(
            *tokens, pool, state_indices=slots, out=out, A_log=e.A_log, dt_bias=e.dt_bias, **GATE
        )

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    e.cache.copy_(e.before)
    indices.copy_(torch.tensor([8, 0, 2, 0], dtype=torch.int32))
    graph.replay()
    torch.cuda.synchronize()
    for n, slot in ((0, 8), (2, 2)):
        o, states = e.kda(slice(n, n + 1), e.before[slot].mT)
        assert_close("o", out[n], o, 1e-5)
        assert_close("state", e.cache[slot].mT, states[-1], 1e-5)
    assert out[1].eq(0).all() and out[3].eq(0).all()
    assert unchanged_but(e, [8, 2])
