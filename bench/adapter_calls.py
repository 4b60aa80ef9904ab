"""FLA's calls, made in several ways with the same tensors: by us through FLA, by us, by FLA.

FLA's own functions are reached past its dispatch (`cula.common.fla.fla_function`); a layer of FLA's
runs its own kernels while everything of ours declines (`inside_fla`), which costs it a microsecond.
"""

import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from bench import accuracy, decode_calls, kda_calls, lightning_calls, prefill
from bench.adapter_cases import AdapterCase
from bench.baselines import FAST_OPS
from bench.decode_cases import DecodeCase
from bench.environment import version
from bench.kda_cases import KdaCase
from bench.lightning_cases import LightningCase

Call = Callable[[], tuple[torch.Tensor, torch.Tensor | None]]

LAYER_TOLERANCE = 0.02  # of our layer's output against FLA's, both in bf16

# FLA's function, and the module of ours that takes it over.
FUNCTIONS = {
    "fused_recurrent_kda": ("fla.ops.kda.fused_recurrent_kda", "decode"),
    "fused_recurrent_simple_gla": ("fla.ops.simple_gla.fused_recurrent_simple_gla", "decode"),
    "chunk_kda": ("fla.ops.kda.chunk_kda", "kda"),
    "chunk_simple_gla": ("fla.ops.simple_gla.chunk_simple_gla", "lightning"),
}


@dataclass(frozen=True)
class Calls:
    """One case's calls, each without arguments.

    Attributes:
        calls: by name: "ours" (through FLA), "direct", "fla", and "patched" (ours in front of FLA's
            dispatch) where there is a dispatch.
        check: raises AccuracyError if ours is wrong; returns the errors on o by name.
    """

    calls: Mapping[str, Call]
    check: Callable[[Mapping[str, tuple]], dict[str, float]]


def layers_missing() -> str | None:
    """Why there is no layer of FLA's here; None where it can be used."""
    if version("flash-linear-attention") is not None:
        return None
    return "FLA's layers are not installed (pip install flash-linear-attention)"


@contextmanager
def ours_in_fla() -> Iterator[None]:
    """FLA's functions are offered to us, and what `auto` chooses is our kernel or an error."""
    os.environ.setdefault(FAST_OPS, "1")
    patches = []
    for package in ("decode", "kda", "lightning"):
        module = importlib.import_module(f"cula.{package}.fla")
        patches.append(module.patch_fla())
        for adapter in module._takeover.adapters:
            adapter.accepted.clear()  # so that `took_over` is of what follows
    before = os.environ.get("CULA_BACKEND")
    os.environ["CULA_BACKEND"] = "cute"
    try:
        yield
    finally:
        for patch in patches:
            patch.undo()
        if before is None:
            del os.environ["CULA_BACKEND"]
        else:
            os.environ["CULA_BACKEND"] = before


