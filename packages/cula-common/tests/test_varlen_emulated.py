"""The schedule's kernel and its consumers' helpers, run on the CPU by a PTX emulator.

Skipped without the emulator, and on a machine with a GPU: the emulator takes the process's CUDA
runtime over. There test_varlen_gpu.py runs the same kernels.
"""

import dataclasses
import random

import pytest
import torch

ptxemu = pytest.importorskip("ptxemu")
if torch.cuda.is_available():
    pytest.skip("a GPU is there to run the kernels", allow_module_level=True)
cutlass = pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import cuda.bindings.driver as cuda  # noqa: E402
import cutlass.cute as cute  # noqa: E402
from cutlass import Int32, Int64  # noqa: E402
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor  # noqa: E402

from cula.common.jit import compile_kernel  # noqa: E402
from cula.common.varlen import FixedPlan, VarlenPlan, chunk_rows, device, segment_rows  # noqa: E402
from cula.common.varlen.twin import ChunkRow, SegmentRow, workspace_words  # noqa: E402
from cula.common.varlen.warp import warp_schedule  # noqa: E402

CANARY = -77
# The logic of many sequences on few: several a thread, and tile after tile in the workspace.
WIDE = {"threads": 64, "per_thread": 4}
TILED = {"threads": 64, "per_thread": 2, "in_shared": False}
DTYPES = {32: torch.int32, 64: torch.int64}


@pytest.fixture(scope="module", autouse=True)
def emulator():
    ptxemu.install()


@pytest.fixture(scope="module")
def compiled():
    """config -> compiled kernel, each compiled once."""
    known = {}

    def get(config):
        if config not in known:
            known[config] = compile_kernel(config, "sm_90a")
        return known[config]

    return get


def launch(compiled, plan, cu, bits=64, blocks=None, **config):
    """The workspace that the kernel wrote, between canaries that it must not touch."""
    kernel = compiled(dataclasses.replace(plan.config(bits), **config))
    # More than enough scratch for configurations that the plan would not choose.
    words = max(plan.workspace_words, plan.scratch_at + 2 * plan.sequences + 64)
    buffer = torch.full((words + 8,), CANARY, dtype=torch.int32)
    args = [torch.tensor(cu, dtype=DTYPES[bits]), buffer[4 : words + 4], *plan.launch_args]
    if blocks:
        args[-1] = blocks
    with ptxemu.device(mode="lazy") as dev:
        kernel(*args)
        assert not dev.hazards, dev.report()
    assert (buffer[:4] == CANARY).all() and (buffer[-4:] == CANARY).all()
    if not config and plan.workspace_words == plan.scratch_at:
        assert (buffer[4 + plan.scratch_at :] == CANARY).all()
    return buffer[4 : 4 + plan.scratch_at].tolist()


