"""What a result was measured on: GPU, driver, versions, commit, clocks. Only ever asks."""

import datetime
import importlib.metadata
import re
import shutil
import subprocess
from pathlib import Path

import torch

from bench.checkout import ROOT

# What a result depends on. A result file is not one of its own causes.
_MEASURED_PATHS = ["packages", "bench", "pyproject.toml", ":!bench/results", ":!*.md"]


def environment(
    *,
    copy_tbps: float | None = None,
    baselines: dict[str, str] | None = None,
    commit: str | None = None,
) -> dict:
    """The ``env`` object of a result file. What cannot be found out is absent.

    Args:
        copy_tbps: the device-copy rate of this run, TB/s.
        baselines: version per baseline.
        commit: what ``git describe --always --dirty --abbrev=40 --exclude '*'`` said where the
            sources came from; for a machine that got a copy without that history.

    Returns:
        gpu, driver, torch, cuda, dsl, baselines, commit, dirty, date, copy_tbps and clocks.
    """
    driver, clocks = _ask_driver()
    found = {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "driver": driver,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "dsl": version("nvidia-cutlass-dsl"),
        "baselines": baselines or {},
        **source_state(commit),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "copy_tbps": None if copy_tbps is None else round(copy_tbps, 4),
        "clocks": clocks or None,
    }
    return {key: value for key, value in found.items() if value is not None}


def gpu_folder(gpu: str) -> str:
    """The folder of a GPU's results.

    Args:
        gpu: the device's name, such as "NVIDIA H200".

    Returns:
        Lower case, without the vendor, safe as a folder name: "h200".
    """
    name = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    return name.removeprefix("nvidia-") or "unknown"


def version(distribution: str) -> str | None:
    """An installed distribution's version.

    Args:
        distribution: its name.

    Returns:
        The version, or None where it is not installed.
    """
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def source_state(commit: str | None = None, root: Path = ROOT) -> dict:
    """Commit and state of the sources that are being measured.

    Args:
        commit: as in ``environment``; believed before any history that ``root`` has.
        root: the checkout.

    Returns:
        ``{"commit": str, "dirty": bool}``, or nothing where it is not known.
    """
    if commit is not None:
        return {"commit": commit.removesuffix("-dirty"), "dirty": commit.endswith("-dirty")}
    head = _output(["git", "-C", str(root), "rev-parse", "HEAD"])
    if head is None:
        return {}
    status = ["git", "-C", str(root), "status", "--porcelain", "--", *_MEASURED_PATHS]
    return {"commit": head, "dirty": _output(status) != ""}


def _ask_driver() -> tuple[str | None, dict]:
    """Driver version and clocks, by nvidia-smi's query, which changes nothing."""
    fields = {
        "clocks.sm": "sm_mhz",
        "clocks.mem": "memory_mhz",
        "clocks.max.sm": "sm_max_mhz",
        "clocks.max.mem": "memory_max_mhz",
        "temperature.gpu": "temperature_c",
    }
    query = f"--query-gpu=driver_version,{','.join(fields)}"
    answer = _output(["nvidia-smi", query, "--format=csv,noheader,nounits", "--id=0"])
    if not answer:
        return None, {}
    driver, *values = [value.strip() for value in answer.splitlines()[0].split(",")]
    pairs = zip(fields.values(), values, strict=False)
    return driver, {name: int(value) for name, value in pairs if value.isdigit()}


def _output(command: list[str]) -> str | None:
    """A command's output, or None where it is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