def function_of(path: str) -> Callable[..., Any]:
    """FLA's function as FLA's users find it, at the time of asking."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def took_over(package: str) -> bool:
    """Whether FLA has left a call to a kernel of `cula.<package>`, since `ours_in_fla`."""
    adapters = importlib.import_module(f"cula.{package}.fla")._takeover.adapters
    return any(
        launch is not None for a in adapters for launch in a.accepted.values()
    )  # None: reference


def calls_of(case: AdapterCase, device: torch.device | str) -> Calls:
    """A function's calls; inside `ours_in_fla`.

    Args:
        case: the case; not a layer's.
        device: where.
    """
    from cula.common.fla import fla_function

    path, package = FUNCTIONS[case.op]
    options, direct, check = _MAKERS[case.op](case, device)
    through, own = function_of(path), fla_function(path)
    calls: dict[str, Call] = {
        "ours": lambda: through(**options),
        "direct": direct,
        "fla": lambda: own(**options),
    }
    if package != "lightning":  # which has no hook: it is patched as it is
        with importlib.import_module(f"cula.{package}.fla").patch_fla(past_dispatch=True):
            past = function_of(path)
        calls["patched"] = lambda: past(**options)
    return Calls(calls, check)


def _kda_options(inputs: Any) -> dict[str, Any]:
    flags = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "output_final_state", "state_v_first")
    names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
    return {name: getattr(inputs, name) for name in names} | dict.fromkeys(flags, True)


def _kda_decode(case: AdapterCase, device: torch.device | str) -> tuple:
    from cula.decode import fused_recurrent_kda

    shape = DecodeCase("kda_decode", "wrapper", "wrapper", case.B, H=case.H, HV=case.H, D=case.D)
    inputs = decode_calls.make_inputs(shape, device)
    options = _kda_options(inputs)
    options |= {"initial_state": inputs.state, "lower_bound": decode_calls.LOWER_BOUND}
    return options, lambda: fused_recurrent_kda(**options), _decode_check(inputs)


def _lightning_decode(case: AdapterCase, device: torch.device | str) -> tuple:
    """Directly it is a step in place, which has no new state to make room for."""
    from cula.decode import lightning_decode

    shape = DecodeCase(
        "lightning_decode", "wrapper", "wrapper", case.B, H=case.H, HV=case.H, D=case.D
    )
    inputs = decode_calls.make_inputs(shape, device)
    q, k, v, g_gamma, state = inputs.q, inputs.k, inputs.v, inputs.g, inputs.state.clone()
    options = {"q": q, "k": k, "v": v, "g_gamma": g_gamma, "initial_state": inputs.state}
    options |= {"output_final_state": True, "state_v_first": True}

    def direct() -> tuple[torch.Tensor, torch.Tensor]:
        return lightning_decode(q, k, v, g_gamma, state), state

    return options, direct, _decode_check(inputs)


def _decode_check(inputs: decode_calls.DecodeInputs) -> Callable:
    def check(results: Mapping[str, tuple]) -> dict[str, float]:
        found = decode_calls.errors(inputs, results)
        decode_calls.check_ours(inputs, found)
        return {name: found[name][0] for name in results}

    return check


def _kda_prefill(case: AdapterCase, device: torch.device | str) -> tuple:
    from cula.kda import chunk_kda

    shape = KdaCase(
        "wrapper", "wrapper", "fixed", case.B, case.T, case.H, case.H, case.D, initial=True
    )
    inputs = kda_calls.make_inputs(shape, device)
    options = _kda_options(inputs) | {"initial_state": inputs.initial, "safe_gate": True}
    options["lower_bound"] = inputs.lower_bound

    def check(results: Mapping[str, tuple]) -> dict[str, float]:
        found = prefill.errors(inputs, dict(results), kda_calls.oracle)
        kda_calls.check_ours(found)
        return {name: found[name][0] for name in results}

    return options, lambda: chunk_kda(**options), check


def _lightning_prefill(case: AdapterCase, device: torch.device | str) -> tuple:
    from cula.lightning import chunk_lightning_attn

    shape = LightningCase(
        "wrapper", "wrapper", "fixed", case.B, case.T, case.H, case.H, case.D, states=True
    )
    inputs = lightning_calls.make_inputs(shape, device)
    q, k, v = inputs.q, inputs.k, inputs.v
    options = {"scale": lightning_calls.SCALE, "initial_state": inputs.initial}
    options |= {"output_final_state": True, "state_v_first": True}

    def check(results: Mapping[str, tuple]) -> dict[str, float]:
        found = prefill.errors(inputs, dict(results), lightning_calls.oracle)
        lightning_calls.check_ours(found)
        return {name: found[name][0] for name in results}

    # the layer whose decay `make_inputs` has
    direct = lambda: chunk_lightning_attn(q, k, v, 12, 24, **options)  # noqa: E731
    return {"q": q, "k": k, "v": v, "g_gamma": inputs.g_gamma, **options}, direct, check


_MAKERS = {
    "fused_recurrent_kda": _kda_decode,
    "fused_recurrent_simple_gla": _lightning_decode,
    "chunk_kda": _kda_prefill,
    "chunk_simple_gla": _lightning_prefill,
}


class LayerCache:
    """What FLA's layer asks of a cache: its state of the step before."""

    def __init__(self) -> None:
        self.states: dict[int, dict[str, Any]] = {}

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, layer_idx: int) -> dict[str, Any]:
        return self.states[layer_idx]

    def update(self, layer_idx: int, **state: Any) -> dict[str, Any]:
        """The layer's new state."""
        self.states[layer_idx] = state
        return state


def layer_calls(case: AdapterCase, device: torch.device | str) -> Calls:
    """FLA's layer with random weights: a prefill without a cache, or steps with one.

    Ours and FLA's are one layer over the same input; each has a cache of its own.
    """
    from cula.common.fla import fla_alone

    layers = importlib.import_module("fla.layers.kda")
    torch.manual_seed(0)
    gate = {"safe_gate": True, "lower_bound": -5.0} if case.gate == "bounded" else {}
    layer = layers.KimiDeltaAttention(
        hidden_size=case.hidden, head_dim=case.D, num_heads=case.H, layer_idx=0, **gate
    )
    layer = layer.to(device, torch.bfloat16).eval()
    x = torch.randn(case.B, case.T, case.hidden, device=device, dtype=torch.bfloat16)

    def step() -> Call:
        if case.T > 1:
            return lambda: (layer(x)[0], None)
        options = {"past_key_values": LayerCache(), "use_cache": True}
        layer(x, **options)  # the state that the first step starts from
        return lambda: (layer(x, **options)[0], None)

    with fla_alone():
        theirs = step()
    ours = step()

    def by_fla() -> tuple:
        with fla_alone():
            return theirs()

    def check(results: Mapping[str, tuple]) -> dict[str, float]:
        error = accuracy.RelativeError()
        error.add(results["ours"][0], results["fla"][0])
        accuracy.check("o, against FLA's", error.value(), LAYER_TOLERANCE)
        return {}

    return Calls({"ours": ours, "fla": by_fla}, check)
