"""What the demo prints at the end: the table, what its columns mean, the verdict."""

import torch

from bench import tables
from demo.clock import Clock
from demo.run import TOLERANCE, Told


def table(told: dict[str, Told]) -> str:
    """One line a call, and one for the state that generation left.

    Args:
        told: what became of each family.

    Returns:
        Lines of text.
    """
    lines = []
    for name, family in told.items():
        for step in family.steps:
            times = step.times
            versus = None if times.fla_ms is None else times.fla_ms / times.ms
            share = None if times.floor_ms is None else times.floor_ms / times.ms
            lines.append(
                [
                    name,
                    step.call,
                    step.backend,
                    str(step.tokens),
                    tables.milliseconds(times.ms),
                    tables.ratio(versus),
                    tables.percent(share),
                    *judged(step.error),
                ]
            )
        lines.append(
            [name, "the state at the end", "", "", "", "", "", *judged(family.state_error)]
        )
    header = [
        "family",
        "call",
        "backend",
        "tokens",
        "ms a call",
        "vs FLA",
        "of memory",
        "error",
        "",
    ]
    return tables.grid(header, lines, left=3)


def judged(error: float) -> tuple[str, str]:
    """An error and whether it is within tolerance."""
    return tables.error(error), "ok" if error <= TOLERANCE else "WRONG"


def explanation(told: dict[str, Told], clock: Clock) -> str:
    """What the columns mean, and what was generated.

    Args:
        told: what became of each family.
        clock: what it could compare with.

    Returns:
        Lines of text.
    """
    lines = [
        "backend    cute: cuLA's kernel; fla: flash-linear-attention; reference: plain PyTorch",
        f"error      relative RMS against the float64 recurrence; at most {TOLERANCE}",
    ]
    if clock.copy_tbps is None:
        lines.append("of memory  share of the GPU memory's ceiling: on a GPU only")
    else:
        rate = f"{clock.copy_tbps:.2f} TB/s, measured just now"
        lines.append(f"of memory  share of the device's copy rate ({rate})")
    if clock.no_fla is not None:
        lines.append(f"vs FLA     not measured: {clock.no_fla}")
    for name, family in told.items():
        shown = " ".join(map(str, family.tokens[:12]))
        more = " ..." if len(family.tokens) > 12 else ""
        lines.append(f"{name + ':':<11}generated {shown}{more}")
    return "\n".join(lines)


def conclusion(
    told: dict[str, Told], failed: dict[str, str], device: torch.device
) -> tuple[str, int]:
    """How it went.

    Args:
        told: the families that ran.
        failed: the others, with the reason.
        device: where they ran.

    Returns:
        Lines of text and the exit code.
    """
    lines = [f"FAILED: {name}: {reason}" for name, reason in failed.items()]
    # not >: nan is wrong as well
    wrong = [name for name, family in told.items() if not family.worst() <= TOLERANCE]
    if wrong:
        lines.append(f"WRONG: {', '.join(wrong)}: an error above {TOLERANCE}")
    if lines:
        return "\n".join(lines), 1
    worst = max(family.worst() for family in told.values())
    lines.append(
        "All right: what was computed token by token from the prompt's state is what the whole "
        f"sequence gives (largest error {worst:.1e})."
    )
    if device.type == "cpu":
        lines.append("The same calls run cuLA's kernels on an NVIDIA GPU.")
    return "\n".join(lines), 0
