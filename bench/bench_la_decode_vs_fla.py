"""The published command: ``bench/bench_la_decode_vs_fla.py --heads 64 --head-dim 128``.

Lightning decode, kernel only and wrapper, for the published batch sizes. A thin entry to
``python -m bench decode``, whose options it takes as well.
"""

import argparse
import sys
from pathlib import Path

# run as a script, its own folder is on the path instead of the checkout
sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import cli  # noqa: E402
from bench.checkout import use_sources_if_not_installed  # noqa: E402
from bench.decode import family  # noqa: E402
from bench.decode_cases import PUBLISHED_BATCHES  # noqa: E402


def main(argv: list[str]) -> int:
    """Run the published cases.

    Args:
        argv: ``--heads``, ``--head-dim`` and the options of ``python -m bench decode``.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(description=__doc__, add_help=False)
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--head-dim", type=int, default=128)
    own, others = parser.parse_known_args(argv)
    if not any(option.startswith("--cases") for option in others):
        batches = "|".join(map(str, PUBLISHED_BATCHES))
        shape = rf"B=({batches}) H={own.heads} D={own.head_dim}"
        published = rf"^lightning_decode (kernel|wrapper) {shape}$"
        others += ["--cases", published]
    return cli.main(family(own.heads, own.head_dim), others)


if __name__ == "__main__":
    use_sources_if_not_installed()
    sys.exit(main(sys.argv[1:]))
