"""What the cuLA packages share. Import the modules you need; this one imports nothing heavy."""

__all__ = ["__version__"]

__version__: str


def __getattr__(name: str) -> str:
    # Looked up when asked for: reading the metadata takes longer than importing everything here.
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import metadata

    try:
        return metadata.version("cula-common")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "0+unknown"
