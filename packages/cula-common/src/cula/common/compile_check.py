"""Compiles every kernel of a package for every architecture that it claims; no GPU needed.

    python -m cula.common.compile_check cula.decode [--arch sm_90a ...]

Fails where a kernel spills more bytes than its class allows (`allowed_spill_bytes`, 0 unless its
DESIGN.md says why), or takes more shared memory than the architecture gives a block.
"""

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from cula.common.arch import KERNEL_ARCHS, missing_compiler
from cula.common.jit import compile_kernel

SHARED_LIMIT = {
    "sm_80": 99 * 1024,  # the least of all 8.x, which run this code
    "sm_90a": 227 * 1024,
    "sm_100a": 227 * 1024,
    "sm_120a": 99 * 1024,
}
"""Bytes of shared memory that one block may have."""

# The launch configuration that CuTe DSL's host code fills: its third field is the size of the
# block's shared memory.
_SHARED_FIELD = re.compile(
    r"(%\d+) = llvm\.getelementptr %\d+\[0, 2\] [^\n]*array<3 x i32>, array<3 x i32>, i64[^\n]*\n"
    r"\s*llvm\.store (%\d+), \1 : i64"
)


@dataclass(frozen=True)
class Report:
    """What ptxas says of one kernel."""

    config: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    problem: str


def kernel_configs(package: str, which: str, arch: str) -> tuple:
    """A package's configurations, from its `cases` module; none if it has no kernels."""
    cases = importlib.import_module(f"{package}.cases")
    return cases.kernel_configs(which, arch) if hasattr(cases, "kernel_configs") else ()


def check(config, arch: str) -> Report:
    """Compile one configuration and judge what comes out."""
    with tempfile.TemporaryDirectory() as folder:
        remarks = Path(folder) / "remarks.yaml"
        options = f"--dump-dir {folder} --remark-filter ptxas --remark-output {remarks}"
        program = compile_kernel(config, arch, options)
        text = remarks.read_text()
    spilled = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", text)]
    spill_bytes = max(int(n) for pair in spilled for n in pair)
    shared_bytes = max(_shared_bytes(str(program.ir_module)))
    problems = []
    allowed = getattr(config.kernel(), "allowed_spill_bytes", 0)
    if spill_bytes > allowed:
        problems.append(f"spills {spill_bytes} bytes, {allowed} allowed")
    if shared_bytes > SHARED_LIMIT[arch]:
        problems.append(f"takes {shared_bytes} bytes of shared memory, {SHARED_LIMIT[arch]} exist")
    if "C75" in text:
        problems.append(next(line.strip() for line in text.splitlines() if "C75" in line))
    return Report(repr(config), max(registers), spill_bytes, shared_bytes, "; ".join(problems))


def _shared_bytes(host_code: str) -> list[int]:
    """The shared memory of each launch in a program's lowered host code."""
    sizes = []
    for function in host_code.split("llvm.func "):
        for _, value in _SHARED_FIELD.findall(function):
            size = re.search(rf"{value} = llvm\.mlir\.constant\((\d+) : i64\)", function)
            if size:
                sizes.append(int(size[1]))
    if not sizes:
        raise RuntimeError("the launch's shared memory size is not where it was in CuTe DSL 4.8")
    return sizes


def _check_arch(package: str, arch: str) -> list[Report]:
    """All reports for one architecture, from a process of its own: the compiler reads the
    architecture from its environment, once."""
    command = [sys.executable, "-m", __spec__.name, package, "--arch", arch, "--json"]
    done = subprocess.run(
        command, env={**os.environ, "CUTE_DSL_ARCH": arch}, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        return [Report(package, 0, 0, 0, f"the compiler's process ended with {done.returncode}")]
    return [Report(**fields) for fields in json.loads(done.stdout.splitlines()[-1])]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=__doc__)
    parser.add_argument("package", help="cula.decode, for example")
    parser.add_argument("--arch", action="append", choices=KERNEL_ARCHS)
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.json:
        (arch,) = args.arch
        reports = [check(c, arch) for c in kernel_configs(args.package, "all", arch)]
        print(json.dumps([asdict(report) for report in reports]))
        return 0
    if missing := missing_compiler():
        print(missing)
        return 1
    archs = args.arch or KERNEL_ARCHS
    failed = 0
    with ThreadPoolExecutor(min(len(archs), os.cpu_count() or 1)) as pool:
        results = pool.map(lambda arch: _check_arch(args.package, arch), archs)
        for arch, reports in zip(archs, results, strict=True):
            bad = [report for report in reports if report.problem]
            failed += len(bad)
            most = max((report.registers for report in reports), default=0)
            shared = max((report.shared_bytes for report in reports), default=0)
            print(
                f"{args.package} {arch}: {len(reports)} kernels, at most {most} registers and "
                f"{shared} bytes of shared memory, {len(bad)} failed",
                flush=True,
            )
            for report in bad:
                print(f"  {report.problem}: {report.config}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
