"""Architecture names, and what is missing to compile for them."""

import subprocess
import sys

import pytest
import torch

from cula.common import arch


@pytest.fixture(autouse=True)
def _fresh_caches():
    for cached in (arch._arch, arch._sm_count, arch._missing_compiler):
        cached.cache_clear()
    yield
    for cached in (arch._arch, arch._sm_count, arch._missing_compiler):
        cached.cache_clear()


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_80"),
        ((8, 9), "sm_80"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((12, 0), "sm_120a"),
    ],
)
def test_gpus_with_kernels(monkeypatch, capability, name):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    assert arch.arch_of(torch.device("cuda", 0)) == name
    assert name in arch.KERNEL_ARCHS


@pytest.mark.parametrize(
    ("capability", "name"),
    [((7, 0), "sm_70"), ((7, 5), "sm_75"), ((10, 3), "sm_103"), ((12, 1), "sm_121")],
)
def test_gpus_without_kernels_get_their_plain_name(monkeypatch, capability, name):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    assert arch.arch_of(torch.device("cuda", 0)) == name
    assert name not in arch.KERNEL_ARCHS


def test_each_device_is_asked_once(monkeypatch):
    asked = []

    def capability(index):
        asked.append(index)
        return (9, 0) if index == 0 else (8, 0)

    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    names = [arch.arch_of(torch.device(d)) for d in ("cuda:0", "cuda:1", "cuda", "cuda:0")]
    assert names == ["sm_90a", "sm_80", "sm_80", "sm_90a"]
    assert asked == [0, 1]


def test_sm_count_is_per_device_and_asked_once(monkeypatch):
    asked = []

    class Properties:
        def __init__(self, index):
            asked.append(index)
            self.multi_processor_count = 100 + index

    monkeypatch.setattr(torch.cuda, "get_device_properties", Properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    devices = ("cuda:0", "cuda", "cuda:2", "cuda:0")
    assert [arch.sm_count(torch.device(d)) for d in devices] == [100, 102, 102, 100]
    assert asked == [0, 2]


@pytest.mark.parametrize(
    ("absent", "message"),
    [
        ([], None),
        (
            ["cutlass"],
            "nvidia-cutlass-dsl is not installed (pip install nvidia-cutlass-dsl)",
        ),
        (["tvm_ffi"], "apache-tvm-ffi is not installed (pip install apache-tvm-ffi)"),
        (
            ["cutlass", "tvm_ffi"],
            "nvidia-cutlass-dsl and apache-tvm-ffi are not installed "
            "(pip install nvidia-cutlass-dsl apache-tvm-ffi)",
        ),
    ],
)
def test_missing_compiler_says_what_to_install(monkeypatch, absent, message):
    monkeypatch.setattr(arch, "find_spec", lambda name: None if name in absent else object())
    assert arch.missing_compiler() == message


def test_imports_stay_light_and_off_the_gpu():
    """In a fresh process: no compiler, no torch.compile, no FLA, no CUDA context."""
    code = (
        "import sys, torch\n"
        "import cula.common\n"
        "from cula.common import arch, backends, checks, fla, gates, layouts\n"
        "from cula.common import recurrence, registry, testing\n"
        "arch.missing_compiler(); fla.fla_missing()\n"
        "heavy = ('cutlass', 'tvm_ffi', 'fla', 'triton', 'torch._dynamo', 'torch._inductor')\n"
        "print([m for m in heavy if m in sys.modules], torch.cuda.is_initialized())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "[] False"


def test_version_is_a_string():
    import cula.common

    assert cula.common.__version__
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = cula.common.no_such_name
