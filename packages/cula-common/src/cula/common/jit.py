"""Compiled kernels: made once for a compile key, in the process and on disk.

    function = compiled(config, "sm_90a")
    function(q, k, v, ..., scale)           # launches on torch's current stream, through tvm-ffi

`config` is a frozen dataclass whose fields are the compile key; batch, length and scale are
arguments, never fields. Its module does not import cutlass. `config.kernel()` does, and returns the
kernel: an object with `fake_args()` (stand-ins for the run-time arguments, the stream last) and a
`@cute.jit __call__`.

A process that finds its kernels on disk imports neither cutlass nor a compiler: loading one takes
milliseconds. Anything unexpected about a file there means: compile again.
"""

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

ENTRY_POINT = "cula_kernel"
MAGIC = b"cula-kernel-1"

_functions: dict[tuple[object, str], Callable] = {}
_lock = threading.Lock()  # CuTe DSL compiles in one thread at a time


def compiled(config, arch: str) -> Callable:
    """Return `config`'s launch function: from this process, from disk, or compiled now.

    Args:
        config: what to compile, and the key of the result.
        arch: the architecture to compile for, one of `cula.common.arch.KERNEL_ARCHS`.
    """
    function = _functions.get((config, arch))
    if function is None:
        with _lock:
            function = _functions.get((config, arch))
            if function is None:
                function = _functions[config, arch] = _load_or_build(config, arch)
    return function


def key_text(config, arch: str) -> str:
    """Everything that a compiled kernel depends on, as JSON."""
    kind = type(config)
    package = ".".join(kind.__module__.split(".")[:2])
    about = {"config": f"{kind.__module__}.{config!r}", "arch": arch, **environment(package)}
    return json.dumps(about)


def environment(package: str) -> dict[str, str]:
    """The part of a key that is the installation's: the sources and the compiler."""
    return {
        "sources": _source_digest("cula.common") + _source_digest(package),
        "dsl": _version("nvidia-cutlass-dsl"),
        "tvm_ffi": _version("apache-tvm-ffi"),
    }


def compile_kernel(config, arch: str, options: str = ""):
    """Trace and compile; return CuTe DSL's own object, holding what `options` asks it to keep."""
    import cutlass.cute as cute

    kernel = config.kernel()
    return cute.compile(
        kernel, *kernel.fake_args(), options=f"--gpu-arch {arch} --enable-tvm-ffi {options}"
    )


def _load_or_build(config, arch: str) -> Callable:
    key = key_text(config, arch)
    disk = DiskCache()
    function = disk.load(key)
    if function is None:
        logger.info("compiling %r for %s", config, arch)
        program = compile_kernel(config, arch)
        function = disk.load(key) if disk.save(key, program) else None
        # a cache that cannot be written, or no linker to make an entry with: use what was compiled
        function = function or program
    return function


class DiskCache:
    """One file an entry, `<name>-<digest of the key>.so`: a shared object and a trailer.

    The trailer vouches for what is before it: a description as JSON, its length, and MAGIC. The
    loader of shared objects ignores it. An entry appears whole or not at all (written beside, then
    renamed), so processes may race; one that is damaged, misnamed or made by something else is
    built over.
    """

    def __init__(self, folder: Path | None = None):
        self.folder = folder or cache_folder()

    def path(self, key: str) -> Path:
        name = json.loads(key)["config"].split("(")[0].split(".")[-1]
        return self.folder / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.so"

    def entries(self) -> Iterator[tuple[Path, dict | None]]:
        """Every entry's file and description (None: not a sound entry)."""
        for path in sorted(self.folder.glob("*.so")):
            yield path, self.describe(path)

    def describe(self, path: Path) -> dict | None:
        """The description of an entry whose bytes are what was written, else None."""
        try:
            data = path.read_bytes()
            if not data.endswith(MAGIC):
                return None
            end = len(data) - len(MAGIC) - 4
            start = end - int.from_bytes(data[end : end + 4], "little")
            about = json.loads(data[start:end])
            return about if about["sha256"] == hashlib.sha256(data[:start]).hexdigest() else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def load(self, key: str) -> Callable | None:
        path = self.path(key)
        about = self.describe(path)
        if about is None or about.get("key") != key:
            return None
        try:
            runtime = _dsl_root() / about["runtime"]
            return _open_library(path, runtime) if runtime.exists() else None
        except (OSError, RuntimeError, AttributeError, KeyError, TypeError) as error:
            logger.warning("%s cannot be loaded (%s); compiling again", path, error)
            return None

    def save(self, key: str, program) -> bool:
        """Writes an entry; False where that is not possible."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.folder, prefix=".building-") as work:
                library = Path(work) / "kernel.so"
                program.export_to_c(f"{work}/kernel.o", function_name=ENTRY_POINT)
                if not _link(f"{work}/kernel.o", library):
                    return False
                data = library.read_bytes()
                about = {
                    "key": key,
                    "runtime": _runtime_in_use(),
                    "sha256": hashlib.sha256(data).hexdigest(),
                }
                trailer = json.dumps(about).encode()
                library.write_bytes(data + trailer + len(trailer).to_bytes(4, "little") + MAGIC)
                os.replace(library, self.path(key))
            return True
        except (OSError, ValueError) as error:  # ValueError: the DSL uses a runtime not its own
            logger.warning("kernel cache %s cannot be written: %s", self.folder, error)
            return False


def cache_folder() -> Path:
    """CULA_CACHE_DIR, or `cula` in the user's cache folder."""
    chosen = os.environ.get("CULA_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "cula"


def _open_library(path: Path, runtime: Path) -> Callable:
    import tvm_ffi

    _open_runtime(runtime)
    return tvm_ffi.load_module(str(path), keep_module_alive=True)[ENTRY_POINT]


@cache
def _open_runtime(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def _runtime_in_use() -> str:
    """The DSL's runtime library that was compiled against, relative to the DSL's folder."""
    import cutlass.cute as cute

    libraries = cute.runtime.find_runtime_libraries(enable_tvm_ffi=False)
    return str(Path(libraries[0]).relative_to(_dsl_root()))


@cache
def _dsl_root() -> Path:
    """The folder nvidia_cutlass_dsl, found without importing cutlass."""
    spec = importlib.util.find_spec("cutlass")
    if spec is None or spec.origin is None:
        raise ImportError("cutlass is not installed; pip install nvidia-cutlass-dsl")
    return next(p for p in Path(spec.origin).parents if p.name == "nvidia_cutlass_dsl")


def _link(obj: str, library: Path) -> bool:
    """Make a shared object with whichever linker there is.

    The symbols that it lacks come from the DSL's runtime, which is opened before it.
    """
    for tool in ("ld", "ld.lld", "cc", "gcc", "clang"):
        if shutil.which(tool):
            done = subprocess.run([tool, "-shared", "-o", str(library), obj], capture_output=True)
            if done.returncode == 0:
                return True
    logger.warning("no linker (ld, ld.lld, cc) found: kernels cannot be cached on disk")
    return False


@cache
def _version(distribution: str) -> str:
    return importlib.metadata.version(distribution)


@cache
def _source_digest(package: str) -> str:
    """Digest of a package's Python sources."""
    spec = importlib.util.find_spec(package)
    digest = hashlib.sha256()
    for folder in sorted((spec and spec.submodule_search_locations) or ()):
        for path in sorted(Path(folder).rglob("*.py")):
            digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]
