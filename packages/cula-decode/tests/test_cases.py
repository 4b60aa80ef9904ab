"""Every named case on the CPU, and what the list of cases promises."""

import dataclasses

import pytest
import torch

from cula.common.arch import KERNEL_ARCHS
from cula.common.testing import same_bits
from cula.decode.cases import CASES, Case, kernel_config, kernel_configs, make_inputs
from cula.decode.kernels.config import KdaDecodeConfig, LightningDecodeConfig


@pytest.mark.parametrize("name", CASES)
def test_case_equals_the_recurrence(oracle, name):
    oracle.case(CASES[name])


@pytest.mark.parametrize("name", ["kda: speculative", "lightning: packed qkv, padded slots"])
def test_inputs_are_the_same_every_time(name):
    one, two, other = (make_inputs(CASES[name], seed=seed) for seed in (0, 0, 1))
    assert one.keys() == two.keys() == other.keys()
    tensors = [n for n, x in one.items() if torch.is_tensor(x) and x.is_floating_point()]
    assert all(same_bits(one[n], two[n]) for n in tensors)
    assert not same_bits(one["q"], other["q"])


def test_shapes_without_numbers_are_those_of_the_inputs():
    for case in CASES.values():
        real, meta = make_inputs(case), make_inputs(case, "meta")
        assert real.keys() == meta.keys()
        for name, x in real.items():
            if torch.is_tensor(x):
                y = meta[name]
                assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype), name


def test_a_decode_case_needs_a_state():
    with pytest.raises(ValueError, match="state: None"):
        make_inputs(Case("kda_decode", state=None))


def test_the_common_configurations_are_those_of_serving():
    common = kernel_configs("common")
    assert len(set(common)) == len(common)
    for config in common:
        assert (config.K, config.V, config.io, config.v_first) == (128, 128, "bf16", True)
    assert {c.gate for c in common if isinstance(c, KdaDecodeConfig)} == {"bounded", "softplus"}
    assert {c.state for c in common} == {"fp32", "bf16"}
    assert {c.state_indices for c in common} == {None, "int32"}
    assert {c.single for c in common} == {True, False}
    assert any(isinstance(c, LightningDecodeConfig) for c in common)


def test_all_configurations_cover_every_value_of_every_field():
    everything = kernel_configs()
    assert set(kernel_configs("common")) < set(everything)
    assert len(set(everything)) == len(everything)
    wanted = {
        "K": {64, 128},
        "V": {64, 128},
        "io": {"bf16", "fp16", "fp32"},
        "state": {"fp32", "bf16"},
        "v_first": {True, False},
        "single": {True, False},
        "reads": {True, False},
        "writes": {"none", "in_place", "separate"},
        "state_indices": {None, "int32", "int64"},
        "slot_per_token": {True, False},
        "num_accepted_tokens": {None, "int32", "int64"},
        "cu_seqlens": {None, "int32", "int64"},
        "token_states": {True, False},
        "gate": {"given", "softplus", "bounded", "sigmoid"},
        "A_log": {None, "fp32", "bf16", "fp16"},
        "dt_bias": {None, "fp32", "bf16", "fp16"},
        "g": {"bf16", "fp16", "fp32"},
        "flat_bias": {True, False},
        "beta": {"given", "sigmoid", "sigmoid2"},
        "beta_dtype": {"bf16", "fp16", "fp32"},
        "l2norm": {True, False},
    }
    others = {f for f in dataclasses.fields(KdaDecodeConfig) if f.name not in wanted}
    assert all(f.type is int or f.name == "pdl" for f in others), "the tile, or a new path"
    for field, values in wanted.items():
        assert {getattr(c, field) for c in everything if hasattr(c, field)} == values, field


def test_blocks_divide_every_state():
    pytest.importorskip("cutlass")
    from cula.decode.kernels.tile import StateTile

    for arch in KERNEL_ARCHS:
        for c in kernel_configs("all", arch):
            itemsize = 4 if c.state == "fp32" else 2
            tile = StateTile(c.K, c.V, c.warps, c.v_per_thread, c.lanes, c.v_first, itemsize)
            assert tile.rows * tile.blocks_per_head == c.V
            assert tile.k_per_thread * c.lanes == c.K and tile.k_per_thread % tile.vector == 0


def test_configurations_follow_the_architecture():
    assert not any(config.pdl for config in kernel_configs("common", "sm_80"))
    assert all(config.pdl for config in kernel_configs("common", "sm_90a"))
    assert kernel_config(Case("kda_decode", K=60)) is None
    with pytest.raises(ValueError, match="which: 'some'"):
        kernel_configs("some")
