"""The compiled kernels, run on the CPU by a PTX emulator through the public calls.

Skipped without the emulator, and on a machine with a GPU: the emulator takes the process's CUDA
runtime over. There test_gpu.py runs the same kernels.
"""

import dataclasses
import os
from types import SimpleNamespace

import pytest
import torch

ptxemu = pytest.importorskip("ptxemu")
if torch.cuda.is_available():
    pytest.skip("a GPU is there to run the kernels", allow_module_level=True)
pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

from cula.common import checks  # noqa: E402
from cula.common.jit import compile_kernel  # noqa: E402
from cula.common.testing import assert_close, poisoned, same_bits  # noqa: E402
from cula.decode import kda_decode, kernel_plan, lightning_decode, plan, run  # noqa: E402
from cula.decode.cases import BATCHES, CASES, kernel_config, make_inputs  # noqa: E402

ARCH = "sm_90a"
kernels = {}


def compiled(config, arch=ARCH):
    """Each configuration compiled once for all tests."""
    if config not in kernels:
        kernels[config] = compile_kernel(config, arch)
    return kernels[config]


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory):
    # a folder of its own: kernels are dumped by their names, which other processes use too
    os.environ.setdefault("CUTE_DSL_DUMP_DIR", str(tmp_path_factory.mktemp("dump")))
    ptxemu.install()


@pytest.fixture(autouse=True)
def emulator(monkeypatch):
    """Public calls on CPU tensors run kernels.

    `configs`: what was planned; `launches`; `device`: the emulator's, if a test opens one itself.
    """
    seen = SimpleNamespace(configs=[], launches=[], device=None)

    def get(config, arch):
        seen.configs.append(config)
        function = compiled(config, arch)

        def launch(*args):
            if seen.device is not None:
                return function(*args)
            # one emulated device a launch: it tells kernels apart by their names, which are alike
            with ptxemu.device(mode="lazy") as device:
                function(*args)
            seen.launches.extend(device.launches)
            assert not device.hazards, device.report()

        return launch

    monkeypatch.setattr(plan, "choose_backend", lambda *args, **options: "cute")
    monkeypatch.setattr(plan, "arch_of", lambda device: ARCH)
    monkeypatch.setattr(run.jit, "compiled", get)
    monkeypatch.setattr(run, "_launches", {})
    return seen


# One for every code path; what differs by family is there for both.
PATHS = [
    "kda: one token",
    "kda: no slots among them",
    "kda: K-first, bf16 state",
    "kda: packed qkv, padded slots",
    "kda: token states, bf16",
    "kda: verify, K-first",
    "kda: several tokens, named slots",
    "kda: speculative, int64",
    "kda: speculative, packed",
    "kda: varlen, empty ones",
    "kda: K = 64, V = 128",
    "kda: K = 128, V = 64, K-first",
    "kda: float16",
    "kda: float32",
    "kda: softplus, strong",
    "kda: softplus, 2-D bias",
    "kda: at the lower bound",
    "kda: masked",
    "kda: no decay",
    "kda: tiny keys",
    "kda: beta to 2",
    "kda: recurrent",
    "kda: recurrent, no initial state, V-first",
    "lightning: one token",
    "lightning: no slots, int64",
    "lightning: speculative, packed",
    "lightning: varlen, empty ones",
    "lightning: masking decay",
]


@pytest.mark.parametrize("name", PATHS)
def test_kernel_equals_the_recurrence(oracle, emulator, name):
    case = CASES[name]
    if case.slots in ("own", "named"):
        case = dataclasses.replace(case, B=2)
    oracle.case(case)
    assert emulator.configs == [kernel_config(case, ARCH)]
    assert len(emulator.launches) == 1


def test_the_decay_is_exact_from_a_mask_to_growth():
    """A state that only decays: e^g to rounding for every g, also above 0 (nobody promises it)."""
    g = torch.linspace(-20, 3, 128).view(1, 1, 1, 128)
    x, state = torch.zeros(1, 1, 1, 128), torch.ones(1, 1, 128, 128)
    kda_decode(x, x, x, g.clone(), torch.zeros(1, 1, 1), state, use_gate_in_kernel=False)
    right = g.double().exp().expand(1, 1, 128, 128)
    assert ((state / right - 1).abs() < 2e-6).all()


