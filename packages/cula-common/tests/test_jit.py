"""The kernel cache, with a kernel of a package made for the test. No GPU needed.

Everything that compiles does so in a process of its own: another test of this process may have
put an emulator in place of the CUDA runtime.
"""

import json
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from cula.common import jit
from cula.common.arch import missing_compiler

compiles = pytest.mark.skipif(missing_compiler() is not None, reason=str(missing_compiler()))

CONFIG = """
from dataclasses import dataclass


@dataclass(frozen=True)
class AddConfig:
    amount: int

    def kernel(self):
        from tiny.family.kernel import Add

        return Add(self)
"""

KERNEL = """
import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor


class Add:
    def __init__(self, config):
        self.amount = config.amount

    def fake_args(self):
        x = make_fake_tensor(Int32, (cute.sym_int(),), (1,))
        return x, make_fake_stream(use_tvm_ffi_env_stream=True)

    @cute.jit
    def __call__(self, mX: cute.Tensor, stream: cuda.CUstream):
        self.kernel(mX).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, mX: cute.Tensor):
        i = cute.arch.thread_idx()[0]
        mX[i] = mX[i] + Int32(self.amount)
"""

PRELUDE = """
import json, sys, threading
from pathlib import Path
from cula.common import jit
from tiny.family.config import AddConfig

ARCH = "sm_90a"
compilations = []
real = jit.compile_kernel


def counting(config, arch, options=""):
    compilations.append(config.amount)
    return real(config, arch, options)


jit.compile_kernel = counting


def refuses_nonsense(function):
    try:
        function("no tensor")
    except TypeError:
        return True


def report(**found):
    found |= {"compilations": compilations, "cutlass": "cutlass" in sys.modules}
    print(json.dumps(found))


"""


@pytest.fixture
def family(tmp_path):
    """A package `tiny.family` with one kernel, an empty cache folder, and processes to use them."""
    package = tmp_path / "src/tiny/family"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "config.py").write_text(CONFIG)
    (package / "kernel.py").write_text(KERNEL)
    cache = tmp_path / "cache"
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("CUTE_DSL_", "CULA_", "PTXEMU"))
    }
    env |= {"CUTE_DSL_ARCH": "sm_90a", "CULA_CACHE_DIR": str(cache)}
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path / "src"), *filter(None, sys.path)])

    def run(script, **more):
        """What a process of its own reports, and `log`, what it logged."""
        done = subprocess.run(
            [sys.executable, "-c", PRELUDE + textwrap.dedent(script)],
            env={**env, **more},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        return SimpleNamespace(**found, log=done.stderr)

    def files():
        return sorted(path.name for path in cache.iterdir()) if cache.exists() else []

    return SimpleNamespace(run=run, cache=cache, files=files, package=package)


ONCE = """
f = jit.compiled(AddConfig(1), ARCH)
report(refuses=refuses_nonsense(f))
"""


@compiles
def test_compiled_once_in_a_process_and_once_for_all_processes(family):
    first = family.run("""
        barrier = threading.Barrier(8)
        functions = []

        def get():
            barrier.wait()
            functions.append(jit.compiled(AddConfig(1), ARCH))

        threads = [threading.Thread(target=get) for _ in range(8)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        other = jit.compiled(AddConfig(2), ARCH)
        again = jit.compiled(AddConfig(1), ARCH)
        report(
            same=len(functions) == 8 and all(f is again for f in functions),
            other=other is not again,
            refuses=refuses_nonsense(again) and refuses_nonsense(other),
        )
    """)
    assert first.same and first.other and first.refuses
    assert first.compilations == [1, 2]
    assert len(family.files()) == 2
    assert all(name.startswith("AddConfig-") and name.endswith(".so") for name in family.files())
    second = family.run(ONCE)
    assert second.refuses
    assert second.compilations == [] and not second.cutlass


@compiles
def test_processes_race(family):
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: family.run(ONCE), range(3)))
    assert all(process.refuses for process in found)
    assert any(process.compilations for process in found)
    assert len(family.files()) == 1  # whole, and nothing left over
    last = family.run(ONCE)
    assert last.refuses and last.compilations == [] and not last.cutlass


