"""Tests of the demo import it from the checkout, and cula from it unless installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.checkout import use_sources_if_not_installed

use_sources_if_not_installed()
