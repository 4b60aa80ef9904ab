"""PTX instructions on 32-bit words, for device code that keeps two 16-bit elements a register.

Plain functions that CuTe DSL traces. A shared-memory address is an Int32, a global one an Int64;
`offset` is a constant that goes into the instruction. Words are Int32, numbers Float32.
"""

from cutlass import Boolean, Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T

_TYPES = {
    "f": (Float32, T.f32),
    "r": (Int32, T.i32),
    "l": (Int64, T.i64),
    "b": (Boolean, T.bool),
}


def _instruction(
    text: str, results: str, operands, kinds: str, *, effects: bool, early: bool = False
):
    """Emits `text`. Kinds of registers: f, r (32-bit word), l or b (predicate).

    early: results are written before all operands have been read.
    """
    values = [_TYPES[kind][0](x).ir_value() for x, kind in zip(operands, kinds, strict=True)]
    types = [_TYPES[kind][1]() for kind in results]
    if len(types) > 1:
        whole = llvm.StructType.get_literal(types)
    else:
        whole = types[0] if types else None
    found = llvm.inline_asm(
        whole,
        values,
        text,
        ",".join([*(("=&" if early else "=") + kind for kind in results), *kinds]),
        has_side_effects=effects,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    if not types:
        return None
    if len(types) == 1:
        return _TYPES[results][0](found)
    return [
        _TYPES[kind][0](llvm.extractvalue(t, found, [i]))
        for i, (kind, t) in enumerate(zip(results, types, strict=True))
    ]


def _registers(first: int, count: int) -> str:
    names = [f"${i}" for i in range(first, first + count)]
    return names[0] if count == 1 else "{" + ",".join(names) + "}"


def _vector(count: int) -> str:
    return "" if count == 1 else f".v{count}"


# -------------------------------------------------------------------- memory
def load_shared(address, offset: int, count: int, kind: str = "r") -> list:
    """`count` (1, 2, 4) words, or with kind "f" numbers, aligned to their size."""
    text = f"ld.shared{_vector(count)}.b32 {_registers(0, count)}, [${count}+{offset}];"
    found = _instruction(text, kind * count, [address], "r", effects=True)
    return [found] if count == 1 else found


def store_shared(address, offset: int, values, kind: str = "r") -> None:
    count = len(values)
    text = f"st.shared{_vector(count)}.b32 [$0+{offset}], {_registers(1, count)};"
    _instruction(text, "", [address, *values], "r" + kind * count, effects=True)


def store_shared_if(condition, address, offset: int, value, kind: str = "r") -> None:
    """Stores one word where the condition holds, without a branch."""
    text = f"@$2 st.shared.b32 [$0+{offset}], $1;"
    _instruction(text, "", [address, value, condition], "r" + kind + "b", effects=True)


def store_shared_zeros_if(condition, address) -> None:
    """16 bytes, without a branch."""
    text = "{ .reg .b32 z; mov.b32 z, 0; @$1 st.shared.v4.b32 [$0], {z, z, z, z}; }"
    _instruction(text, "", [address, condition], "rb", effects=True)


def store_shared_half(address, offset: int, value) -> None:
    """Stores a number rounded to float16."""
    text = f"{{ .reg .b16 h; cvt.rn.f16.f32 h, $1; st.shared.b16 [$0+{offset}], h; }}"
    _instruction(text, "", [address, value], "rf", effects=True)


def store_shared_half_if(condition, address, value) -> None:
    text = "{ .reg .b16 h; cvt.rn.f16.f32 h, $1; @$2 st.shared.b16 [$0], h; }"
    _instruction(text, "", [address, value, condition], "rfb", effects=True)


def store_shared_halves(address, low: int, high: int, word) -> None:
    """Stores the halves of a word at two offsets."""
    text = (
        "{ .reg .b16 l, h; mov.b32 {l, h}, $1; "
        f"st.shared.b16 [$0+{low}], l; st.shared.b16 [$0+{high}], h; }}"
    )
    _instruction(text, "", [address, word], "rr", effects=True)


def load_global_if(condition, address, offset: int, count: int, otherwise: int) -> list:
    """`count` words, or others where the condition fails; read once, so kept out of L1."""
    others = " ".join(f"mov.b32 ${i}, {otherwise};" for i in range(count))
    where = f"[${count}+{offset}]"
    load = f"@${count + 1} ld.global.L1::no_allocate{_vector(count)}.b32"
    text = f"{others} {load} {_registers(0, count)}, {where};"
    operands = [address, condition]
    found = _instruction(text, "r" * count, operands, "lb", effects=True, early=True)
    return [found] if count == 1 else found


def store_global(address, offset: int, words) -> None:
    text = f"st.global.v4.b32 [$0+{offset}], {_registers(1, 4)};"
    _instruction(text, "", [address, *words], "lrrrr", effects=True)


def store_global_if(condition, address, offset: int, words) -> None:
    """Without a branch."""
    text = f"@$5 st.global.v4.b32 [$0+{offset}], {_registers(1, 4)};"
    _instruction(text, "", [address, *words, condition], "lrrrrb", effects=True)


def copy_to_shared(shared, source, size, barrier, blocks: int = 1) -> None:
    """Starts a copy of `size` bytes to shared memory, by one thread; completes on `barrier`.

    With several blocks: to the same places of the cluster's first so many, and on their barriers.
    """
    form, mask = ("", "") if blocks == 1 else (".multicast::cluster", f", {2**blocks - 1}")
    text = (
        f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes{form} "
        f"[$0], [$1], $2, [$3]{mask};"
    )
    _instruction(text, "", [shared, source, size, barrier], "rlrr", effects=True)


def copy_from_shared(shared, target, size: int) -> None:
    """Starts a copy of `size` bytes to memory, by one thread; part of its next bulk group."""
    text = f"cp.async.bulk.global.shared::cta.bulk_group [$1], [$0], {size};"
    _instruction(text, "", [shared, target], "rl", effects=True)


def anew(x):
    """The same Int32 or Int64, of which the compiler does not know it.

    What is computed from it is computed here, and not kept from before.
    """
    kind, width = ("l", 64) if isinstance(x, Int64) else ("r", 32)
    return _instruction(f"mov.b{width} $0, $1;", kind, [x], kind, effects=True)


# -------------------------------------------------------------------- matrix fragments
def load_matrices(address, offset: int, *, transposed: bool = False) -> list:
    """Four 8 x 8 matrices; lane l gives the address of row l % 8 of matrix l / 8."""
    trans = ".trans" if transposed else ""
    text = f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {_registers(0, 4)}, [$4+{offset}];"
    return _instruction(text, "rrrr", [address], "r", effects=True)


def store_matrices_transposed_if(condition, address, offset: int, words) -> None:
    """Where the condition, the same for all lanes, holds; without a branch."""
    text = f"@$5 stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$0+{offset}], {_registers(1, 4)};"
    _instruction(text, "", [address, *words, condition], "rrrrrb", effects=True)


def multiply_add(c, a, b, io: str = "fp16") -> list:
    """c + a b for 16 x 16 a, 8 columns of b (two words) and 16 x 8 numbers c."""
    kind = {"fp16": "f16", "bf16": "bf16"}[io]
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        f"{_registers(0, 4)}, {_registers(4, 4)}, {_registers(8, 2)}, {_registers(10, 4)};"
    )
    return _instruction(text, "ffff", [*a, *b, *c], "rrrrrrffff", effects=False)


