"""The kernel cache from the command line, so that a container starts warm.

    python -m cula.common.cache list
    python -m cula.common.cache fill [--arch sm_90a] [--all] [--jobs 8] [PACKAGE ...]
    python -m cula.common.cache clear

`fill` compiles what serving needs (with --all, everything there is) of the installed cuLA packages,
for this machine's GPU, or for one that is not there. The folder is CULA_CACHE_DIR, or `cula` in the
user's cache folder.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time

import torch

from cula.common.arch import KERNEL_ARCHS, arch_of, missing_compiler
from cula.common.compile_check import kernel_configs
from cula.common.jit import DiskCache, compiled, key_text

PACKAGES = ("cula.common", "cula.kda", "cula.lightning", "cula.decode")


def list_entries() -> int:
    """Print every entry, and what is in the folder that is none."""
    cache = DiskCache()
    total = 0
    for path, about in cache.entries():
        total += 1
        if about is None:
            print(f"{path.name}: damaged or not an entry; it will be compiled again")
            continue
        key = json.loads(about["key"])
        current = "" if _current(key) else " (made by other sources or versions; not used)"
        print(f"{path.name}: {key['arch']} {path.stat().st_size // 1024} KB{current}")
        print(f"    {key['config']}")
    print(f"{total} entries in {cache.folder}")
    return 0


def clear() -> int:
    """Delete every entry; what something else put into the folder stays."""
    cache = DiskCache()
    count = 0
    for path, about in cache.entries():
        if about is not None:
            path.unlink()
            count += 1
    print(f"{count} entries deleted from {cache.folder}")
    return 0


def fill(packages: list[str], arch: str | None, which: str, jobs: int) -> int:
    """Compile what is not there yet, in processes that compile for `arch` alone."""
    if missing := missing_compiler():
        print(missing)
        return 1
    if absent := [package for package in packages if not _installed(package)]:
        print(f"{absent[0]}: not installed; packages go by the names {', '.join(PACKAGES)}")
        return 1
    if arch is None and not torch.cuda.is_available():
        print(f"no GPU here; name one with --arch ({', '.join(KERNEL_ARCHS)})")
        return 1
    target = arch or arch_of(torch.device("cuda"))
    command = [sys.executable, "-m", __spec__.name, "fill", "--arch", target, *packages]
    command += ["--all"] if which == "all" else []
    environment = {**os.environ, "CUTE_DSL_ARCH": target}
    running = [
        subprocess.Popen([*command, "--share", str(i), str(jobs)], env=environment)
        for i in range(jobs)
    ]
    return max(process.wait() for process in running)


def fill_share(packages: list[str], arch: str, which: str, share: int, of: int) -> int:
    """Compile every `of`-th kernel, from number `share` on, if it is not there yet."""
    cache = DiskCache()
    for package in packages or [p for p in PACKAGES if _installed(p)]:
        configs = kernel_configs(package, which, arch)
        for i in range(share, len(configs), of):
            start = time.perf_counter()
            key = key_text(configs[i], arch)
            known = cache.load(key) is not None
            if not known:
                compiled(configs[i], arch)
                if cache.describe(cache.path(key)) is None:
                    print(f"{cache.folder}: nothing was written there")
                    return 1
            took = "there" if known else f"{time.perf_counter() - start:.1f} s"
            print(f"{package} {arch} {i + 1}/{len(configs)}: {took}", flush=True)
    return 0


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # not even what stands before the dot
        return False


def _current(key: dict) -> bool:
    """Whether a process of this installation would look for such a key."""
    from cula.common.jit import environment

    package = ".".join(key["config"].split(".")[:2])
    return _installed(package) and environment(package).items() <= key.items()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__spec__.name}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="what is in the cache")
    commands.add_parser("clear", help="delete all entries")
    filling = commands.add_parser("fill", help="compile ahead of time")
    filling.add_argument(
        "packages", nargs="*", help=f"default: those installed of {', '.join(PACKAGES)}"
    )
    filling.add_argument("--arch", choices=KERNEL_ARCHS, help="default: this machine's GPU")
    filling.add_argument("--all", action="store_true", help="also what few callers need")
    filling.add_argument(
        "--jobs",
        type=int,
        default=min(8, os.cpu_count() or 1),
        help="processes that compile (default: %(default)s)",
    )
    filling.add_argument("--share", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.command == "list":
        return list_entries()
    if args.command == "clear":
        return clear()
    which = "all" if args.all else "common"
    if args.share is not None:
        return fill_share(args.packages, args.arch, which, *args.share)
    if args.jobs < 1:
        parser.error(f"--jobs: {args.jobs}; must be at least 1")
    return fill(args.packages, args.arch, which, args.jobs)


if __name__ == "__main__":
    sys.exit(main())
