"""The published command: ``bench/bench_lightning_attn.py --modes no_state varlen h0_ht``.

Lightning prefill of the published shapes: equal lengths without states (no_state), with initial and
final ones (h0_ht), and packed sequences (varlen). A thin entry to ``python -m bench lightning``,
whose options it takes as well.
"""

import argparse
import sys
from pathlib import Path

# run as a script, its own folder is on the path instead of the checkout
sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import cli  # noqa: E402
from bench.checkout import use_sources_if_not_installed  # noqa: E402
from bench.lightning import family  # noqa: E402

SHAPE = r"T=\d+ H={heads} D={head_dim}"
MODES = {
    "no_state": rf"(kernel|wrapper) B=\d+ {SHAPE}$",
    "h0_ht": rf"kernel B=\d+ {SHAPE} h0_ht$",
    "varlen": rf"wrapper (uniform|skewed|random) N=\d+ {SHAPE}$",
}


def main(argv: list[str]) -> int:
    """Run the published cases.

    Args:
        argv: ``--modes``, ``--heads``, ``--head-dim`` and the options of ``python -m bench
            lightning``.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(description=__doc__, add_help=False)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--head-dim", type=int, default=128)
    own, others = parser.parse_known_args(argv)
    if not any(option.startswith("--cases") for option in others):
        shapes = {"heads": own.heads, "head_dim": own.head_dim}
        wanted = "|".join(MODES[mode].format(**shapes) for mode in own.modes)
        others += ["--cases", f"^lightning_prefill ({wanted})"]
    return cli.main(family(own.heads, own.head_dim), others)


if __name__ == "__main__":
    use_sources_if_not_installed()
    sys.exit(main(sys.argv[1:]))
