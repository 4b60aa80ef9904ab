"""One to a few tokens a step: what the kernels of both families share.

Tile:    a block holds `StateTile.rows` value channels of one head of one sequence, in registers,
         for all its tokens.
Roles:   every thread stages tokens (staging.py), then works on its part of the state (tile.py).
Shared:  q, k, decay (K floats each) and v (`rows` floats) of at most STAGE tokens: 8 KB at most.
Bytes:   the state once in and once out, 131,072 a head at D = 128 in float32; the rest is under 2%.
Floor:   those bytes at the memory's copy rate.

A family adds its gate (`gate`) and the recurrence (`step`).
"""

import math

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.cutlass_dsl import select_

from cula.common.cute import vector
from cula.common.cute.dtypes import DTYPES
from cula.common.cute.smem import SmemAllocator
from cula.decode.kernels.config import STAGE
from cula.decode.kernels.staging import Shared, TokenInputs
from cula.decode.kernels.tile import StateTile


def fake(dtype: str | None, sizes: tuple, align: int | None = None, v_first: bool = True):
    """A stand-in for a tensor. Sizes known when compiling are its last ones, and lie densely; all
    other strides are free. v_first: False swaps the last two in memory."""
    if dtype is None:
        return None
    known = [size for size in sizes if isinstance(size, int)]
    dense = [math.prod(known[i + 1 :]) for i in range(len(known))]
    if not v_first:
        dense = [1, known[0]]
    multiple = 1 if align is None else align * 8 // DTYPES[dtype].width
    free = [cute.sym_int64(divisibility=multiple) for _ in sizes[len(known) :]]
    return make_fake_tensor(DTYPES[dtype], sizes, (*free, *dense), assumed_align=align)


