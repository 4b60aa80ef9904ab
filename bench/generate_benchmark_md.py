"""The published command: ``bench/generate_benchmark_md.py``, a thin entry to ``bench report``."""

import sys
from pathlib import Path

# run as a script, its own folder is on the path instead of the checkout
sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import report  # noqa: E402
from bench.checkout import use_sources_if_not_installed  # noqa: E402

if __name__ == "__main__":
    use_sources_if_not_installed()
    sys.exit(report.main(sys.argv[1:]))
