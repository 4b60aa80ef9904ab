"""One to a few tokens a step: decode kernels for Kimi Delta Attention and Lightning Attention."""

from cula.decode.fused_recurrent import fused_recurrent_kda
from cula.decode.op import kda_decode, lightning_decode

__all__ = ["__version__", "fused_recurrent_kda", "kda_decode", "lightning_decode"]


def __getattr__(name: str) -> str:
    # Looked up when asked for: reading the metadata takes longer than importing everything here.
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import metadata

    try:
        return metadata.version("cula-decode")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "0+unknown"
