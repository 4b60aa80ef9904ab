"""The figures that others published or that were measured of them: data, with where it is from.

``published.json`` holds inclusionAI/cuLA's tables, whose ratios to FLA are what ours stand beside
(its times belong to another GPU), and times of peers on ours.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("published.json")


@dataclass(frozen=True)
class PublishedRow:
    """One line of a published table.

    Attributes:
        keys: the columns that name the case, such as {"B": 1, "T": 512}.
        case: the name our results give that case.
        fla_ms: the baseline's time there.
        cula_ms: upstream cuLA's time there.
        speedup: their ratio, as published.
    """

    keys: Mapping[str, int | str]
    case: str
    fla_ms: float
    cula_ms: float
    speedup: float


@dataclass(frozen=True)
class Summary:
    """Mean, least and greatest of a set of ratios or shares.

    Attributes:
        count: how many.
        mean: arithmetic mean, as the published summaries have it.
        least: the least.
        greatest: the greatest.
    """

    count: int
    mean: float
    least: float
    greatest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Summary":
        """Summarise.

        Args:
            values: what to summarise, at least one.

        Returns:
            The summary.
        """
        return cls(len(values), sum(values) / len(values), min(values), max(values))


@dataclass(frozen=True)
class PublishedTable:
    """One published table.

    Attributes:
        name: short, unique.
        family: the family whose results it stands beside.
        title: for people.
        command: what made it, and makes ours: a script of this folder with its options.
        op: our call.
        rows: its lines.
        summary: as published, or of the rows where none was.
        summarised: a pattern for the cases that the summary covers, where they are more than the
            rows.
        note: what a reader has to know to compare them, or "".
    """

    name: str
    family: str
    title: str
    command: str
    op: str
    rows: tuple[PublishedRow, ...]
    summary: Summary
    summarised: str | None
    note: str

    def covers(self, op: str, case: str) -> bool:
        """Whether the summary is about a case.

        Args:
            op: the call.
            case: the case's name.
        """
        if op != self.op:
            return False
        if self.summarised is not None:
            return re.search(self.summarised, case) is not None
        return any(row.case == case for row in self.rows)


@dataclass(frozen=True)
class Peer:
    """Times of somebody else's kernel, from a run of its own.

    Attributes:
        name: the peer's.
        op: our call that does the same work.
        how: GPU, date and method, a sentence.
        ms: milliseconds per case of ours.
    """

    name: str
    op: str
    how: str
    ms: Mapping[str, float]


@dataclass(frozen=True)
class Published:
    """Everything in the file.

    Attributes:
        source: where the tables are from: project, gpu, cuda, torch, baseline, date.
        tables: the tables, in order.
        peers: the peers.
    """

    source: Mapping[str, str]
    tables: tuple[PublishedTable, ...]
    peers: tuple[Peer, ...]


def load(path: Path = FILE) -> Published:
    """Read the published figures.

    Args:
        path: the file.

    Returns:
        Its contents.
    """
    document = json.loads(path.read_text())
    peers = [
        Peer(
            peer["name"],
            peer["op"],
            f"{peer['gpu']}, {peer['date']}: {peer['how']}",
            dict(peer["rows"]),
        )
        for peer in document["peers"]
    ]
    tables = tuple(_table(table) for table in document["tables"])
    return Published(document["source"], tables, tuple(peers))


def _table(table: Mapping) -> PublishedTable:
    rows = []
    for cells in table["rows"]:
        keys = dict(zip(table["keys"], cells, strict=False))
        fla_ms, cula_ms, speedup = cells[len(keys) :]
        rows.append(PublishedRow(keys, table["case"].format(**keys), fla_ms, cula_ms, speedup))
    said = table.get("summary")
    summary = (
        Summary(said["configs"], said["mean"], said["min"], said["max"])
        if said
        else Summary.of([row.speedup for row in rows])
    )
    return PublishedTable(
        table["name"],
        table["family"],
        table["title"],
        table["command"],
        table["op"],
        tuple(rows),
        summary,
        table.get("summary_cases"),
        table.get("note", ""),
    )
