"""Vector loads and stores between memory of any element type and float32 registers."""

from collections.abc import Sequence

import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32
from cutlass._mlir import ir
from cutlass._mlir.dialects import vector as mlir_vector

# Read or written once: keep out of L1, and let L2 replace it first.
STREAM_LOAD = {"level1_eviction_priority": "evict_no_allocate"}
STREAM_STORE = {"cop": "cs"}


def load_floats(pointer, dtype, count: int, **hints) -> list:
    """Load `count` consecutive elements as Float32, in one aligned access of 4, 8 or 16 bytes."""
    words = count * dtype.width // 32
    if words == 1:
        raw = [cute.arch.load(pointer, Int32, **hints)]
    else:
        packed = cute.arch.load(pointer, ir.VectorType.get([words], Int32.mlir_type), **hints)
        raw = [Int32(mlir_vector.extract(packed, [], [i])) for i in range(words)]
    return [x for word in raw for x in unpack(word, dtype)]


def store_floats(pointer, dtype, values: Sequence, **hints) -> None:
    """Round Float32 values to dtype and store them in one access; reverses `load_floats`."""
    per_word = 32 // dtype.width
    words = [pack(values[i : i + per_word], dtype) for i in range(0, len(values), per_word)]
    if len(words) == 1:
        cute.arch.store(pointer, words[0], **hints)
    else:
        kind = ir.VectorType.get([len(words)], Int32.mlir_type)
        cute.arch.store(
            pointer, mlir_vector.from_elements(kind, [w.ir_value() for w in words]), **hints
        )


def unpack(word: Int32, dtype) -> list:
    """The one or two elements in a 32-bit word as Float32."""
    if dtype is Float32:
        return [word.bitcast(Float32)]
    if dtype is BFloat16:  # a bfloat16 is the upper half of a float32
        return [(word << 16).bitcast(Float32), (word & Int32(-65536)).bitcast(Float32)]
    raise TypeError(f"dtype {dtype}; must be Float32 or BFloat16")


def pack(values: Sequence, dtype) -> Int32:
    """The reverse of `unpack`, rounding to nearest even."""
    if dtype is Float32:
        return values[0].bitcast(Int32)
    if dtype is BFloat16:
        low, high = values
        return Int32(
            cute.arch.inline_ptx(
                "cvt.rn.bf16x2.f32 {$w0}, {$r0}, {$r1};",
                write_only_types=[Int32],
                read_only_args=[high, low],
            )
        )
    raise TypeError(f"dtype {dtype}; must be Float32 or BFloat16")


def load_shared(pointer, count: int) -> list:
    """`count` (1, 2 or 4) consecutive Float32 of shared memory, aligned to their size."""
    piece = cute.make_tensor(pointer, cute.make_layout(count))
    registers = cute.make_rmem_tensor(count, Float32)
    cute.autovec_copy(piece, registers)
    return [registers[i] for i in range(count)]