def draw_cu(draw, sequences, tokens):
    """Lengths of every kind, wrong ones too."""
    kind = draw.choice(["any", "zeros", "none", "even", "falling", "wild"])
    if kind == "any":
        inner = sorted(draw.randint(0, tokens) for _ in range(max(sequences - 1, 0)))
        return [0, *inner, tokens] if sequences else [0]
    if kind == "zeros":
        cu = [0]
        for _ in range(sequences):
            cu.append(min(tokens, cu[-1] + draw.choice([0, 0, 1, tokens // 4])))
        return cu
    if kind == "none":
        return [draw.randint(0, tokens)] * (sequences + 1)
    if kind in ("even", "falling"):
        even = [n * tokens // max(sequences, 1) for n in range(sequences + 1)]
        return even if kind == "even" else even[::-1]
    # What would be in range if its upper half were dropped, and what would not.
    half = tokens // 2
    far = [-(2**63), 2**63 - 1, 2**31, 2**32, 2**32 + half, -1, half - 2**32, -(2**31) - 9]
    return [
        draw.choice([draw.randint(-5, tokens + 5), draw.choice(far)]) for _ in range(sequences + 1)
    ]


@pytest.mark.parametrize(
    ("config", "most"), [({}, 128), (WIDE, 256), (TILED, 400)], ids=["small", "wide", "tiled"]
)
def test_tables_equal_the_twin(compiled, config, most):
    draw = random.Random(1)
    for _ in range(60):
        edges = [0, 1, 2, 31, 32, 33, 127, 128, most]
        sequences = draw.choice([*edges, draw.randint(0, most), draw.randint(0, most)])
        tokens = draw.choice([0, 1, 63, 64, 65, draw.randint(0, 300), draw.randint(0, 20000)])
        plan = VarlenPlan(
            sequences,
            tokens,
            64,
            segment_chunks=draw.choice([0, 0, 1, 2, 17]),
            chunk_table=draw.random() < 0.7,
        )
        cu = draw_cu(draw, sequences, tokens)
        blocks = draw.choice([None, 1, 3])
        assert launch(compiled, plan, cu, blocks=blocks, **config) == workspace_words(plan, cu)


def test_int32_and_another_chunk(compiled):
    plan = VarlenPlan(5, 300, 16, segment_chunks=3)
    for cu in ([0, 65, 131, 202, 281, 300], [-5, 2**31 - 1, 7, -(2**31), 90, 40]):
        assert launch(compiled, plan, cu, bits=32) == workspace_words(plan, cu)


def test_longest_possible(compiled):
    """Sequences near 2^31 tokens, with chunks long enough to keep the tables short."""
    tokens = 2**31 - 1 - 2**24
    for segment_chunks in (0, 3):
        plan = VarlenPlan(3, tokens, 2**24, segment_chunks=segment_chunks)
        for cu in ([0, tokens, tokens, tokens], [0, 5, tokens - 1, 2**40]):
            assert launch(compiled, plan, cu) == workspace_words(plan, cu)


def test_as_compiled_for_hundreds(compiled):
    """The kernel of 129 to 4096 sequences as it is."""
    draw = random.Random(2)
    plan = VarlenPlan(300, 9000, 64, segment_chunks=5)
    cu = draw_cu(draw, 300, 9000)
    assert launch(compiled, plan, cu, blocks=2) == workspace_words(plan, cu)


def test_equal_lengths_keep_their_order(compiled):
    plan = VarlenPlan(100, 6400, 64)
    cu = [64 * n for n in range(101)]
    words = launch(compiled, plan, cu)
    assert words[16 : 16 + 800 : 8] == list(range(100))


@pytest.mark.parametrize("config", [{}, WIDE, TILED], ids=["small", "wide", "tiled"])
def test_no_hazard_in_any_order(compiled, config):
    plan = VarlenPlan(70, 3000, 64, segment_chunks=2)
    kernel = compiled(dataclasses.replace(plan.config(64), **config))
    workspace = torch.full((plan.scratch_at + 300,), CANARY, dtype=torch.int32)
    cu = torch.tensor(draw_cu(random.Random(3), 70, 3000))
    with ptxemu.device() as dev:
        args = (cu, workspace, *plan.launch_args[:-1], 2)
        assert dev.check(lambda: kernel(*args), [workspace]) == []


# -------------------------------------------------------------------- consumers' helpers
@dataclasses.dataclass(frozen=True)
class Probe:
    """Writes the rows it is told of: from the tables, from a warp's registers, or by arithmetic."""

    source: str
    chunk: int = 64

    def kernel(self):
        return ProbeKernel(self)


class ProbeKernel:
    def __init__(self, config):
        self.source, self.chunk = config.source, config.chunk

    def fake_args(self):
        words = lambda *shape: make_fake_tensor(  # noqa: E731
            Int32, (cute.sym_int(), *shape), (*shape, 1), assumed_align=16
        )
        return (
            make_fake_tensor(Int64, (cute.sym_int(),), (1,)),
            words(),
            words(8),
            words(4),
            *[Int32(1)] * 5,
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self,
        mCu: cute.Tensor,
        mW: cute.Tensor,
        mSegments: cute.Tensor,
        mChunks: cute.Tensor,
        sequences: Int32,
        tokens: Int32,
        segment_chunks: Int32,
        chunks_at: Int32,
        blocks: Int32,
        stream: cuda.CUstream,
    ):
        self.device(
            mCu, mW, mSegments, mChunks, sequences, tokens, segment_chunks, chunks_at
        ).launch(grid=[blocks, 1, 1], block=[64, 1, 1], stream=stream)

    @cute.kernel
    def device(
        self,
        mCu: cute.Tensor,
        mW: cute.Tensor,
        mSegments: cute.Tensor,
        mChunks: cute.Tensor,
        sequences: Int32,
        tokens: Int32,
        segment_chunks: Int32,
        chunks_at: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        first, step = block * 2 + thread // 32, blocks * 2
        if cutlass.const_expr(self.source == "warp"):
            schedule = warp_schedule(mCu, sequences, tokens, self.chunk, segment_chunks)
        for index in cutlass.range(first, mSegments.shape[0], step):
            if cutlass.const_expr(self.source == "warp"):
                row = schedule.segment(index)
            elif cutlass.const_expr(self.source == "fixed"):
                row = device.fixed_segment(index, sequences, tokens, self.chunk, segment_chunks)
            else:
                row = device.read_segment(mW.iterator, index)
            for i in cutlass.range_constexpr(8):
                mSegments[index, i] = row[i]
        for index in cutlass.range(first, mChunks.shape[0], step):
            if cutlass.const_expr(self.source == "warp"):
                row = schedule.chunk_row(index)
            elif cutlass.const_expr(self.source == "fixed"):
                row = device.fixed_chunk(index, tokens, self.chunk)
            else:
                row = device.read_chunk(mW.iterator, chunks_at, index)
            for i in cutlass.range_constexpr(4):
                mChunks[index, i] = row[i]


def probe(compiled, source, plan, cu, sequences, tokens, segments, chunks, workspace=None):
    """(segment rows, chunk rows) as the probe saw them."""
    kernel = compiled(Probe(source))
    mSegments = torch.full((segments, 8), CANARY, dtype=torch.int32)
    mChunks = torch.full((chunks, 4), CANARY, dtype=torch.int32)
    if workspace is None:
        workspace = torch.zeros(4, dtype=torch.int32)
    at = getattr(plan, "chunks_at", 0)
    args = (torch.tensor(cu), workspace, mSegments, mChunks, sequences, tokens)
    with ptxemu.device(mode="lazy") as dev:
        kernel(*args, plan.device_segment_chunks, at, 2)
        assert not dev.hazards, dev.report()
    return [tuple(r) for r in mSegments.tolist()], [tuple(r) for r in mChunks.tolist()]


def test_reading_rows(compiled):
    plan = VarlenPlan(6, 900, 64, segment_chunks=2)
    cu = [0, 65, 65, 300, 301, 700, 900]
    words = torch.tensor(workspace_words(plan, cu), dtype=torch.int32)
    sizes = (plan.max_segments, plan.max_chunks)
    segments, chunks = probe(compiled, "table", plan, cu, 6, 900, *sizes, words)
    rows = segment_rows(plan, cu)
    assert segments == rows + [SegmentRow()] * (plan.max_segments - len(rows))
    rows = chunk_rows(plan, cu)
    assert chunks == rows + [ChunkRow()] * (plan.max_chunks - len(rows))


def test_schedule_in_a_warp(compiled):
    draw = random.Random(4)
    for _ in range(60):
        sequences = draw.choice([0, 1, 2, 5, 31, 32, draw.randint(0, 32)])
        tokens = draw.choice([0, 1, 64, 65, draw.randint(0, 300), draw.randint(0, 9000)])
        plan = VarlenPlan(sequences, tokens, 64, segment_chunks=draw.choice([0, 0, 1, 2, 9]))
        assert plan.fits_warp
        cu = draw_cu(draw, sequences, tokens)
        # Two rows more than there can be: those beyond the last say so.
        sizes = (plan.max_segments + 2, plan.max_chunks + 2)
        segments, chunks = probe(compiled, "warp", plan, cu, sequences, tokens, *sizes)
        rows = segment_rows(plan, cu)
        assert segments == rows + [SegmentRow()] * (sizes[0] - len(rows))
        rows = chunk_rows(plan, cu)
        assert chunks == rows + [ChunkRow()] * (sizes[1] - len(rows))


@pytest.mark.parametrize("segment_chunks", [0, 1, 2, 3])
def test_fixed_lengths_by_arithmetic(compiled, segment_chunks):
    for batch, length in [(1, 0), (3, 0), (1, 1), (2, 64), (3, 65), (2, 300), (5, 129)]:
        fixed = FixedPlan(batch, length, 64, segment_chunks=segment_chunks)
        packed = VarlenPlan(batch, batch * length, 64, segment_chunks=segment_chunks)
        cu = [n * length for n in range(batch + 1)]
        sizes = (fixed.max_segments, fixed.max_chunks)
        segments, chunks = probe(compiled, "fixed", fixed, cu, batch, length, *sizes)
        # The table sorts equal segments by sequence; here whole rounds of sequences follow each
        # other. Both are longest first and in the order of time.
        rows = segment_rows(packed, cu)
        by_round = sorted(rows, key=lambda s: (s.segment, s.sequence))
        assert segments == by_round
        assert chunks == chunk_rows(packed, cu)


class TicketKernel:
    """Blocks draw units until none is left; unit -> its coordinates and who took it."""

    def fake_args(self):
        fake = lambda shape, stride: make_fake_tensor(Int32, shape, stride, assumed_align=16)  # noqa: E731
        return (
            fake((cute.sym_int(),), (1,)),
            fake((cute.sym_int(), 4), (4, 1)),
            Int32(1),
            Int32(1),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self,
        mW: cute.Tensor,
        mOut: cute.Tensor,
        heads: Int32,
        parts: Int32,
        stream: cuda.CUstream,
    ):
        self.device(mW, mOut, heads, parts).launch(grid=[3, 1, 1], block=[32, 1, 1], stream=stream)

    @cute.kernel
    def device(self, mW: cute.Tensor, mOut: cute.Tensor, heads: Int32, parts: Int32):
        thread, _, _ = cute.arch.thread_idx()
        if thread == 0:
            unit = device.take_ticket(mW.iterator, 3)
            while unit < mOut.shape[0]:
                for i, x in enumerate(device.unit_coords(unit, heads, parts)):
                    mOut[unit, i] = x
                mOut[unit, 3] += 1
                unit = device.take_ticket(mW.iterator, 3)


def test_tickets_and_units():
    plan = VarlenPlan(5, 200, 64, heads=3, parts=2)
    words = torch.tensor(workspace_words(plan, [0, 9, 9, 80, 90, 200]), dtype=torch.int32)
    out = torch.zeros((plan.max_units, 4), dtype=torch.int32)
    kernel = TicketKernel()
    call = cute.compile(kernel, *kernel.fake_args(), options="--gpu-arch sm_90a --enable-tvm-ffi")
    with ptxemu.device(resident="all", schedule="random", seed=1) as dev:
        call(words, out, 3, 2)
        assert not dev.hazards, dev.report()
    expected = [[s, h, p, 1] for s in range(5) for h in range(3) for p in range(2)]
    assert out.tolist() == expected
    assert words[8:16].tolist() == [0, 0, 0, plan.max_units + 3, 0, 0, 0, 0]