TILED = [
    ("kda: one token", {}),
    ("kda: bf16 state", {}),
    ("kda: D = 64", {}),
    ("kda: D = 64, bf16 state", {}),
    ("lightning: one token", {}),
    ("lightning: D = 64, K-first", {"T": 1}),
]


@pytest.mark.parametrize(("name", "changes"), TILED)
def test_tiles_of_larger_batches(oracle, emulator, monkeypatch, name, changes):
    """What the plan chooses for more sequences, at a size that can be emulated."""
    case = dataclasses.replace(CASES[name], B=1, H=1, HV=1, **changes)
    by_size = [kernel_config(dataclasses.replace(case, B=B), ARCH) for B in BATCHES]
    wanted = list(dict.fromkeys(by_size))
    for config in wanted:
        tile = (config.warps, config.v_per_thread, config.lanes)
        monkeypatch.setattr(kernel_plan, "_tile", lambda *args, tile=tile: tile)
        run._launches.clear()  # of the tile before
        oracle.case(case)
    assert emulator.configs == wanted


def inputs_of(name, **changes):
    return make_inputs(dataclasses.replace(CASES[name], **changes))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("kda: no slots among them", {"H": 1, "HV": 1, "B": 3}),
        ("kda: speculative, packed", {"H": 1, "HV": 1, "lengths": (0, 6)}),
        ("kda: verify, K-first", {"H": 1, "HV": 1, "B": 1, "T": 2}),
        ("lightning: token states, bf16", {"H": 1, "HV": 1, "B": 1}),
    ],
)
def test_no_order_of_execution_changes_the_results(emulator, name, changes):
    """Every mode of the emulator, random schedules: the same bits, no hazards."""
    x = inputs_of(name, **changes)
    call = kda_decode if name.startswith("kda") else lightning_decode
    out = torch.full_like(x["v"], torch.nan)
    outputs = [out, x["state"], x.get("token_states")]
    # the emulator looks at memory as it lies
    outputs = [y if y.stride(-1) == 1 else y.mT for y in outputs if y is not None]
    with ptxemu.device() as emulator.device:
        assert emulator.device.check(lambda: call(**x, out=out), outputs) == []
    assert not out.isnan().any()


def in_poison(x, **strides):
    """The tensors as windows of NaN-filled buffers, and the buffers."""
    buffers = {}
    for name, y in x.items():
        if torch.is_tensor(y):
            buffers[name] = poisoned(y.shape, y.dtype, stride=strides.get(name))
            buffers[name].tensor.copy_(y)
    return {**x, **{name: b.tensor for name, b in buffers.items()}}, buffers


@pytest.mark.parametrize("name", ["kda: no slots, int64", "lightning: speculative, packed"])
def test_nothing_around_the_tensors_is_used(oracle, emulator, name):
    x = inputs_of(name)
    HV, V, K = x["state"].shape[1:]
    wide = HV * V * K + 64  # elements between the slots
    x, buffers = in_poison(x, state=(wide, V * K, K, 1))
    out = poisoned(x["v"].shape, x["v"].dtype)
    want = oracle.expected({**x, "state": x["state"].clone()})
    call = kda_decode if name.startswith("kda") else lightning_decode
    call(**x, out=out.tensor)
    assert_close("o", out.tensor, want.o, 4e-3)
    assert_close("state", x["state"], want.pool, 1e-4)
    assert all(b.untouched() for b in (*buffers.values(), out))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_bounds_out_of_range_are_clamped(oracle, emulator, monkeypatch, dtype):
    """On a GPU the values of cu_seqlens are not looked at."""
    monkeypatch.setattr(checks, "readable", lambda x: False)
    far = 2**31 - 1 if dtype == torch.int32 else 2**40 + 3
    for bounds in ([0, 3, -2, far], [-far, 2, 2, 4], [1, 3, 3, 3], [far, far, -far, 0]):
        x = inputs_of("kda: varlen", lengths=(1, 2, 2), H=1, HV=1, state=torch.bfloat16)
        x["cu_seqlens"] = torch.tensor(bounds, dtype=dtype)
        x, buffers = in_poison(x)
        out = poisoned(x["v"].shape, x["v"].dtype)
        before = {n: y.clone() if torch.is_tensor(y) else y for n, y in x.items()}
        want = oracle.expected(before)
        kda_decode(**x, out=out.tensor)
        alone = want.owners == 1  # where bounds decrease, two sequences may have a token
        assert_close("o", out.tensor[alone], want.o[alone], 4e-3)
        assert out.tensor[want.owners == 0].isnan().all()
        assert_close("state", x["state"], want.pool, 4e-3)
        assert all(b.untouched() for b in (*buffers.values(), out))


