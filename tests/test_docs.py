"""What the documents say can be done: their Python runs on a CPU, their links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
READMES = [
    ROOT / "README.md",
    ROOT / "docs/user-guide.md",
    *sorted(ROOT.glob("packages/*/README.md")),
]
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted(ROOT.glob("packages/**/*.md")),
    *sorted(ROOT.glob("bench/**/*.md")),
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
]


def snippets(path: Path) -> list[str]:
    """The ```python blocks of a document."""
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("readme", READMES, ids=name_of)
def test_readme_examples_run(readme: Path) -> None:
    blocks = snippets(readme)
    assert blocks
    for block in blocks:
        done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True)
        assert done.returncode == 0, f"{block}\n{done.stderr}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_relative_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", document.read_text())
    local = [link for link in links if not re.match(r"[a-z]+:", link)]
    assert not [link for link in local if not (document.parent / link).exists()]
