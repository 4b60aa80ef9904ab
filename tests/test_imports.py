"""Imports point one way: op -> plan -> kernel -> common. No package knows a sibling but common."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("common", "kda", "lightning", "decode")
FAMILIES = PACKAGES[1:]

# Layers of a family, top first. A module imports from its own layer or from those below; what is
# not named here (kernels, reference) is the lowest.
LAYERS = {
    "": 0,
    "fla": 1,
    "upstream": 1,
    "op": 2,
    "fused_recurrent": 2,
    "run": 3,
    "cases": 3,
    "plan": 4,
}
LOWEST = 5


def source_root(package: str) -> Path:
    return ROOT / f"packages/cula-{package}/src"


def modules_of(package: str) -> dict[str, Path]:
    """Every module of a package by its dotted name."""
    src = source_root(package)
    found = {}
    for path in sorted(src.rglob("*.py")):
        parts = path.relative_to(src).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


ALL_MODULES = {name: path for package in PACKAGES for name, path in modules_of(package).items()}


def imports_of(name: str, path: Path, *, inside_functions: bool = True) -> set[str]:
    """The modules that a file imports, ours by their full dotted name."""
    found = set()
    tree = ast.parse(path.read_text(), filename=str(path))
    for node in ast.walk(tree) if inside_functions else tree.body:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
                parents = parents[: len(parents) - node.level + 1]
                base = ".".join([*parents, *([base] if base else [])])
            for alias in node.names:
                member = f"{base}.{alias.name}"
                found.add(member if member in ALL_MODULES else base)
    return found


def layer_of(name: str) -> int:
    """The layer of a family's module, by its first component below cula.<family>."""
    return LAYERS.get(".".join(name.split(".")[2:3]), LOWEST)


def backward(name: str, imported: set[str]) -> list[str]:
    """Those imports of a family's module that point up."""
    family = ".".join(name.split(".")[:2])
    own = {other for other in imported if other == family or other.startswith(family + ".")}
    return sorted(other for other in own if layer_of(other) < layer_of(name))


@pytest.mark.parametrize("package", PACKAGES)
def test_no_package_imports_a_sibling_or_the_workshop(package: str) -> None:
    wrong = {}
    for name, path in modules_of(package).items():
        for other in imports_of(name, path):
            head = other.split(".")
            sibling = head[0] == "cula" and (head[1:2] or [""])[0] not in (package, "common")
            if sibling or head[0] in ("bench", "demo", "tests", "tools"):
                wrong[name] = other
    assert modules_of(package)
    assert not wrong


@pytest.mark.parametrize("package", FAMILIES)
def test_imports_point_down(package: str) -> None:
    modules = modules_of(package)
    assert {f"cula.{package}.op", f"cula.{package}.plan"} <= modules.keys()
    wrong = {name: backward(name, imports_of(name, path)) for name, path in modules.items()}
    assert not {name: up for name, up in wrong.items() if up}


def test_an_upward_import_would_be_seen() -> None:
    assert backward("cula.kda.plan", {"cula.kda.op", "cula.kda.sm90.scan"}) == ["cula.kda.op"]
    assert backward("cula.kda.sm90.scan", {"cula.kda.plan", "cula.common.arch"})
    assert not backward("cula.kda.op", {"cula.kda.plan", "cula.kda.reference", "torch"})


@pytest.mark.parametrize("package", PACKAGES)
def test_no_import_cycles(package: str) -> None:
    """At import: a compile key's `kernel()` may import, when called, the kernel that reads it."""
    modules = modules_of(package)
    edges = {
        name: imports_of(name, path, inside_functions=False) & modules.keys() - {name}
        for name, path in modules.items()
    }
    # Taking away what imports nothing that is left must take away everything.
    left = dict(edges)
    while leaves := [name for name, uses in left.items() if not uses & left.keys()]:
        for name in leaves:
            del left[name]
    assert not left


def test_cula_is_a_namespace() -> None:
    inits = [str(source_root(package) / "cula/__init__.py") for package in PACKAGES]
    assert not [path for path in inits if Path(path).exists()]
    for package in PACKAGES:
        assert {path.name for path in (source_root(package) / "cula").iterdir()} - {
            "__pycache__"
        } == {package}


def kernel_files() -> list[tuple[str, Path]]:
    """The files that CuTe DSL compiles: those that import it at their top level."""
    return [
        (name, path)
        for name, path in ALL_MODULES.items()
        if any(
            other.split(".")[0] == "cutlass"
            for other in imports_of(name, path, inside_functions=False)
        )
    ]


def test_kernel_files_keep_their_annotations_real() -> None:
    """CuTe DSL evaluates annotations: postponed or type-checking-only names break it."""
    files = kernel_files()
    assert files
    for name, path in files:
        imported = imports_of(name, path)
        assert "__future__" not in imported, path
        assert "TYPE_CHECKING" not in path.read_text(), path


IMPORT_ALL = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("cutlass", "tvm_ffi", "cuda", "fla", "triton"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Refuse())
import torch
import cula.common, cula.kda, cula.lightning, cula.decode

assert not torch.cuda.is_initialized()
"""


def test_packages_import_without_compiler_fla_or_gpu() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
