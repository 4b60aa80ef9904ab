"""Our kernels' launches: what a kind of call needs is found once and kept.

A prefill of a few thousand tokens takes the GPU tens of microseconds, so the host's share counts.
What a key has to hold: cula.common.launches.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from cula.common import jit
from cula.common.kernel_args import loadable_states, loadable_tokens
from cula.common.launches import keep, on_device
from cula.common.varlen import VarlenPlan
from cula.lightning.call import Plan
from cula.lightning.kernel_plan import KERNEL_ARCH
from cula.lightning.sm90.config import CHUNK


@dataclass(frozen=True)
class Launch:
    """Everything about a kind of call but its tensors and scale."""

    kernel: Callable[..., None]
    first_pass: Callable[..., None] | None
    prefix: Callable[..., None] | None
    prefix_args: tuple[int, int, int]
    segment_states: tuple[int, ...]
    segment_chunks: int
    schedule: Callable[..., None] | None
    schedule_args: tuple[int, ...]
    workspace_words: int
    interval: int
    units: int
    blocks: int

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g_gamma: torch.Tensor,
        initial: torch.Tensor | None,
        final: torch.Tensor | None,
        state_indices: torch.Tensor | None,
        mask: torch.Tensor | None,
        checkpoints: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
        out: torch.Tensor,
        scale: float,
    ) -> None:
        """Launches on the current stream. States are V-first by shape."""
        workspace = None
        if self.schedule is not None:
            workspace = torch.empty(self.workspace_words, dtype=torch.int32, device=q.device)
            self.schedule(cu_seqlens, workspace, *self.schedule_args)
        local = None
        if self.first_pass is not None:
            local = torch.empty(self.segment_states, dtype=torch.float32, device=q.device)
        given = (q, k, v, g_gamma, initial)
        indices = (state_indices, None if mask is None else mask.view(torch.uint8))
        numbers = (scale, self.interval, self.segment_chunks, self.units, self.blocks)
        if self.first_pass is not None:
            self.first_pass(*given, None, *indices, None, local, workspace, out, *numbers)
            if self.prefix is not None:
                self.prefix(local, g_gamma, workspace, *self.prefix_args)
        self.kernel(*given, final, *indices, checkpoints, local, workspace, out, *numbers)


_launches: dict[tuple, Callable[..., None]] = {}


def kept(key: tuple | None) -> Callable[..., None] | None:
    """The launch of an earlier call of this kind."""
    try:
        return None if key is None else _launches.get(key)
    except TypeError:  # a number that is a list: the plan says so
        return None


def launch_of(
    plan: Plan, device: torch.device, cu_seqlens: torch.Tensor | None
) -> Callable[..., None]:
    """The launch of a plan, compiled if need be."""
    chosen, shape = plan.kernel, plan.kernel.shape
    first_pass, prefix, schedule, schedule_args, words = None, None, None, (), 0
    if chosen.first_pass is not None:
        first_pass = jit.compiled(chosen.first_pass, KERNEL_ARCH)
    if chosen.prefix is not None:
        prefix = jit.compiled(chosen.prefix, KERNEL_ARCH)
    if cu_seqlens is not None and isinstance(shape, VarlenPlan):
        schedule = jit.compiled(
            shape.config(8 * cu_seqlens.element_size(), early_release=True), KERNEL_ARCH
        )
        schedule_args, words = shape.launch_args, shape.workspace_words
    launch = Launch(
        kernel=jit.compiled(chosen.config, KERNEL_ARCH),
        first_pass=first_pass,
        prefix=prefix,
        prefix_args=chosen.prefix_args,
        segment_states=(shape.max_segments, plan.dims.HV, plan.dims.V, plan.dims.K),
        segment_chunks=shape.device_segment_chunks,
        schedule=schedule,
        schedule_args=schedule_args,
        workspace_words=words,
        interval=plan.checkpoint_interval or CHUNK,
        units=shape.max_units,
        blocks=chosen.blocks,
    )
    return on_device(launch, device)


def run(
    plan: Plan,
    key: tuple | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g_gamma: torch.Tensor,
    initial: torch.Tensor | None,
    final: torch.Tensor | None,
    state_indices: torch.Tensor | None,
    mask: torch.Tensor | None,
    checkpoints: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Runs a planned call. Its launch is kept under `key` if no argument had to be copied."""
    launch = launch_of(plan, q.device, cu_seqlens)
    given = (q, k, v, out, state_indices, mask, cu_seqlens, initial)
    q, k, v, target = (loadable_tokens(x) for x in (q, k, v, out))
    state_indices, mask, cu_seqlens = (
        x if x is None else x.contiguous() for x in (state_indices, mask, cu_seqlens)
    )
    if initial is not None and initial is not final and not loadable_states(initial):
        initial = initial.clone(memory_format=torch.contiguous_format)
    launch(
        q,
        k,
        v,
        g_gamma,
        initial,
        final,
        state_indices,
        mask,
        checkpoints,
        cu_seqlens,
        target,
        plan.form.scale,
    )
    if target is not out:
        out.copy_(target)
    used = (q, k, v, target, state_indices, mask, cu_seqlens, initial)
    keep(_launches, key, launch, given, used)