class DecodeKernel:
    """Host launch and device skeleton; `config` (config.py) is everything known when compiling."""

    channel_decay: bool  # whether the decay is staged per channel

    def __init__(self, config):
        self.config = config
        self.stage = 1 if config.single else STAGE
        self.tile = StateTile(
            K=config.K,
            V=config.V,
            warps=config.warps,
            v_per_thread=config.v_per_thread,
            lanes=config.lanes,
            v_first=config.v_first,
            itemsize=DTYPES[config.state].width // 8,
        )

    # ------------------------------------------------------------------ host
    def fake_args(self) -> tuple:
        """Stand-ins for the arguments of `__call__`. Sizes that must agree are one symbol, so that
        the compiled function refuses a call in which they differ."""
        c = self.config
        B, T, H, HV, N, slots = (cute.sym_int() for _ in range(6))
        if c.cu_seqlens is None:
            N = B

        def states(*outer, present=True):
            return fake(c.state if present else None, (*outer, HV, c.V, c.K), 16, c.v_first)

        return (
            fake(c.io, (B, T, H, c.K)),
            fake(c.io, (B, T, H, c.K)),
            fake(c.io, (B, T, HV, c.V)),
            *self.fake_gates(B, T, HV),
            states(slots, present=c.reads or c.writes == "in_place"),
            states(N, present=c.writes == "separate"),
            fake(c.state_indices, (N, cute.sym_int()) if c.slot_per_token else (N,)),
            fake(c.num_accepted_tokens, (N,)),
            fake(c.cu_seqlens, (cute.sym_int(),)),
            states(B, T, present=c.token_states),
            fake(c.io, (B, T, HV, c.V)),
            Float32(1.0),
            Float32(0.0),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # (B, T, H, K)
        mK: cute.Tensor,  # (B, T, H, K)
        mV: cute.Tensor,  # (B, T, HV, V)
        mG: cute.Tensor,  # KDA: (B, T, HV, K); Lightning: (HV)
        mBeta: cute.Tensor | None,  # (B, T, HV)
        mA: cute.Tensor | None,  # (HV)
        mBias: cute.Tensor | None,  # (HV, K) or (HV * K)
        mS: cute.Tensor | None,  # (slots, HV, V, K) or (slots, HV, K, V)
        mSout: cute.Tensor | None,  # (N, HV, ..), like mS
        mIndex: cute.Tensor | None,  # (N) or (N, tokens)
        mAccepted: cute.Tensor | None,  # (N)
        mCu: cute.Tensor | None,  # (N + 1)
        mTS: cute.Tensor | None,  # (B, T, HV, ..), like mS
        mO: cute.Tensor,  # (B, T, HV, V)
        scale: Float32,
        lower_bound: Float32,
        stream: cuda.CUstream,
    ):
        tile = self.tile
        sequences = mV.shape[0]
        if cutlass.const_expr(mCu is not None):
            sequences = mCu.shape[0] - 1
        self.kernel(
            mQ,
            mK,
            mV,
            mG,
            mBeta,
            mA,
            mBias,
            mS,
            mSout,
            mIndex,
            mAccepted,
            mCu,
            mTS,
            mO,
            scale,
            lower_bound,
        ).launch(
            grid=[sequences * mV.shape[2] * tile.blocks_per_head, 1, 1],
            block=[tile.threads, 1, 1],
            stream=stream,
            use_pdl=self.config.pdl,
        )

    # ------------------------------------------------------------------ device
    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mG: cute.Tensor,
        mBeta: cute.Tensor | None,
        mA: cute.Tensor | None,
        mBias: cute.Tensor | None,
        mS: cute.Tensor | None,
        mSout: cute.Tensor | None,
        mIndex: cute.Tensor | None,
        mAccepted: cute.Tensor | None,
        mCu: cute.Tensor | None,
        mTS: cute.Tensor | None,
        mO: cute.Tensor,
        scale: Float32,
        lower_bound: Float32,
    ):
        tile = self.tile
        thread = cute.arch.thread_idx()[0]
        block = cute.arch.block_idx()[0]
        v0 = (block % tile.blocks_per_head) * tile.rows
        unit = block // tile.blocks_per_head
        HV = mV.shape[2]
        n, hv = unit // HV, unit % HV
        h = hv // (HV // mQ.shape[2])
        if cutlass.const_expr(self.config.pdl):
            # the next kernel may come up while this one works, and this one has come up early:
            # nothing is read before the kernel before it has ended
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()

        # the sequence's tokens: row b of the batch, positions t0 .. t0 + count - 1
        b, t0, count = n, Int32(0), mV.shape[1]
        if cutlass.const_expr(self.config.single):
            count = 1
        if cutlass.const_expr(mCu is not None):
            b = Int32(0)
            t0 = clamp(mCu[n], Int32(0), mV.shape[1])
            count = clamp(mCu[n + 1], t0, mV.shape[1]) - t0

        source = Int64(n)  # the slot that the step starts from; negative: none
        if cutlass.const_expr(mIndex is not None):
            source = self.first_slot(mIndex, mAccepted, n, mS.shape[0])

        smem = SmemAllocator()
        shared = Shared(self, smem)
        inputs = TokenInputs(
            self, mQ[b, None, h, None], mK[b, None, h, None], mV[b, None, hv, None], t0, v0, thread
        )
        gate = self.gate(mG, mBeta, mA, mBias, b, hv, lower_bound)
        gO = mO[b, None, hv, None]
        rS = tile.registers()

        if source >= 0:
            if count > 0:
                # the token's loads are on their way before the state's, which wait for the slot
                tokens = inputs.fetch(gate, Int32(0), count)
                if cutlass.const_expr(self.config.reads):
                    tile.load(
                        matrix(mS, source, hv), mS.element_type, thread, v0, rS, vector.STREAM_LOAD
                    )
                else:
                    rS.fill(0.0)
                if cutlass.const_expr(self.config.single):
                    inputs.publish(gate, shared, tokens, Int32(0), count)
                    cute.arch.sync_threads()
                    j, o, mine = self.step(rS, shared, 0, gate, scale, thread)
                    if mine:
                        gO[t0, v0 + tile.v_of(thread, j)] = mO.element_type(o)
                    if cutlass.const_expr(self.config.token_states):
                        self.save(matrix(mTS, b, t0, hv), thread, v0, rS)
                else:
                    inputs.publish(gate, shared, tokens, Int32(0), count)
                    for first in cutlass.range(0, count, self.stage, unroll=1):
                        cute.arch.sync_threads()
                        last = cutlass.min(first + self.stage, count)
                        for t in cutlass.range(first, last, unroll=1):
                            j, o, mine = self.step(rS, shared, t - first, gate, scale, thread)
                            if mine:
                                gO[t0 + t, v0 + tile.v_of(thread, j)] = mO.element_type(o)
                            if cutlass.const_expr(self.config.token_states):
                                self.save(matrix(mTS, b, t0 + t, hv), thread, v0, rS)
                            if cutlass.const_expr(
                                self.config.slot_per_token and self.config.writes != "none"
                            ):
                                target = self.slot_of(mIndex, n, t, mS.shape[0])
                                if target >= 0:
                                    self.save(matrix(mS, target, hv), thread, v0, rS)
                        if last < count:
                            cute.arch.sync_threads()  # everyone has read this stage
                            inputs.publish(
                                gate, shared, inputs.fetch(gate, last, count), last, count
                            )
                if cutlass.const_expr(
                    self.config.writes == "in_place" and not self.config.slot_per_token
                ):
                    self.save(matrix(mS, source, hv), thread, v0, rS)
                if cutlass.const_expr(self.config.writes == "separate"):
                    self.save(matrix(mSout, source, hv), thread, v0, rS)
            elif cutlass.const_expr(self.config.writes == "separate"):
                # no tokens: the state passes through
                if cutlass.const_expr(self.config.reads):
                    tile.load(
                        matrix(mS, source, hv), mS.element_type, thread, v0, rS, vector.STREAM_LOAD
                    )
                else:
                    rS.fill(0.0)
                self.save(matrix(mSout, source, hv), thread, v0, rS)
        else:
            for i in cutlass.range(thread, count * tile.rows, tile.threads, unroll=1):
                gO[t0 + i // tile.rows, v0 + i % tile.rows] = mO.element_type(0.0)

    def first_slot(self, mIndex, mAccepted, n, slots):
        """The slot that sequence n starts from, or -1."""
        if not self.config.slot_per_token:
            return named_slot(mIndex[n], slots)
        accepted = 1 if mAccepted is None else mAccepted[n]
        return self.slot_of(mIndex, n, Int64(accepted) - 1, slots)

    def slot_of(self, mIndex, n, token, slots):
        """The slot that sequence n names for a token, or -1; also where it names none at all."""
        token = Int64(token)
        inside = (token >= 0) & (token < Int64(mIndex.shape[1]))
        found = named_slot(mIndex[n, Int32(select(inside, token, Int64(0)))], slots)
        return select(inside, found, Int64(-1))

    def save(self, pointer, thread, v0, rS):
        self.tile.store(pointer, DTYPES[self.config.state], thread, v0, rS, vector.STREAM_STORE)


def matrix(states, *index):
    """Pointer to a head's state; a pool may hold more than 2^31 elements."""
    offset = sum((Int64(i) * Int64(states.stride[d]) for d, i in enumerate(index)), Int64(0))
    return states.iterator + offset


def named_slot(index, slots):
    """The slot that an index names, or -1."""
    index = Int64(index)
    return select((index >= 0) & (index < Int64(slots)), index, Int64(-1))


def select(condition, x, y):
    return type(x)(select_(condition, x, y))


def clamp(x, low, high):
    """An int32 or int64 value, which may be anything, as an Int32 between low and high."""
    x, low, high = Int64(x), Int64(low), Int64(high)
    return Int32(cutlass.min(cutlass.max(x, low), high))
