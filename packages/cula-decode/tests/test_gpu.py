"""The decode calls on a GPU: accuracy, large offsets, streams, CUDA graphs, threads, long runs."""

import dataclasses
import json
import os
import subprocess
import sys
import warnings

import pytest
import torch

from cula.common import jit
from cula.common.arch import arch_of, missing_compiler
from cula.common.fla import fla_function, fla_missing
from cula.common.recurrence import (
    kda_log_decay,
    kda_steps,
    l2_normalise,
    lightning_log_decay,
    lightning_steps,
)
from cula.common.testing import assert_close, poisoned, rel_error, same_bits
from cula.decode import fused_recurrent_kda, kda_decode, lightning_decode, run
from cula.decode.cases import CASES, kernel_config, make_inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(missing_compiler() is not None, reason=str(missing_compiler())),
]

CALLS = {"kda_decode": kda_decode, "lightning_decode": lightning_decode}
EACH = pytest.mark.parametrize("call", CALLS)
PER_TOKEN = ("q", "k", "v", "g", "beta")

WARM = """
import json, sys
from cula.common import jit
from cula.decode.cases import CASES, kernel_config

arch, names = sys.argv[1], json.loads(sys.argv[2])
for name in names:
    config = kernel_config(CASES[name], arch)
    if config is not None:
        jit.compiled(config, arch)
"""