# -------------------------------------------------------------------- arithmetic
def log2(x) -> Float32:
    """About 2^-22 absolute for x in [1/2, 2], else relative."""
    return _instruction("lg2.approx.ftz.f32 $0, $1;", "f", [x], "f", effects=False)


def pack_half(low, high) -> Int32:
    """Two numbers rounded to float16."""
    return _instruction("cvt.rn.f16x2.f32 $0, $2, $1;", "r", [low, high], "ff", effects=False)


def unpack_half(word) -> list:
    text = "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h; }"
    return _instruction(text, "ff", [word], "r", effects=False)


def unpack_bfloat(word) -> list:
    low = _instruction("shl.b32 $0, $1, 16;", "f", [word], "r", effects=False)
    high = _instruction("and.b32 $0, $1, 0xffff0000;", "f", [word], "r", effects=False)
    return [low, high]


def unpack(word, io: str) -> list:
    return unpack_half(word) if io == "fp16" else unpack_bfloat(word)


def multiply_if(condition, x, y) -> Float32:
    """x y where the condition holds, else x, by a predicate."""
    text = "{ mov.b32 $0, $1; @$3 mul.f32 $0, $1, $2; }"
    return _instruction(text, "f", [x, y, condition], "ffb", effects=False, early=True)


def multiply_halves(x, y) -> Int32:
    """Two float16 products in one instruction."""
    return _instruction("mul.rn.f16x2 $0, $1, $2;", "r", [x, y], "rr", effects=False)
