"""Makes ``import cula`` work in a plain checkout: a GPU machine may have no package index."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def use_sources_if_not_installed() -> None:
    """Put ``packages/*/src`` on the path for each package that is not installed.

    Installed packages keep their place: what ``import cula.decode`` finds already is what is used.
    """
    for package in ("common", "decode", "kda", "lightning"):
        if not _found(f"cula.{package}"):
            sys.path.append(str(ROOT / "packages" / f"cula-{package}" / "src"))
            # a namespace package lists its folders anew once the path has changed
            importlib.invalidate_caches()


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the namespace is there
        return False
