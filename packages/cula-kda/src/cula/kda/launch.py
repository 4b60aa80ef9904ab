"""Our kernels' launches: what a kind of call needs is found once and kept.

What a key has to hold: cula.common.launches.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from cula.common import jit
from cula.common.kernel_args import loadable_states, loadable_tokens
from cula.common.launches import keep, on_device
from cula.kda.kernel_plan import KERNEL_ARCH, KernelPlan
from cula.kda.reference import KdaInputs
from cula.kda.sm90.config import CHUNK


@dataclass(frozen=True)
class Pool:
    """A call's states and how sequences find theirs; V-first by shape."""

    initial: torch.Tensor | None = None
    final: torch.Tensor | None = None
    state_indices: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    checkpoints: torch.Tensor | None = None


@dataclass(frozen=True)
class Launch:
    """Everything about a kind of call but its tensors and scale."""

    prep: Callable[..., None]
    scan: Callable[..., None]
    first: Callable[..., None] | None
    combine: Callable[..., None] | None
    schedule: Callable[..., None] | None
    plan: KernelPlan
    interval: int
    lower_bound: float

    def __call__(
        self,
        inputs: KdaInputs,
        pool: Pool,
        cu_seqlens: torch.Tensor | None,
        out: torch.Tensor,
        scale: float,
    ) -> None:
        """Launches on the current stream."""
        plan, device = self.plan, inputs.q.device
        work, chunks_at = None, 0
        if self.schedule is not None and plan.schedule is not None:
            varlen = plan.schedule
            work = torch.empty(varlen.workspace_words, dtype=torch.int32, device=device)
            self.schedule(cu_seqlens, work, *varlen.launch_args)
            chunks_at = varlen.chunks_at
        records = torch.empty(plan.record_words, dtype=torch.int32, device=device)
        self.prep(
            inputs.q,
            inputs.k,
            inputs.g,
            inputs.beta,
            inputs.A_log if plan.prep.gate in ("softplus", "bounded") else None,
            inputs.dt_bias if plan.prep.bias else None,
            work,
            records,
            scale,
            self.lower_bound,
            chunks_at,
            plan.shape.max_chunks,
            plan.prep_blocks,
        )
        given = (inputs.v, records, pool.initial)
        indices = (pool.state_indices, None if pool.mask is None else pool.mask.view(torch.uint8))
        numbers = (self.interval, plan.shape.device_segment_chunks)
        segments = None
        if self.first is not None:
            segments = torch.empty(plan.segment_states, dtype=torch.float32, device=device)
            units = plan.first_units
            self.first(*given, None, *indices, None, segments, work, out, *numbers, units, units)
        if self.combine is not None:
            self.combine(segments, work, *plan.combine_args)
        self.scan(
            *given,
            pool.final,
            *indices,
            pool.checkpoints,
            segments,
            work,
            out,
            *numbers,
            plan.shape.max_units,
            plan.scan_blocks,
        )


_launches: dict[tuple, Callable[..., None]] = {}


def kept(key: tuple | None) -> Callable[..., None] | None:
    """The launch of an earlier call of this kind."""
    try:
        return None if key is None else _launches.get(key)
    except TypeError:  # a number that is a list: the plan says so
        return None


def launch_of(
    plan: KernelPlan,
    device: torch.device,
    cu_seqlens: torch.Tensor | None,
    interval: int | None,
    lower_bound: float | None,
) -> Callable[..., None]:
    """The launch of a plan, compiled if need be."""
    schedule = None
    if plan.schedule is not None and cu_seqlens is not None:
        config = plan.schedule.config(8 * cu_seqlens.element_size(), early_release=True)
        schedule = jit.compiled(config, KERNEL_ARCH)

    def compiled(config):
        return None if config is None else jit.compiled(config, KERNEL_ARCH)

    prep, first, combine, scan = map(compiled, (plan.prep, plan.first, plan.combine, plan.scan))
    assert prep is not None and scan is not None
    launch = Launch(
        prep,
        scan,
        first,
        combine,
        schedule,
        plan,
        interval or CHUNK,
        lower_bound or 0.0,
    )
    return on_device(launch, device)


def run(
    plan: KernelPlan,
    key: tuple | None,
    inputs: KdaInputs,
    pool: Pool,
    cu_seqlens: torch.Tensor | None,
    out: torch.Tensor,
    *,
    scale: float,
    interval: int | None,
    lower_bound: float | None,
) -> None:
    """Runs a planned call. Its launch is kept under `key` if no argument had to be copied.

    inputs: with the gate's parameters as `run.with_numbers` makes them.
    """
    launch = launch_of(plan, inputs.q.device, cu_seqlens, interval, lower_bound)
    used = KdaInputs(
        loadable_tokens(inputs.q),
        loadable_tokens(inputs.k),
        loadable_tokens(inputs.v),
        loadable_tokens(inputs.g),
        inputs.beta,
        inputs.A_log,
        inputs.dt_bias,
    )
    initial = pool.initial
    if initial is not None and initial is not pool.final and not loadable_states(initial):
        initial = initial.clone(memory_format=torch.contiguous_format)
    near = Pool(
        initial,
        pool.final,
        _contiguous(pool.state_indices),
        _contiguous(pool.mask),
        pool.checkpoints,
    )
    bounds, target = _contiguous(cu_seqlens), loadable_tokens(out)
    launch(used, near, bounds, target, scale)
    if target is not out:
        out.copy_(target)
    given = (*inputs, pool.initial, pool.state_indices, pool.mask, cu_seqlens, out)
    taken = (*used, near.initial, near.state_indices, near.mask, bounds, target)
    keep(_launches, key, launch, given, taken)


def _contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.contiguous()