def test_accepted_tokens_that_name_no_slot(oracle, emulator):
    for accepted in ([0, 6, -1], [-(2**31), 2**31 - 1, 5]):
        x = inputs_of("kda: speculative", H=1, HV=1)
        x["num_accepted_tokens"] = torch.tensor(accepted, dtype=torch.int32)
        out = oracle.decode("kda_decode", x)
        none = [not 1 <= count <= 5 for count in accepted]
        assert (out[none] == 0).all()


def test_more_tokens_than_named_slots(oracle, emulator):
    """The states of the tokens beyond are not stored anywhere."""
    x = inputs_of("lightning: a slot a token", H=1, HV=1)
    x["state_indices"] = x["state_indices"][:, :2].contiguous()
    oracle.decode("lightning_decode", x)


def test_strided_inputs_are_not_copied(oracle, emulator):
    """Every stride but that of channels may be anything."""
    x = inputs_of("kda: beta logits", HV=4, B=2, bias="2-D")
    for name in ("q", "k", "v", "g", "beta"):
        y = x[name]
        wide = torch.full((*y.shape[:-1], 2 * y.shape[-1]), torch.nan, dtype=y.dtype)
        wide = wide.repeat_interleave(2, dim=0)
        x[name] = wide[::2, ..., : y.shape[-1]]
        if name == "beta":  # [B, T, HV] with the heads apart
            x[name] = torch.full((*y.shape, 3), torch.nan, dtype=y.dtype)[..., 1]
        x[name].copy_(y)
    oracle.decode("kda_decode", x)
    assert len(run._launches) == 1  # kept only if no argument was copied


def test_inputs_with_strided_channels_are_copied(oracle, emulator):
    x = inputs_of("lightning: one token", B=1, H=1, HV=1)
    x["q"] = x["q"].repeat_interleave(2, dim=-1)[..., ::2]
    oracle.decode("lightning_decode", x)
    out = torch.empty(*x["v"].shape, 2, dtype=x["v"].dtype)[..., 0]
    assert lightning_decode(**x, out=out) is out
    assert not run._launches


