"""What the cuLA packages share. Import the modules you need; this one imports nothing heavy."""

from importlib import metadata

try:
    __version__ = metadata.version("cula-common")
except metadata.PackageNotFoundError:  # run from a source tree
    __version__ = "0+unknown"

__all__ = ["__version__"]
