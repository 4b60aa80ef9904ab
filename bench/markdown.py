"""Tables and folds in Markdown."""

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """A table.

    Args:
        header: the columns' names.
        rows: a cell per column.
        left: how many columns, from the first, are aligned to the left; the others hold numbers.

    Returns:
        Lines of Markdown.
    """
    rule = ["---" if i < left else "---:" for i in range(len(header))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, rule, *rows])


def folded(title: str, body: str) -> str:
    """A part that opens at a click.

    Args:
        title: what stands outside.
        body: Markdown.

    Returns:
        Lines of Markdown.
    """
    return f"<details><summary>{title}</summary>\n\n{body}\n\n</details>"


def picture(name: str, description: str, folder: str) -> str:
    """A plot in the reader's colours.

    Args:
        name: of the plot; there are a light and a dark file.
        description: for those who do not see it.
        folder: of the plots, from the document.

    Returns:
        A picture element.
    """
    return (
        "<picture>\n"
        f'  <source media="(prefers-color-scheme: dark)" srcset="{folder}/{name}-dark.svg">\n'
        f'  <img alt="{description}" src="{folder}/{name}-light.svg">\n'
        "</picture>"
    )
