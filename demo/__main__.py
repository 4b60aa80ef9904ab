"""``python -m demo``: both families from a prompt to generated tokens, every number checked."""

import argparse
import sys
import time

import torch

from bench.checkout import use_sources_if_not_installed
from demo.clock import Clock
from demo.layers import MODELS, Sizes
from demo.run import Told, run_family
from demo.show import conclusion, explanation, table

ON_GPU = Sizes(batch=32, prompt=256, new=32, heads=64)
ON_CPU = Sizes(batch=2, prompt=128, new=32, heads=4)


class Progress:
    """What is being done: one line that is written over on a terminal, plain lines elsewhere."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._in_place = sys.stdout.isatty()

    def say(self, text: str) -> None:
        """Show what is being done now."""
        line = f"  [{time.monotonic() - self._began:5.1f}s] {text}"
        if self._in_place:
            print(f"\r\x1b[K{line}", end="", flush=True)
        else:
            print(line, flush=True)

    def clear(self) -> None:
        """Make room for the result."""
        if self._in_place:
            print("\r\x1b[K", end="", flush=True)


def main(argv: list[str]) -> int:
    """Run the demo.

    Args:
        argv: the options.

    Returns:
        0 if every family ran and every error is within tolerance, else 1.
    """
    parser = argparse.ArgumentParser(
        prog="python -m demo",
        description="Prefill a prompt with cuLA, generate token by token from its state, and check "
        "every number against the float64 recurrence over the whole sequence.",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: the GPU if there is one"
    )
    parser.add_argument("--prompt", type=int, help="tokens of each prompt")
    parser.add_argument("--new", type=int, help="tokens to generate after each prompt")
    options = parser.parse_args(argv)
    for name in ("prompt", "new"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"--{name}: {getattr(options, name)}; must be at least 1")
    name = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        parser.error("--device: cuda; there is no CUDA GPU here")
    usual = ON_GPU if name == "cuda" else ON_CPU
    prompt, new = options.prompt or usual.prompt, options.new or usual.new
    return show_all(Sizes(usual.batch, prompt, new, usual.heads), torch.device(name))


def show_all(sizes: Sizes, device: torch.device) -> int:
    """Run every family and print what became of it.

    Args:
        sizes: how much to do.
        device: where.

    Returns:
        The exit code.
    """
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU (no GPU needed)"
    print(
        f"cuLA demo on {where}\n"
        f"{sizes.batch} prompts of {sizes.prompt} tokens; {sizes.new} tokens generated after each, "
        f"one at a time\n{sizes.heads} heads of {sizes.dim}, bf16, state in fp32\n"
    )
    progress = Progress()
    clock = Clock(device)
    told: dict[str, Told] = {}
    failed: dict[str, str] = {}
    with torch.inference_mode():
        for model in MODELS:
            try:
                told[model.name] = run_family(
                    model(sizes, device),
                    clock,
                    lambda text, of=model.name: progress.say(f"{of}: {text}"),
                )
            except Exception as error:  # the other family is still worth showing
                failed[model.name] = f"{type(error).__name__}: {error}"
    progress.clear()
    if told:
        print(f"\n{table(told)}\n\n{explanation(told, clock)}")
    verdict, code = conclusion(told, failed, device)
    print(f"\n{verdict}")
    return code


if __name__ == "__main__":
    use_sources_if_not_installed()
    sys.exit(main(sys.argv[1:]))
