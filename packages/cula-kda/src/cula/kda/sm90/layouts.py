"""Shared-memory layouts of the prefill kernels, and their warpgroup products."""

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup


def rows_layout(rows: int, columns: int, stages: int, dtype):
    """(rows, columns, stage), columns contiguous: a K-major operand, 128-byte swizzle."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
    return cute.tile_to_shape(atom, (rows, columns, stages), order=(0, 1, 2))


def columns_layout(columns: int, rows: int, stages: int, dtype):
    """(columns, rows, stage): the same bytes as `rows_layout`, seen as an MN-major operand."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.MN_SW128, dtype)
    return cute.tile_to_shape(atom, (columns, rows, stages), order=(1, 0, 2))


class Product:
    """A 64 x n product of one warpgroup: A from registers, B from shared memory.

    Two tiled products, one that starts from zero and one that adds: a field set inside a dynamic
    loop would not survive tracing.
    """

    def __init__(self, n: int, dtype, *, b_mn_major: bool = False):
        op = warpgroup.MmaF16BF16Op(
            dtype,
            Float32,
            (64, n, 16),
            warpgroup.OperandSource.RMEM,
            OperandMajorMode.K,
            OperandMajorMode.MN if b_mn_major else OperandMajorMode.K,
        )
        self.n, self.dtype = n, dtype
        self.zeroing, self.adding = (
            cute.make_tiled_mma(cute.make_mma_atom(op), (1, 1, 1)) for _ in range(2)
        )
        self.zeroing.set(warpgroup.Field.ACCUMULATE, False)
        self.adding.set(warpgroup.Field.ACCUMULATE, True)

    def accumulator(self, thread):
        slice_ = self.adding.get_slice(thread)
        return cute.make_rmem_tensor(slice_.partition_shape_C((64, self.n)), Float32)

    def operand(self, thread, tensor):
        """Descriptors (MMA, 1, K / 16, stage) of B in shared memory."""
        return self.adding.make_fragment_B(self.adding.get_slice(thread).partition_B(tensor))

    def registers(self, accumulator):
        """Registers of an A that was an accumulator: in the order of A, and in the accumulator's.

        A 64 x n accumulator rounded to 16 bits already lies as A does.
        """
        c, a = accumulator.layout, self.adding.tv_layout_A.shape[1]
        layout = cute.make_layout(
            (a, c.shape[1], (c.shape[2], cute.size(c, mode=[0]) // cute.size(a))),
            stride=(
                c.stride[0],
                c.stride[1],
                (c.stride[2], cute.size(a, mode=[2]) * c.stride[0][2]),
            ),
        )
        fragments = cute.make_rmem_tensor_like(layout, self.dtype)
        return fragments, cute.make_tensor(fragments.iterator, c)

    def issue(self, accumulator, a, b, stage, *, add: bool = False):
        """Issues and commits accumulator (+)= a b; the caller fences before."""
        b = b[(None, None, None, stage)]
        for k in range(cute.size(a, mode=[2])):
            mma = self.adding if add or k else self.zeroing
            cute.gemm(mma, accumulator, a[(None, None, k)], b[(None, None, k)], accumulator)
        warpgroup.commit_group()
