"""Check what a wheel holds: its own package's files, and nothing in the shared namespace.

    python tools/check_wheel.py dist/cula_kda-0.2.0-py3-none-any.whl --version 0.2.0

One stray ``cula/__init__.py`` in one wheel would hide the other three packages from Python, and
only in some kinds of installation; so it is looked for here.
"""

import argparse
import sys
import zipfile
from email.parser import Parser
from pathlib import Path


def problems(wheel: Path, version: str | None = None) -> list[str]:
    """What is wrong with ``wheel``, a sentence each; ``version`` is the one it should have."""
    distribution, named = wheel.name.split("-")[:2]
    package = distribution.removeprefix("cula_")
    own, info = f"cula/{package}/", f"{distribution}-{named}.dist-info/"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        found = [f"{name}: outside {own}" for name in names if not name.startswith((own, info))]
        needed = (f"{own}__init__.py", f"{own}py.typed", f"{info}licenses/LICENSE")
        found += [f"{name}: missing" for name in needed if name not in names]
        metadata = Parser().parsestr(archive.read(f"{info}METADATA").decode())
    if version is not None and metadata["Version"] != version:
        found.append(f"version: {metadata['Version']}; must be {version}")
    return found


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Check what a wheel holds.")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--version", help="the version it must have")
    args = parser.parse_args()
    found = problems(args.wheel, args.version)
    print("\n".join(found) or f"{args.wheel.name}: holds its own files only")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
