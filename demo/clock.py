"""Times the demo's calls: on a GPU beside FLA and the memory's ceiling, on a CPU alone."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench import baselines, timing
from bench.decode_calls import DecodeInputs
from bench.decode_cases import DecodeCase
from demo.layers import ToyModel

Tensors = tuple[torch.Tensor, ...]


@dataclass
class Times:
    """Milliseconds of one call.

    Attributes:
        ms: ours.
        fla_ms: FLA's for the same inputs; None without FLA.
        floor_ms: the call's bytes, each once, at the device's copy rate; None on a CPU.
    """

    ms: float
    fla_ms: float | None = None
    floor_ms: float | None = None


class Clock:
    """Times calls on one device.

    Attributes:
        copy_tbps: the device's copy rate, TB/s; None on a CPU.
        no_fla: why nothing is compared with FLA; None if it is.
    """

    def __init__(self, device: torch.device) -> None:
        """Measure the copy rate, look for FLA.

        Args:
            device: where the demo runs.
        """
        on_gpu = device.type == "cuda"
        self.copy_tbps = timing.copy_rate().value if on_gpu else None
        self.no_fla = baselines.missing() if on_gpu else "there is no GPU"

    def prefill(self, model: ToyModel, backend: str, inputs: Tensors) -> Times:
        """Time a prefill: whole calls, as a caller makes them.

        Args:
            model: the family's model.
            backend: the implementation.
            inputs: of the prompts.

        Returns:
            Its times.
        """
        state, out = model.new_state(), torch.empty_like(inputs[2])
        ours = self._whole_call(lambda: model.prefill(inputs, state, out, backend))
        fla = None
        if self.no_fla is None:
            theirs = baselines.prefill(model.prefill_call, inputs, **model.constants)
            fla = self._whole_call(theirs)
        return Times(ours, fla, self._floor(inputs, out, state))

    def decode(self, model: ToyModel, backend: str, inputs: Tensors, state: torch.Tensor) -> Times:
        """Time a step: GPU time where our kernel runs, whole calls otherwise.

        Args:
            model: the family's model.
            backend: the implementation.
            inputs: of one token a prompt.
            state: after the prompts; left as it is.

        Returns:
            Its times, by the same method for both.
        """
        measure = self._gpu_time if backend == "cute" else self._whole_call
        after, out = state.clone(), torch.empty_like(inputs[2])
        ours = measure(lambda: model.decode(inputs, after, out, backend))
        fla = None
        if self.no_fla is None:
            bound = _decode_inputs(model, inputs, state)
            fla = measure(baselines.decode_baselines(bound.case)["fla"](bound))
        # a step reads the state and writes it
        return Times(ours, fla, self._floor(inputs, out, state, state))

    def _whole_call(self, call: Callable[[], object]) -> float:
        if self.copy_tbps is None:
            return timing.host_time(call, repeats=3).value
        return timing.call_times(call, batch=4, repeats=5, warmup=3).ms.value

    def _gpu_time(self, call: Callable[[], object]) -> float:
        return timing.graph_time([call]).value

    def _floor(self, inputs: Tensors, *others: torch.Tensor) -> float | None:
        if self.copy_tbps is None:
            return None
        nbytes = sum(x.numel() * x.element_size() for x in (*inputs, *others))
        return nbytes / self.copy_tbps / 1e9


def _decode_inputs(model: ToyModel, inputs: Tensors, state: torch.Tensor) -> DecodeInputs:
    """The demo's step in the form that the benchmarks' baselines take."""
    s, constants = model.sizes, model.constants
    case = DecodeCase(model.decode_call, "demo", "kernel", s.batch, 1, s.heads, s.heads, s.dim)
    q, k, v, *gates = inputs
    g, beta = gates if gates else (constants["g_gamma"], None)
    A_log, dt_bias = constants.get("A_log"), constants.get("dt_bias")
    return DecodeInputs(case, q, k, v, g, beta, A_log, dt_bias, state, None)
