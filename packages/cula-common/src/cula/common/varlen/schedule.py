"""The schedule on the host: the workspace's sections by name, and the call that fills them."""

from dataclasses import dataclass

import torch

from cula.common.checks import INDEX_DTYPES, require, require_tensor
from cula.common.varlen.plan import (
    CHUNK_WORDS,
    HEADER_WORDS,
    SEGMENT_WORDS,
    TICKETS,
    TICKETS_AT,
    VarlenPlan,
)
from cula.common.varlen.twin import workspace_words


@dataclass(frozen=True)
class Schedule:
    """A plan and its int32 workspace. The properties are views, for tests and for plain PyTorch."""

    plan: VarlenPlan
    workspace: torch.Tensor

    @property
    def header(self) -> torch.Tensor:
        """[16]: chunks, segments, end of the last sequence, zeros; from word 8 the tickets."""
        return self.workspace[:HEADER_WORDS]

    @property
    def tickets(self) -> torch.Tensor:
        """[8] counters for persistent kernels, zero after every build."""
        return self.workspace[TICKETS_AT : TICKETS_AT + TICKETS]

    @property
    def segments(self) -> torch.Tensor:
        """[max_segments, 8]: rows of twin.SegmentRow, longest first."""
        return self._table(self.plan.segments_at, self.plan.max_segments, SEGMENT_WORDS)

    @property
    def chunks(self) -> torch.Tensor:
        """[max_chunks, 4]: rows of twin.ChunkRow; [0, 4] where the plan wants no such table."""
        return self._table(self.plan.chunks_at, self.plan.chunk_rows, CHUNK_WORDS)

    @property
    def starts(self) -> torch.Tensor:
        """[N + 1]: cu_seqlens after clamping."""
        return self._offsets(self.plan.starts_at)

    @property
    def chunk_starts(self) -> torch.Tensor:
        """[N + 1]: the number of chunks before each sequence."""
        return self._offsets(self.plan.chunk_starts_at)

    @property
    def segment_starts(self) -> torch.Tensor:
        """[N + 1]: the number of segments before each sequence."""
        return self._offsets(self.plan.segment_starts_at)

    def _table(self, at: int, rows: int, words: int) -> torch.Tensor:
        return self.workspace[at : at + rows * words].view(rows, words)

    def _offsets(self, at: int) -> torch.Tensor:
        return self.workspace[at : at + self.plan.sequences + 1]


def build_schedule(
    plan: VarlenPlan,
    cu_seqlens: torch.Tensor,
    workspace: torch.Tensor | None = None,
    *,
    early_release: bool = False,
) -> Schedule:
    """Fill the tables of `plan` from the values of `cu_seqlens`, on the device that holds it.

    On a GPU: one launch on the current stream, no synchronisation, nothing allocated where
    `workspace` is given; it can be captured in a CUDA graph and replayed after `cu_seqlens`
    changed. Values out of order or out of range are clamped (twin.clamped_starts). On the CPU
    the tables are made in Python.

    Args:
        plan: for len(cu_seqlens) - 1 sequences.
        cu_seqlens: int32 or int64 [N + 1], contiguous.
        workspace: int32 [>= plan.workspace_words] on the same device, contiguous, from a
        multiple of 16 bytes on;
            allocated if absent. Its contents before do not matter.
        early_release: see ScheduleConfig.

    Raises:
        TypeError, ValueError: an argument that is not as described.
    """
    require_tensor(
        "cu_seqlens",
        cu_seqlens,
        shape=(plan.sequences + 1,),
        dims="[N + 1]",
        dtypes=INDEX_DTYPES,
    )
    require(cu_seqlens.is_contiguous(), "cu_seqlens", cu_seqlens.stride(), "must be contiguous")
    device = cu_seqlens.device
    if workspace is None:
        workspace = torch.empty(plan.workspace_words, dtype=torch.int32, device=device)
    else:
        require_tensor(
            "workspace",
            workspace,
            shape=(None,),
            dims="[words]",
            dtypes=(torch.int32,),
            device=device,
        )
        size = workspace.numel()
        rule = f"must hold {plan.workspace_words} words, contiguous"
        require(size >= plan.workspace_words and workspace.is_contiguous(), "workspace", size, rule)
        address = workspace.data_ptr()
        require(address % 16 == 0, "workspace", hex(address), "must start at a multiple of 16")
    if device.type == "cpu":
        words = workspace_words(plan, cu_seqlens.tolist())
        workspace[: plan.scratch_at] = torch.tensor(words, dtype=torch.int32)
    else:
        from cula.common.arch import arch_of
        from cula.common.jit import compiled

        config = plan.config(8 * cu_seqlens.element_size(), early_release=early_release)
        launch = compiled(config, arch_of(device))
        with torch.cuda.device(device):
            launch(cu_seqlens, workspace, *plan.launch_args)
    return Schedule(plan, workspace)