REFUSED = [
    ("mQ", lambda x: x.half(), ValueError),
    ("mQ", lambda x: x[..., :64], ValueError),
    ("mQ", lambda x: x[0], ValueError),
    ("mQ", lambda x: x.repeat_interleave(2, dim=-1)[..., ::2], ValueError),
    ("mQ", lambda x: None, TypeError),
    ("mQ", lambda x: x.tolist(), TypeError),
    ("mK", lambda x: x[:1], ValueError),
    ("mV", lambda x: x[:, :, :1], ValueError),
    ("mG", lambda x: x.float(), ValueError),
    ("mBeta", lambda x: x[..., :1], ValueError),
    ("mA", lambda x: x[:1], ValueError),
    ("mA", lambda x: None, TypeError),
    ("mS", lambda x: x[:, :1], ValueError),
    ("mS", lambda x: x.mT, ValueError),
    ("mS", lambda x: x.bfloat16(), ValueError),
    ("mS", lambda x: None, TypeError),
    ("mS", lambda x: torch.cat([x.flatten(), x.new_zeros(1)])[1:].view(x.shape), ValueError),
    ("mS", lambda x: torch.zeros(4, 2 * 128 * 128 + 2)[:, :-2].view(x.shape), ValueError),
    ("mSout", lambda x: torch.zeros(2, 2, 128, 128), TypeError),
    ("mIndex", lambda x: x[:1], ValueError),
    ("mIndex", lambda x: x.long(), ValueError),
    ("mIndex", lambda x: x[:, None], ValueError),
    ("mIndex", lambda x: None, TypeError),
    ("mAccepted", lambda x: torch.ones(2, dtype=torch.int32), TypeError),
    ("mCu", lambda x: torch.zeros(3, dtype=torch.int32), TypeError),
    ("mTS", lambda x: torch.zeros(2, 1, 2, 128, 128), TypeError),
    ("mO", lambda x: x.float(), ValueError),
    ("mO", lambda x: x[:1], ValueError),
    ("scale", lambda x: "one", TypeError),
    ("scale", lambda x: None, TypeError),
]


@pytest.mark.parametrize(("name", "wrong", "error"), REFUSED)
def test_the_compiled_function_checks_its_arguments(name, wrong, error):
    """Before it launches anything, and with the errors that calls past the plan look for."""
    case = dataclasses.replace(CASES["kda: named slots"], B=2)
    x = make_inputs(case)
    arguments = {
        "mQ": x["q"],
        "mK": x["k"],
        "mV": x["v"],
        "mG": x["g"],
        "mBeta": x["beta"],
        "mA": x["A_log"],
        "mBias": x["dt_bias"],
        "mS": x["state"],
        "mSout": None,
        "mIndex": x["state_indices"],
        "mAccepted": None,
        "mCu": None,
        "mTS": None,
        "mO": torch.zeros_like(x["v"]),
        "scale": 0.1,
        "lower_bound": -5.0,
    }
    function = compiled(kernel_config(case, ARCH))
    with ptxemu.device() as device:
        function(*arguments.values())
        assert len(device.launches) == 1
        arguments[name] = wrong(arguments[name])
        with pytest.raises(error, match=r"^(Mismatched|Misaligned|Invalid) "):
            function(*arguments.values())
        assert len(device.launches) == 1


def test_the_compiled_function_wants_a_gpu():
    case = dataclasses.replace(CASES["lightning: one token"], B=1)
    x = make_inputs(case)
    tokens = (x["q"], x["k"], x["v"], x["g_gamma"])
    rest = (None, None, None, x["state"], None, None, None, None, None)
    with pytest.raises(ValueError, match="expected device_type=cuda"):
        compiled(kernel_config(case, ARCH))(*tokens, *rest, torch.zeros_like(x["v"]), 1.0, 0.0)