@pytest.fixture(scope="module", autouse=True)
def warm_cache():
    """Every case's kernel compiled into the disk cache, by several processes."""
    arch = arch_of(torch.device("cuda"))
    workers = max(1, min(8, (os.cpu_count() or 1) // 2))
    names = list(CASES)
    running = [
        subprocess.Popen(
            [sys.executable, "-c", WARM, arch, json.dumps(names[i::workers])],
            env={**os.environ, "CUTE_DSL_ARCH": arch},
        )
        for i in range(workers)
    ]
    assert [process.wait() for process in running] == [0] * workers


def inputs_of(call, name="one token", **changes):
    case = CASES[f"{call.split('_')[0]}: {name}"]
    return make_inputs(dataclasses.replace(case, **changes), "cuda")


def copy_of(x):
    return {name: y.clone() if torch.is_tensor(y) else y for name, y in x.items()}


def step_of(x, t, count=1):
    return {n: y[:, t : t + count] if n in PER_TOKEN else y for n, y in x.items()}


@pytest.mark.parametrize("name", CASES)
def test_case_equals_the_recurrence(oracle, name):
    case = CASES[name]
    if kernel_config(case) is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            oracle.case(case, "cuda")
    else:
        oracle.case(case, "cuda", backend="cute")


@EACH
@pytest.mark.parametrize("B", [256, 1024])
def test_large_batches_have_tiles_of_their_own(call, B):
    """A large batch equals its parts of other sizes, within rounding."""
    x = inputs_of(call, "named slots", B=B, H=4, HV=4)
    before = copy_of(x)
    o = CALLS[call](**x, backend="cute")
    small = {n: y[:20] if n in (*PER_TOKEN, "state_indices") else y for n, y in before.items()}
    assert_close("o", o[:20], CALLS[call](**small), 4e-3)
    slots = x["state_indices"][:20].long()
    assert_close("state", x["state"][slots], before["state"][slots], 1e-6)


# --- sizes ----------------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize("name", ["named slots", "K-first", "speculative, packed"])
def test_slots_beyond_2_31_elements(oracle, call, name):
    x = inputs_of(call, name, state=torch.bfloat16)
    state = x["state"]
    slots = state.shape[0]
    inner = state.stride()[1:]
    apart = (2**31 // (slots - 1) + 64) // 64 * 64
    buffer = torch.empty(apart * (slots - 1) + state[0].numel(), dtype=state.dtype, device="cuda")
    x["state"] = buffer.as_strided(state.shape, (apart, *inner)).copy_(state)
    assert x["state"][-1].storage_offset() > 2**31
    if x.get("state_indices") is not None and x["state_indices"].dim() == 1:
        x["state_indices"][0] = slots - 1
        x["state_indices"][1:] = torch.arange(len(x["state_indices"]) - 1)
    oracle.decode(call, x, backend="cute")


@EACH
def test_tokens_beyond_2_31_elements(oracle, call):
    x = inputs_of(call, "several tokens", B=3)
    for n in ("q", "k", "v"):
        apart = 2**30 + 64
        buffer = torch.empty(2 * apart + x[n][0].numel(), dtype=x[n].dtype, device="cuda")
        x[n] = buffer.as_strided(x[n].shape, (apart, *x[n].stride()[1:])).copy_(x[n])
    oracle.decode(call, x, backend="cute")


@EACH
def test_2050_sequences_of_32_heads(call):
    B, H = 2050, 32
    x = inputs_of(call, "bf16 state", B=1, H=H, HV=H)
    torch.manual_seed(0)
    for n in (*PER_TOKEN, "state"):
        if n in x:
            rows = torch.randn(B, *x[n].shape[1:], device="cuda", dtype=x[n].dtype)
            x[n] = rows.sigmoid() if n == "beta" else rows
    x["state_indices"] = torch.randperm(B, device="cuda")
    whole = copy_of(x)
    o = CALLS[call](**whole, backend="cute")
    for part in (slice(0, 1025), slice(1025, 2050)):
        half = {n: y[part] if n in (*PER_TOKEN, "state_indices") else y for n, y in x.items()}
        assert same_bits(CALLS[call](**half, backend="cute"), o[part])
    assert torch.equal(x["state"], whole["state"])


@EACH
@pytest.mark.parametrize("T", [1, 2, 3, 4, 5, 8, 9, 64])
def test_steps_of_any_length(oracle, call, T):
    oracle.decode(call, inputs_of(call, "several tokens", T=T, B=2, H=1, HV=1), backend="cute")


@EACH
def test_packed_prompts(oracle, call):
    x = inputs_of(call, "varlen", lengths=(65, 66, 71, 79), H=1, HV=1)
    oracle.decode(call, x, backend="cute")


@EACH
@pytest.mark.parametrize("token", [0, 3, 21])
def test_outputs_do_not_see_later_tokens(call, token):
    x = inputs_of(call, "several tokens", T=22, update_state=False)
    o = CALLS[call](**x, backend="cute")
    for name in PER_TOKEN:
        if name in x:
            changed = copy_of(x)
            changed[name][:, token] = 3.0
            other = CALLS[call](**changed, backend="cute")
            assert same_bits(o[:, :token], other[:, :token])
            assert not same_bits(o[:, token:], other[:, token:])


@EACH
@pytest.mark.parametrize("name", ["named slots", "several tokens", "speculative"])
def test_grouped_heads_equal_repeated_ones(call, name):
    x = inputs_of(call, name, H=2, HV=8)
    repeated = copy_of(x)
    for n in ("q", "k"):
        repeated[n] = repeated[n].repeat_interleave(4, dim=2)
    assert same_bits(CALLS[call](**x, backend="cute"), CALLS[call](**repeated, backend="cute"))
    assert same_bits(x["state"], repeated["state"])


# --- what else is read and written ----------------------------------------------------------------


def in_poison(x):
    """The tensors as windows of NaN-filled buffers, slots apart, and the buffers."""
    buffers = {}
    for name, y in x.items():
        if not torch.is_tensor(y):
            continue
        stride = None
        if name == "state":
            stride = (y[0].numel() + 64, *y.stride()[1:])
        elif name == "token_states":
            stride = y.stride()
        buffers[name] = poisoned(y.shape, y.dtype, "cuda", stride=stride)
        buffers[name].tensor.copy_(y)
    return {**x, **{name: b.tensor for name, b in buffers.items()}}, buffers


@EACH
@pytest.mark.parametrize(
    "name", ["no slots among them", "speculative, packed", "verify, K-first", "K-first, bf16 state"]
)
def test_nothing_around_the_tensors_is_used_and_runs_are_alike(oracle, call, name):
    x, buffers = in_poison(inputs_of(call, name))
    before = copy_of(x)
    first = oracle.decode(call, x, backend="cute").clone()
    written = [n for n in ("state", "token_states") if x.get(n) is not None]
    kept = {n: x[n].clone() for n in written}
    for _ in range(50):
        for n in written:
            x[n].copy_(before[n])
        assert same_bits(CALLS[call](**x, backend="cute"), first)
        assert all(same_bits(x[n], kept[n]) for n in written)
    assert all(b.untouched() for b in buffers.values())


@EACH
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_bounds_out_of_range_are_clamped(oracle, call, dtype):
    far = 2**31 - 1 if dtype == torch.int32 else 2**40 + 3
    for bounds in ([0, 3, -2, far], [-far, 2, 2, 4], [1, 3, 3, 3], [far, far, -far, 0]):
        x = inputs_of(call, "varlen", lengths=(1, 2, 2))
        x["cu_seqlens"] = torch.tensor(bounds, dtype=dtype, device="cuda")
        x, buffers = in_poison(x)
        host = {n: y.cpu() if torch.is_tensor(y) else y for n, y in x.items()}
        want = oracle.expected(host)
        out = poisoned(x["v"].shape, x["v"].dtype, "cuda")
        CALLS[call](**x, out=out.tensor, backend="cute")
        o, alone = out.tensor.cpu(), want.owners == 1  # two may have one where bounds decrease
        assert_close("o", o[alone], want.o[alone], 4e-3)
        assert o[want.owners == 0].isnan().all()
        assert_close("state", x["state"].cpu(), want.pool, 1e-4)
        assert all(b.untouched() for b in (*buffers.values(), out))


@EACH
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_indices_name_slots(oracle, call, dtype):
    x = inputs_of(call, B=4)
    x["state"] = torch.randn(5, *x["state"].shape[1:], device="cuda")
    for indices in ([-1, 3, 0, -1], [5, 4, -(2**31), 2**31 - 1], [-1] * 4):
        y = copy_of(x) | {"state_indices": torch.tensor(indices, dtype=dtype, device="cuda")}
        out = oracle.decode(call, y, backend="cute")
        for n, slot in enumerate(indices):
            assert (0 <= slot < 5) or (out[n] == 0).all()
    x["state_indices"] = torch.tensor([2, 2, 2, 1], dtype=dtype, device="cuda")
    before = x["state"].clone()
    assert CALLS[call](**x, backend="cute").isfinite().all()
    assert same_bits(x["state"][[0, 3, 4]], before[[0, 3, 4]])


@EACH
@pytest.mark.parametrize("name", ["packed qkv, padded slots", "several tokens", "speculative"])
def test_strided_tensors_equal_contiguous_ones(call, name):
    x = inputs_of(call, name)
    plain = {n: y.contiguous() if torch.is_tensor(y) else y for n, y in copy_of(x).items()}
    for n in PER_TOKEN:
        if n in x:
            wide = torch.full((*x[n].shape[:-1], 3 * x[n].shape[-1]), torch.nan, device="cuda")
            wide = wide.to(x[n].dtype)
            x[n] = wide[..., x[n].shape[-1] : 2 * x[n].shape[-1]].copy_(x[n])
    assert same_bits(CALLS[call](**x, backend="cute"), CALLS[call](**plain, backend="cute"))
    assert same_bits(x["state"], plain["state"])


# --- the host's side ------------------------------------------------------------------------------


@EACH
def test_a_second_call_neither_waits_nor_allocates_nor_compiles(call):
    x = inputs_of(call, "named slots")
    out = torch.empty_like(x["v"])
    CALLS[call](**x, out=out)
    for B in (1, 2, 3):  # batches of one tile: the kernel is there
        part = {n: y[:B] if n in (*PER_TOKEN, "state_indices") else y for n, y in x.items()}
        functions = len(jit._functions)
        CALLS[call](**part, out=out[:B])
        assert len(jit._functions) == functions
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        CALLS[call](**x, out=out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("A_log", lambda x: x.cpu(), "A_log: device cpu; must be cuda"),
        ("state_indices", lambda x: x.cpu(), "state_indices: device cpu; must be cuda"),
        ("state", lambda x: x.cpu(), "state: device cpu; must be cuda"),
        ("k", lambda x: x[..., :64], "k: shape"),
        ("beta", lambda x: x[:, :, :1], "beta: shape"),
        ("out", lambda x: x.float(), "out: dtype"),
        ("dt_bias", lambda x: x.to(torch.int32), "dt_bias: dtype"),
        ("q", lambda x: None, "q: NoneType"),
    ],
)
def test_a_second_call_still_refuses_what_is_wrong(name, wrong, message):
    x = inputs_of("kda_decode", "named slots")
    x["out"] = torch.empty_like(x["v"])
    kda_decode(**x)
    x[name] = wrong(x[name])
    before = x["state"].clone()
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        kda_decode(**x)
    torch.cuda.synchronize()
    assert same_bits(x["state"], before)


def test_a_state_that_is_not_aligned_falls_back():
    x = inputs_of("kda_decode", "named slots")
    kda_decode(**copy_of(x))
    want = copy_of(x)
    o = kda_decode(**want)
    apart = torch.empty(x["state"].numel() + 1, device="cuda")[1:].view(x["state"].shape)
    x["state"] = apart.copy_(x["state"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_close("o", kda_decode(**x), o, 4e-3)
    assert_close("state", x["state"], want["state"], 1e-5)


@EACH
@pytest.mark.parametrize("name", ["named slots", "speculative, packed"])
def test_graph_replay_with_other_indices_and_lengths(oracle, call, name):
    x = inputs_of(call, name)
    start = x["state"].clone()
    out = torch.empty_like(x["v"])
    CALLS[call](**x, out=out, backend="cute")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        CALLS[call](**x, out=out, backend="cute")
    slots = start.shape[0]
    for seed in range(4):
        torch.manual_seed(seed)
        indices = torch.randperm(slots)[: x["state_indices"].numel()]
        indices[0] = -1 if seed % 2 else indices[0]
        x["state_indices"].copy_(indices.view(x["state_indices"].shape))
        if "cu_seqlens" in x:
            total = x["v"].shape[1]
            inner = torch.randint(0, total + 1, (len(x["cu_seqlens"]) - 2,)).sort().values
            x["cu_seqlens"].copy_(torch.cat([torch.tensor([0]), inner, torch.tensor([total])]))
        x["v"].copy_(torch.randn(x["v"].shape))
        x["state"].copy_(start)
        host = {n: y.cpu() if torch.is_tensor(y) else y for n, y in x.items()}
        want = oracle.expected(host)
        out.fill_(torch.nan)
        graph.replay()
        assert_close("o", out.cpu(), want.o, 4e-3)
        assert_close("state", x["state"].cpu(), want.pool, 1e-4)


@EACH
def test_calls_run_on_the_current_stream(call):
    x = inputs_of(call, "several tokens")
    want = copy_of(x)
    o = CALLS[call](**want)
    source, x["v"] = x["v"], torch.zeros_like(x["v"])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)  # a launch on any other stream would read zeros
        x["v"].copy_(source)
        found = CALLS[call](**x)
    stream.synchronize()
    assert same_bits(found, o) and same_bits(x["state"], want["state"])


@EACH
def test_two_streams_at_once(call):
    inputs = [inputs_of(call, "several tokens", B=64, H=8, HV=8) for _ in range(2)]
    inputs[1]["v"].mul_(-1)
    want = [copy_of(x) for x in inputs]
    o = [CALLS[call](**x) for x in want]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    found = [None, None]
    for i, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            found[i] = CALLS[call](**inputs[i])
    torch.cuda.synchronize()
    for i in range(2):
        assert same_bits(found[i], o[i]) and same_bits(inputs[i]["state"], want[i]["state"])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_device_that_is_not_the_current_one(oracle):
    case = CASES["kda: several tokens, named slots"]
    for _ in range(2):  # planned, then past the plan
        oracle.case(case, "cuda:1", backend="cute")
        oracle.case(case, "cuda:0", backend="cute")
    x = make_inputs(case, "cuda:1")
    x["state"] = x["state"].to("cuda:0")
    with pytest.raises(ValueError, match="state: device cuda:0; must be cuda:1"):
        kda_decode(**x)
    assert torch.cuda.current_device() == 0


THREADS = """
import json, threading, torch
from cula.common import jit
from cula.decode import kda_decode, lightning_decode
from cula.decode.cases import CASES, make_inputs

compilations = []
real = jit.compile_kernel


def counting(config, arch, options=""):
    compilations.append(repr(config))
    return real(config, arch, options)


jit.compile_kernel = counting
jobs = [("kda: one token", kda_decode), ("lightning: one token", lightning_decode)] * 4
results = [None] * len(jobs)
barrier = threading.Barrier(len(jobs))


def work(i):
    name, call = jobs[i]
    x = make_inputs(CASES[name], "cuda")
    barrier.wait()
    with torch.cuda.stream(torch.cuda.Stream()):
        results[i] = call(**x).double().sum().item()


threads = [threading.Thread(target=work, args=(i,)) for i in range(len(jobs))]
[t.start() for t in threads]
[t.join() for t in threads]
print(json.dumps([results, sorted(compilations)]))
"""


def test_threads_at_first_call(tmp_path):
    """Eight threads, two kernels, an empty cache: each compiled once, all results alike."""
    env = {**os.environ, "CULA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    results, compilations = json.loads(done.stdout.splitlines()[-1])
    assert None not in results
    assert results[0::2] == [results[0]] * 4 and results[1::2] == [results[1]] * 4
    assert len(compilations) == len(set(compilations)) == 2


@pytest.mark.parametrize(
    "name", ["kda: no slots among them", "lightning: verify", "kda: recurrent"]
)
def test_compiled_without_a_break(name):
    case = CASES[name]
    call = {**CALLS, "fused_recurrent_kda": fused_recurrent_kda}[case.call]

    def layer(**x):
        result = call(**{**x, "q": x["q"] * 2})
        o, *rest = result if isinstance(result, tuple) else (result,)
        return (o + 1, *rest)

    torch._dynamo.reset()
    eager, compiled = make_inputs(case, "cuda"), make_inputs(case, "cuda")
    want = layer(**eager)
    found = torch.compile(layer, fullgraph=True, backend="aot_eager")(**compiled)
    assert all(same_bits(a, b) for a, b in zip(found, want, strict=True))
    if "state" in eager:
        assert same_bits(eager["state"], compiled["state"])


def test_autocast_inference_and_no_grad():
    x = inputs_of("kda_decode", "float32", B=2)
    want = kda_decode(**copy_of(x))
    modes = (torch.no_grad, torch.inference_mode, lambda: torch.autocast("cuda", torch.bfloat16))
    for mode in modes:
        with mode():
            o = kda_decode(**copy_of(x))
        assert same_bits(o, want) and not o.requires_grad


# --- long runs ------------------------------------------------------------------------------------

STEPS, HEADS, D = 4096, 4, 128


def exact_kda(x, bounded):
    """o [B, T, HV, V] and the V-first final state of a whole run, in float64 on the GPU."""
    exact = torch.float64
    q, k = l2_normalise(x["q"], dtype=exact), l2_normalise(x["k"], dtype=exact)
    lower = -5.0 if bounded else None
    g = kda_log_decay(
        x["g"], A_log=x["A_log"], dt_bias=x["dt_bias"], lower_bound=lower, dtype=exact
    )
    o, S = kda_steps(q, k, x["v"], g, x["beta"], x["state"].mT, D**-0.5, dtype=exact)
    return o, S.mT


def long_kda(gate, state=torch.float32, steps=STEPS, **changes):
    """Gates from almost nothing to a few percent a token."""
    mean = -6.0 if gate == "softplus" else -5.0
    sizes = {"B": 1, "T": steps, "H": HEADS, "HV": HEADS}
    return inputs_of(
        "kda_decode", gate_mean=mean, gate=gate, bias="flat", state=state, **sizes, **changes
    )


@pytest.mark.parametrize("gate", ["softplus", "bounded"])
@pytest.mark.parametrize("at_once", [1, 4])
def test_4096_kda_steps(gate, at_once):
    x = long_kda(gate)
    want, S = exact_kda(x, gate == "bounded")
    o = torch.empty_like(x["v"])
    for t in range(0, STEPS, at_once):
        kda_decode(**step_of(x, t, at_once), out=o[:, t : t + at_once], backend="cute")
    assert_close("state", x["state"], S, 1e-4)
    assert_close("o", o, want, 4e-3)


def test_4096_tokens_in_one_recurrent_call():
    x = long_kda("softplus")
    want, S = exact_kda(x, False)
    flags = {n: x[n] for n in x if n.startswith("use_")}
    o, final = fused_recurrent_kda(
        *(x[n] for n in (*PER_TOKEN, "A_log", "dt_bias")),
        initial_state=x["state"].mT.contiguous(),
        output_final_state=True,
        **flags,
        backend="cute",
    )
    assert_close("state", final.mT, S, 1e-4)
    assert_close("o", o, want, 4e-3)


def test_4096_lightning_steps():
    x = inputs_of("lightning_decode", B=1, T=STEPS, H=HEADS, HV=HEADS)
    x["g_gamma"] = lightning_log_decay(HEADS, 12, 24, "cuda") / 100
    arguments = (x["q"], x["k"], x["v"], x["g_gamma"], x["state"].mT, D**-0.5)
    want, S = lightning_steps(*arguments, dtype=torch.float64)
    o = torch.empty_like(x["v"])
    for t in range(STEPS):
        lightning_decode(**step_of(x, t), out=o[:, t : t + 1], backend="cute")
    assert_close("state", x["state"], S.mT, 1e-4)
    assert_close("o", o, want, 4e-3)


@pytest.mark.parametrize("gate", ["softplus", "bounded"])
def test_a_bf16_state_is_as_good_as_rounding_allows(gate):
    """Against the exact run: not above 1.5 times a float64 run whose state is rounded each step."""
    x = long_kda(gate, torch.bfloat16, steps=256)
    _, S = exact_kda(x, gate == "bounded")
    rounded = copy_of(x)
    for t in range(256):
        _, after = exact_kda(step_of(rounded, t), gate == "bounded")
        rounded["state"] = after.to(torch.bfloat16)
        kda_decode(**step_of(x, t), backend="cute")
    assert rel_error(x["state"], S) <= 1.5 * rel_error(rounded["state"], S)


# --- accuracy against flash-linear-attention ------------------------------------------------------


def no_worse_than(name, ours, theirs, exact):
    """Errors within 1.25 of theirs; what lies at float32's own precision is not compared."""
    error, other = rel_error(ours, exact), rel_error(theirs, exact)
    assert error <= max(1.25 * other, 1e-6), f"{name}: error {error:.3e}, FLA's {other:.3e}"


@pytest.mark.skipif(fla_missing() is not None, reason=str(fla_missing()))
@pytest.mark.parametrize("T", [1, 64])
def test_kda_is_as_accurate_as_fla(T):
    x = inputs_of("kda_decode", "softplus", B=8, T=T, H=8, HV=8)
    want, S = exact_kda(x, False)
    theirs, their_state = fla_function("fla.ops.kda.fused_recurrent_kda")(
        q=x["q"],
        k=x["k"],
        v=x["v"],
        g=x["g"],
        beta=x["beta"],
        A_log=x["A_log"],
        dt_bias=x["dt_bias"],
        initial_state=x["state"].mT.contiguous(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
    )
    o = kda_decode(**x, backend="cute")
    no_worse_than("o", o, theirs, want)
    no_worse_than("state", x["state"], their_state.mT, S)


@pytest.mark.skipif(fla_missing() is not None, reason=str(fla_missing()))
@pytest.mark.parametrize("T", [1, 64])
def test_lightning_is_as_accurate_as_fla(T):
    x = inputs_of("lightning_decode", B=8, T=T, H=8, HV=8)
    arguments = (x["q"], x["k"], x["v"], x["g_gamma"], x["state"].mT, D**-0.5)
    want, S = lightning_steps(*arguments, dtype=torch.float64)
    theirs, their_state = fla_function("fla.ops.simple_gla.fused_recurrent_simple_gla")(
        q=x["q"],
        k=x["k"],
        v=x["v"],
        g_gamma=x["g_gamma"],
        scale=D**-0.5,
        initial_state=x["state"].mT.contiguous(),
        output_final_state=True,
    )
    o = lightning_decode(**x, backend="cute")
    no_worse_than("o", o, theirs, want)
    no_worse_than("state", x["state"].mT, their_state, S)


@pytest.mark.skipif(fla_missing() is not None, reason=str(fla_missing()))
@pytest.mark.parametrize(
    "name",
    [
        "kda: named slots",
        "kda: grouped heads, several tokens",
        "kda: verify one token",
        "kda: beta to 2",
        "kda: varlen",
        "kda: recurrent, varlen",
        "lightning: several tokens, named slots",
        "lightning: varlen",
    ],
)
def test_fla_as_a_backend(oracle, name):
    case = CASES[name]
    if case.token_states:
        case = dataclasses.replace(case, token_states=False)
    oracle.case(case, "cuda", backend="fla")


def test_launch_functions_are_kept_by_batch():
    """One entry a batch size, not one a call."""
    run._launches.clear()
    for _ in range(3):
        for B in (1, 2):
            kda_decode(**inputs_of("kda_decode", B=B))
    assert len(run._launches) == 2
