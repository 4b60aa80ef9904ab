"""Kimi Delta Attention, chunked: prefill and training."""

import importlib
from importlib import metadata

from cula.kda.op import chunk_kda, kda_prefill

try:
    __version__ = metadata.version("cula-kda")
except metadata.PackageNotFoundError:  # run from a source tree
    __version__ = "0+unknown"

__all__ = ["__version__", "chunk_kda", "kda_prefill"]

_DECODE = ("fused_recurrent_kda", "kda_decode")


def __getattr__(name: str) -> object:
    """The family's decode calls live in a wheel of their own; reach them from here too."""
    if name not in _DECODE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        decode = importlib.import_module("cula.decode")
    except ModuleNotFoundError as error:
        if error.name != "cula.decode":
            raise
        raise ImportError(
            f"cula.kda.{name} needs another wheel: pip install cula-decode"
        ) from error
    return getattr(decode, name)
