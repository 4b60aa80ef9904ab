"""Lightning Attention, chunked: prefill and training."""

import importlib
from importlib import metadata

from cula.lightning.op import chunk_lightning_attn, lightning_prefill

try:
    __version__ = metadata.version("cula-lightning")
except metadata.PackageNotFoundError:  # run from a source tree
    __version__ = "0+unknown"

__all__ = ["__version__", "chunk_lightning_attn", "lightning_prefill"]

_DECODE = {
    "lightning_decode": "cula.decode",
    "linear_attention_decode": "cula.decode.upstream",
}


def __getattr__(name: str) -> object:
    """The family's decode calls live in a wheel of their own; reach them from here too."""
    if name not in _DECODE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        decode = importlib.import_module(_DECODE[name])
    except ModuleNotFoundError as error:
        if error.name != "cula.decode":
            raise
        message = f"cula.lightning.{name} needs another wheel: pip install cula-decode"
        raise ImportError(message) from error
    return getattr(decode, name)
