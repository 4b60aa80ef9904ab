"""Hopper's warpgroup products (wgmma): tiles in shared memory, and tiled products of them."""

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


def slices_layout(columns: int, rows: int, slices: int, dtype):
    """(columns, rows, slice), 16 columns contiguous, 32-byte swizzle: an MN-major tile in slices.

    Of 16 columns each, a slice's rows one after the other: with all columns in one slice, and with
    16 in so many, the same bytes.
    """
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.MN_SW32, dtype)
    return cute.tile_to_shape(atom, (columns, rows, slices), order=(1, 0, 2))


class Product:
    """A 64 x n product of one warpgroup: A from registers or shared memory, B from shared memory.

    Two tiled products, one that starts from zero and one that adds: a field set inside a dynamic
    loop would not survive tracing. `adding` also says where an accumulator's elements lie.

    Args:
        n: columns of B and of the accumulator.
        dtype: of A and B, 16 bits; the accumulator is Float32.
        a_in_registers: A was an accumulator: see `a_registers`. Else see `a_operand`.
        a_mn_major, b_mn_major: the operand's tile is a `columns_layout`, not a `rows_layout`.
    """

    def __init__(
        self,
        n: int,
        dtype,
        *,
        a_in_registers: bool = False,
        a_mn_major: bool = False,
        b_mn_major: bool = False,
    ):
        source = warpgroup.OperandSource
        major = {False: OperandMajorMode.K, True: OperandMajorMode.MN}
        op = warpgroup.MmaF16BF16Op(
            dtype,
            Float32,
            (64, n, 16),
            source.RMEM if a_in_registers else source.SMEM,
            major[a_mn_major],
            major[b_mn_major],
        )
        self.n, self.dtype = n, dtype
        self.zeroing, self.adding = (
            cute.make_tiled_mma(cute.make_mma_atom(op), (1, 1, 1)) for _ in range(2)
        )
        self.zeroing.set(warpgroup.Field.ACCUMULATE, False)
        self.adding.set(warpgroup.Field.ACCUMULATE, True)

    def accumulator(self, thread):
        """This thread's registers of a 64 x n tile."""
        shape = self.adding.get_slice(thread).partition_shape_C((64, self.n))
        return cute.make_rmem_tensor(shape, Float32)

    def a_operand(self, thread, tensor):
        """Descriptors (MMA, 1, K / 16, stage) of A in shared memory."""
        return self.adding.make_fragment_A(self.adding.get_slice(thread).partition_A(tensor))

    def b_operand(self, thread, tensor):
        """Descriptors (MMA, 1, K / 16, stage) of B in shared memory."""
        return self.adding.make_fragment_B(self.adding.get_slice(thread).partition_B(tensor))

    def a_registers(self, accumulator):
        """Registers of an A that was an accumulator: in the order of A, and in the accumulator's.

        A 64 x n accumulator rounded to 16 bits already lies as A does.
        """
        c, a = accumulator.layout, self.adding.tv_layout_A.shape[1]
        along_k = (c.stride[2], cute.size(a, mode=[2]) * c.stride[0][2])
        layout = cute.make_layout(
            (a, c.shape[1], (c.shape[2], cute.size(c, mode=[0]) // cute.size(a))),
            stride=(c.stride[0], c.stride[1], along_k),
        )
        fragments = cute.make_rmem_tensor_like(layout, self.dtype)
        return fragments, cute.make_tensor(fragments.iterator, c)

    def issue(self, accumulator, a, b, stage, *, add: bool = False):
        """Issues and commits accumulator (+)= a b, with b's stage; the caller fences before."""
        b = b[(None, None, None, stage)]
        for k in range(cute.size(a, mode=[2])):
            mma = self.adding if add or k else self.zeroing
            cute.gemm(mma, accumulator, a[(None, None, k)], b[(None, None, k)], accumulator)
        warpgroup.commit_group()