class TestSecondCall:
    """A call like one before goes past the plan; whatever differs is noticed."""

    @pytest.fixture
    def first(self, oracle, emulator):
        def inputs(**changes):
            return inputs_of("kda: named slots", B=2, H=1, HV=2, **changes)

        oracle.decode("kda_decode", inputs())
        assert len(run._launches) == 1
        return SimpleNamespace(inputs=inputs, emulator=emulator)

    def test_it_launches_the_same_function(self, oracle, first):
        oracle.decode("kda_decode", first.inputs())
        x = first.inputs() | {"scale": 0.5}
        oracle.decode("kda_decode", x)
        assert len(first.emulator.configs) == 1
        assert len(first.emulator.launches) == 3

    @pytest.mark.parametrize(
        "changes",
        [
            {"index_dtype": torch.int64},
            {"state": torch.bfloat16},
            {"v_first": False},
            {"gate_dtype": torch.float32},
            {"parameter_dtype": torch.bfloat16},
            {"bias": "2-D"},
            {"bias": "none"},
            {"gate": "softplus"},
            {"gate": "sigmoid"},
            {"gate": "given"},
            {"beta": "sigmoid"},
            {"beta": "sigmoid2"},
            {"l2norm": False},
            {"update_state": False},
            {"token_states": True},
        ],
        ids=str,
    )
    def test_another_kind_of_call_is_planned(self, oracle, first, changes):
        oracle.decode("kda_decode", first.inputs(**changes))
        assert len(first.emulator.configs) == 2
        assert len(set(first.emulator.configs)) == 2

    def test_so_it_is_with_lightning(self, oracle, emulator):
        kinds = ({}, {"slots": "own"}, {"state": torch.bfloat16}, {"update_state": False})
        for _ in range(2):
            for changes in kinds:
                x = inputs_of("lightning: named slots", B=2, H=1, HV=1, **changes)
                oracle.decode("lightning_decode", x)
        assert len(emulator.configs) == len(set(emulator.configs)) == len(kinds)
        assert len(emulator.launches) == 2 * len(kinds)

    def test_padded_slots_and_strides_need_no_plan(self, oracle, first):
        oracle.decode("kda_decode", first.inputs(padding=64, packed=True))
        assert len(first.emulator.configs) == 1

    @pytest.mark.parametrize(
        ("name", "wrong", "message"),
        [
            ("k", lambda x: x[:, :, :, :64], "k: shape"),
            ("k", lambda x: x.half(), "k: dtype"),
            ("g", lambda x: x[:1], "g: shape"),
            ("beta", lambda x: x[..., :1], "beta: shape"),
            ("beta", lambda x: None, "beta: NoneType"),
            ("A_log", lambda x: x[:1], "A_log: shape"),
            ("dt_bias", lambda x: x[:128], "dt_bias: shape"),
            ("state_indices", lambda x: x[:1], "state_indices: shape"),
            ("state_indices", lambda x: x.float(), "state_indices: dtype"),
            ("state", lambda x: x.half(), "state: dtype"),
            ("out", lambda x: x.float(), "out: dtype"),
            ("out", lambda x: x[:1], "out: shape"),
            ("q", lambda x: None, "q: NoneType"),
            ("scale", lambda x: "wide", "scale: str; must be a number"),
            ("scale", lambda x: torch.tensor(0.5), "scale: Tensor; must be a number"),
            ("update_state", lambda x: "no", "update_state: str; must be True or False"),
        ],
    )
    def test_wrong_arguments_are_refused(self, first, name, wrong, message):
        x = first.inputs()
        x["out"] = torch.empty_like(x["v"])
        x[name] = wrong(x.get(name))
        before = x["state"].clone() if torch.is_tensor(x["state"]) else None
        with pytest.raises((TypeError, ValueError), match=message):
            kda_decode(**x)
        assert len(first.emulator.launches) == 1
        assert before is None or same_bits(x["state"], before)

    @pytest.mark.parametrize("bias", ["flat", "2-D"])
    def test_strided_parameters_are_read_as_they_lie(self, oracle, emulator, bias):
        """The plan does not take them, but a call that goes past it may have them."""
        x = inputs_of("kda: named slots", B=2, H=1, HV=2, bias=bias)
        oracle.decode("kda_decode", x)
        x = inputs_of("kda: named slots", B=2, H=1, HV=2, bias=bias)
        for name in ("A_log", "dt_bias"):
            x[name] = x[name].repeat_interleave(2, dim=0)[::2]
        oracle.decode("kda_decode", x)
        assert len(emulator.launches) == 2 and len(emulator.configs) == 1

    def test_a_state_apart_from_16_bytes_has_no_kernel(self, first, monkeypatch):
        """Such a call is planned anew (on a GPU the plan then takes a fallback)."""
        x = first.inputs()
        apart = torch.empty(x["state"].numel() + 1)[1:].view(x["state"].shape)
        x["state"] = apart.copy_(x["state"])
        monkeypatch.setattr(plan, "choose_backend", lambda *args, **options: "reference")
        kda_decode(**x)
        assert len(first.emulator.launches) == 1