DAMAGES = """
import hashlib, os

key = jit.key_text(AddConfig(1), ARCH)
disk = jit.DiskCache()
path = disk.path(key)
jit.compiled(AddConfig(1), ARCH)
sound = path.read_bytes()
about = disk.describe(path)


def signed(library, **changes):
    described = {**about, "sha256": hashlib.sha256(library).hexdigest(), **changes}
    trailer = json.dumps({n: x for n, x in described.items() if x is not None}).encode()
    return library + trailer + len(trailer).to_bytes(4, "little") + jit.MAGIC


def flipped(data, i):
    return data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :]


library = sound[: sound.rindex(b'{"key"')]
damages = {
    "empty": b"",
    "text": b"not a library",
    "first half": sound[: len(sound) // 2],
    "one byte short": sound[:-1],
    "no trailer": library,
    "a byte of the library": flipped(sound, len(library) // 2),
    "a byte of the description": flipped(sound, len(library) + 40),
    "a byte of its length": flipped(sound, len(sound) - len(jit.MAGIC) - 1),
    "a longer length": sound[: -len(jit.MAGIC) - 4] + bytes([255] * 4) + jit.MAGIC,
    "another kernel": signed(library, key=jit.key_text(AddConfig(2), ARCH)),
    "another compiler": signed(library, key=key.replace(jit._version("nvidia-cutlass-dsl"), "0")),
    "signed, but no library": signed(b"not a library"),
    "a library without the kernel": signed(
        library.replace(b"__tvm_ffi_cula_kernel", b"__tvm_ffi_cula_colone")
    ),
    "a runtime that is gone": signed(library, runtime="lib/no_such_runtime.so"),
    "no runtime": signed(library, runtime=None),
    "a number for a runtime": signed(library, runtime=7),
    "a list for a description": library + b"[1]" + (3).to_bytes(4, "little") + jit.MAGIC,
}
results = {}
for i, (name, data) in enumerate(damages.items()):
    # a folder each: the system's loader knows libraries by their paths, and keeps them
    os.environ["CULA_CACHE_DIR"] = str(path.parent / str(i))
    disk = jit.DiskCache()
    disk.folder.mkdir()
    disk.path(key).write_bytes(data)
    jit._functions.clear()
    compilations.clear()
    function = jit.compiled(AddConfig(1), ARCH)
    moved = jit.DiskCache(disk.folder / "moved")
    moved.folder.mkdir()
    moved.path(key).write_bytes(disk.path(key).read_bytes())
    rebuilt = moved.load(key) is not None
    results[name] = [len(compilations), bool(refuses_nonsense(function)), rebuilt]
report(results=results)
"""


@compiles
def test_damaged_and_foreign_entries_are_rebuilt(family):
    found = family.run(DAMAGES)
    assert len(found.results) == 17
    assert {n: r for n, r in found.results.items() if r != [1, True, True]} == {}


@compiles
@pytest.mark.parametrize("place", ["a file", "below a file", "a folder for an entry"])
def test_a_cache_that_cannot_be_written_is_done_without(family, place):
    family.cache.parent.joinpath("file").write_text("in the way")
    folder = {"a file": "file", "below a file": "file/sub"}.get(place, "cache")
    folder = family.cache.parent / folder
    script = ONCE
    if place == "a folder for an entry":
        script = (
            "jit.DiskCache().path(jit.key_text(AddConfig(1), ARCH)).mkdir(parents=True)\n" + ONCE
        )
    found = family.run(script, CULA_CACHE_DIR=str(folder))
    assert found.refuses and found.compilations == [1]
    assert "cannot be written" in found.log
    if place == "a folder for an entry":
        assert len(family.files()) == 1


@compiles
def test_without_a_linker_nothing_is_kept(family):
    found = family.run(ONCE, PATH=str(family.cache.parent / "no-tools"))
    assert found.refuses and found.compilations == [1]
    assert "no linker" in found.log
    assert family.files() == []


@compiles
def test_the_key_follows_what_a_kernel_is_made_from(family):
    script = """
        keys = {
            "same": jit.key_text(AddConfig(1), ARCH),
            "field": jit.key_text(AddConfig(2), ARCH),
            "arch": jit.key_text(AddConfig(1), "sm_80"),
        }
        names = {name: jit.DiskCache().path(key).name for name, key in keys.items()}
        report(keys=keys, names=names)
    """
    first = family.run(script)
    assert not first.cutlass
    assert family.run(script).keys == first.keys
    assert len(set(first.keys.values())) == len(set(first.names.values())) == 3
    kernel = family.package / "kernel.py"
    kernel.write_text(KERNEL.replace("mX[i] + ", "mX[i] - "))
    assert family.run(script).keys["same"] != first.keys["same"]
    kernel.write_text(KERNEL)
    assert family.run(script).keys == first.keys
    (family.package / "helper.py").write_text("")
    assert family.run(script).keys["same"] != first.keys["same"]


def test_the_key_names_versions_and_the_sources_of_common(monkeypatch):
    class Config:
        __module__ = "cula.common.varlen"

    def key():
        return json.loads(jit.key_text(Config(), "sm_90a"))

    monkeypatch.setattr(Config, "__repr__", lambda self: "Config()")
    before = key()
    assert before["config"] == "cula.common.varlen.Config()" and before["arch"] == "sm_90a"
    monkeypatch.setattr(jit, "_version", lambda name: f"{name} 99")
    assert key() == before | {"dsl": "nvidia-cutlass-dsl 99", "tvm_ffi": "apache-tvm-ffi 99"}
    monkeypatch.setattr(jit, "_source_digest", lambda package: f"<{package}>")
    assert key()["sources"] == "<cula.common><cula.common>"


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("CULA_CACHE_DIR", raising=False)
    assert jit.cache_folder() == tmp_path / ".cache/cula"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert jit.cache_folder() == tmp_path / "xdg/cula"
    monkeypatch.setenv("CULA_CACHE_DIR", "~/mine")
    assert jit.cache_folder() == tmp_path / "mine"
    assert jit.DiskCache().folder == tmp_path / "mine"
    assert jit.DiskCache(Path("here")).folder == Path("here")


def test_a_folder_of_other_files_has_no_entries(tmp_path):
    (tmp_path / "other.so").write_bytes(b"\x7fELF")
    (tmp_path / "notes.txt").write_text("")
    (path, about), *rest = jit.DiskCache(tmp_path).entries()
    assert path.name == "other.so" and about is None and rest == []
    assert list(jit.DiskCache(tmp_path / "missing").entries()) == []
