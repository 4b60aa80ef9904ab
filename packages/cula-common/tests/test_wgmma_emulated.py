"""Warpgroup products, and states in memory around them, run on the CPU by a PTX emulator.

Skipped without the emulator, and on a machine with a GPU: the emulator takes the process's CUDA
runtime over. There the families' own tests run the kernels that are made of these.
"""

from dataclasses import dataclass

import pytest
import torch

ptxemu = pytest.importorskip("ptxemu")
if torch.cuda.is_available():
    pytest.skip("a GPU is there to run the kernels", allow_module_level=True)
cutlass = pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import cuda.bindings.driver as cuda  # noqa: E402
import cutlass.cute as cute  # noqa: E402
from cutlass import BFloat16, Float32, Int32  # noqa: E402
from cutlass.cute.nvgpu import warpgroup  # noqa: E402
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor  # noqa: E402

from cula.common.cute.smem import SmemAllocator  # noqa: E402
from cula.common.cute.stand_ins import fake_states, fake_vector  # noqa: E402
from cula.common.cute.states import HeadState, slot_of  # noqa: E402
from cula.common.cute.wgmma import Product, columns_layout, rows_layout  # noqa: E402
from cula.common.jit import compile_kernel  # noqa: E402
from cula.common.kernel_args import States  # noqa: E402
from cula.common.testing import assert_close  # noqa: E402

K, N, HEADS = 128, 64, 2
V_FIRST = States("fp32", True)
FACTORS = 0.5, 4.0  # of a thread's two rows


@dataclass(frozen=True)
class Case:
    """A is a state (64 of its value channels), B [N, K], and C, a state of N key channels, 2 A B^T.

    states: of A and C. The rest as `Product` takes it.
    """

    states: States = V_FIRST
    a_in_registers: bool = True
    a_mn_major: bool = False
    b_mn_major: bool = False

    def kernel(self):
        return Multiply(self)


class Multiply:
    """A block, of one warpgroup, takes one sequence's slot of A and C, and the last head."""

    def __init__(self, config):
        self.config = config

    def fake_args(self) -> tuple:
        return (
            fake_states(self.config.states, HEADS, 128, K),
            make_fake_tensor(BFloat16, (N, K), (K, 1), assumed_align=16),
            fake_vector(Int32),
            fake_states(self.config.states, HEADS, 128, N),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self,
        mA: cute.Tensor,  # (slots, HV, 128, K)
        mB: cute.Tensor,  # (N, K)
        mIndex: cute.Tensor,  # (sequences)
        mC: cute.Tensor,  # (slots, HV, 128, N)
        stream: cuda.CUstream,
    ):
        c = self.config
        lA = (columns_layout if c.a_mn_major else rows_layout)(64, K, 1, BFloat16)
        lB = (columns_layout if c.b_mn_major else rows_layout)(N, K, 1, BFloat16)
        self.kernel(mA, mB, mIndex, mC, lA, lB).launch(
            grid=[mIndex.shape[0], 1, 1], block=[128, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mA: cute.Tensor,
        mB: cute.Tensor,
        mIndex: cute.Tensor,
        mC: cute.Tensor,
        lA: cute.ComposedLayout,
        lB: cute.ComposedLayout,
    ):
        slot = slot_of(mIndex, cute.arch.block_idx()[0], mA.shape[0])
        memory = SmemAllocator()
        sA = memory.allocate_tensor(BFloat16, lA.outer, 1024, swizzle=lA.inner)
        sB = memory.allocate_tensor(BFloat16, lB.outer, 1024, swizzle=lB.inner)
        if slot >= 0:
            self.multiply(mA, mB, mC, sA, sB, slot)

    @cute.jit
    def multiply(self, mA, mB, mC, sA, sB, slot):
        c, thread = self.config, cute.arch.thread_idx()[0]
        head, value = HEADS - 1, 64
        for row in cutlass.range(N):
            sB[row, thread, 0] = mB[row, thread]
            if cutlass.const_expr(not c.a_in_registers):
                sA[row, thread, 0] = BFloat16(Float32(mA[slot, head, value + row, thread]))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        majors = {"a_mn_major": c.a_mn_major, "b_mn_major": c.b_mn_major}
        product = Product(N, BFloat16, a_in_registers=c.a_in_registers, **majors)
        if cutlass.const_expr(c.a_in_registers):
            S = Product(K, BFloat16, a_in_registers=True).accumulator(thread)
            HeadState(mA, slot, head, value, thread, K, c.states.v_first).load(S)
            a, rounded = product.a_registers(S)
            rounded.store(S.load().to(BFloat16))
        else:
            a = product.a_operand(thread, sA)[(None, None, None, 0)]
        C, b = product.accumulator(thread), product.b_operand(thread, sB)
        warpgroup.fence()
        product.issue(C, a, b, 0)
        product.issue(C, a, b, 0, add=True)
        warpgroup.wait_group(0)
        HeadState(mC, slot, head, value, thread, N, c.states.v_first).store(C, FACTORS)


@pytest.fixture(scope="module", autouse=True)
def emulator():
    ptxemu.install()


CASES = {
    "A from registers": Case(),
    "K-first": Case(States("fp32", False)),
    "bfloat16": Case(States("bf16", True)),
    "bfloat16, K-first, B by columns": Case(States("bf16", False), b_mn_major=True),
    "A from shared memory": Case(a_in_registers=False),
    "A and B by columns": Case(a_in_registers=False, a_mn_major=True, b_mn_major=True),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_products_between_states(case: Case) -> None:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[case.states.dtype]
    kernel, slots = compile_kernel(case, "sm_90a"), 3
    A = torch.randn(slots, HEADS, 128, K).bfloat16().to(dtype)
    B = torch.randn(N, K).bfloat16()
    C = torch.full((slots, HEADS, 128, N), -7.0, dtype=dtype)
    if not case.states.v_first:
        A, C = (x.mT.contiguous().mT for x in (A, C))
    with ptxemu.device(mode="lazy") as device:
        kernel(A, B, torch.tensor([-1, 1, slots], dtype=torch.int32), C)
        assert not device.hazards, device.report()
    factors = torch.tensor(FACTORS).double().repeat_interleave(8).repeat(4)[:, None]
    right = 2 * factors * (A[1, 1, 64:].double() @ B.double().T)
    assert_close("C", C[1, 1, 64:], right, 1e-5 if dtype == torch.float32 else 4e-3)
    C[1, 1, 64:] = -7.0
    assert (C == -7.0).all(), "written where no sequence's slot is"
