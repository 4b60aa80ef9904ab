"""The schedule's kernels compile for every architecture without spilling. No GPU needed."""

import json
import os
import subprocess
import sys

import pytest

from cula.common.arch import KERNEL_ARCHS, missing_compiler

pytestmark = pytest.mark.skipif(missing_compiler() is not None, reason=str(missing_compiler()))

# In a process of its own: the compiler takes its architecture from the environment, once.
SCRIPT = r"""
import json, pathlib, re, sys, tempfile
from cula.common.jit import compile_kernel
from cula.common.varlen import schedule_configs

arch, found = sys.argv[1], []
for config in schedule_configs(64, early_release=arch != "sm_80"):
    with tempfile.TemporaryDirectory() as folder:
        remarks = pathlib.Path(folder) / "remarks.yaml"
        compile_kernel(
            config, arch, f"--dump-dir {folder} --remark-filter ptxas --remark-output {remarks}"
        )
        text = remarks.read_text()
    frame, stores, loads = re.search(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text
    ).groups()
    found.append({
        "spilled": int(frame) + int(stores) + int(loads),
        "registers": int(re.search(r"Used (\d+) registers", text).group(1)),
        "threads": config.threads,
    })
print(json.dumps(found))
"""


@pytest.mark.parametrize("arch", KERNEL_ARCHS)
def test_no_spills(arch):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, arch],
        env={**os.environ, "CUTE_DSL_ARCH": arch},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 6
    for kernel in found:
        assert kernel["spilled"] == 0
        assert kernel["registers"] * kernel["threads"] <= 65536
