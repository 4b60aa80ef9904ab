"""The published command: ``bench/bench_kda.py --mode both``.

KDA prefill of the published shapes: equal lengths (fixed), packed sequences (varlen), or both. A
thin entry to ``python -m bench kda``, whose options it takes as well.
"""

import argparse
import sys
from pathlib import Path

# run as a script, its own folder is on the path instead of the checkout
sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import cli  # noqa: E402
from bench.checkout import use_sources_if_not_installed  # noqa: E402
from bench.kda import family  # noqa: E402

SHAPE = r"T=\d+ H={heads} D={head_dim}$"
MODES = {
    "fixed": rf"(kernel|wrapper) B=\d+ {SHAPE}",
    "varlen": rf"wrapper (uniform|random|skewed) N=\d+ {SHAPE}",
}


def main(argv: list[str]) -> int:
    """Run the published cases.

    Args:
        argv: ``--mode``, ``--heads``, ``--head-dim`` and the options of ``python -m bench kda``.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(description=__doc__, add_help=False)
    parser.add_argument("--mode", choices=(*MODES, "both"), default="both")
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--head-dim", type=int, default=128)
    own, others = parser.parse_known_args(argv)
    if not any(option.startswith("--cases") for option in others):
        shapes = {"heads": own.heads, "head_dim": own.head_dim}
        modes = MODES if own.mode == "both" else [own.mode]
        wanted = "|".join(MODES[mode].format(**shapes) for mode in modes)
        others += ["--cases", f"^kda_prefill ({wanted})"]
    return cli.main(family(own.heads, own.head_dim), others)


if __name__ == "__main__":
    use_sources_if_not_installed()
    sys.exit(main(sys.argv[1:]))
