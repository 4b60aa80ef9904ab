"""The cache's command line: what it lists, deletes, compiles and refuses. No GPU needed."""

import json
from pathlib import Path

import pytest

from cula.common import cache, jit

FAMILY = "cula.common"


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("CULA_CACHE_DIR", str(tmp_path))
    return tmp_path


def entry(folder, config, made_by="other sources"):
    """A sound entry of a kernel that nobody can load."""
    about = {"config": config, "arch": "sm_90a", **jit.environment(FAMILY)}
    if made_by:
        about["sources"] = made_by
    key = json.dumps(about)

    class Program:
        def export_to_c(self, path, function_name):
            Path(path).write_bytes(b"object")

    disk = jit.DiskCache()
    assert disk.save(key, Program())
    return disk.path(key).name


@pytest.fixture
def linked(monkeypatch):
    """Entries without a compiler and a linker."""
    monkeypatch.setattr(jit, "_link", lambda obj, library: library.write_bytes(b"library") > 0)
    monkeypatch.setattr(jit, "_runtime_in_use", lambda: "lib/runtime.so")


def test_an_empty_cache(folder, capsys):
    assert cache.main(["list"]) == 0 and cache.main(["clear"]) == 0
    assert capsys.readouterr().out == f"0 entries in {folder}\n0 entries deleted from {folder}\n"


def test_entries_are_listed_and_deleted_and_nothing_else_is(folder, linked, capsys):
    current = entry(folder, "cula.common.varlen.config.ScheduleConfig(chunk=64)", made_by=None)
    older = entry(folder, "cula.common.varlen.config.ScheduleConfig(chunk=32)")
    (folder / "damaged.so").write_bytes(b"\x7fELF")
    (folder / "notes.txt").write_text("")
    assert cache.main(["list"]) == 0
    text = capsys.readouterr().out
    (line,) = (line for line in text.splitlines() if line.startswith(current))
    assert "sm_90a" in line and "not used" not in line
    (line,) = (line for line in text.splitlines() if line.startswith(older))
    assert line.endswith("(made by other sources or versions; not used)")
    assert "damaged.so: damaged or not an entry" in text and f"3 entries in {folder}" in text
    assert cache.main(["clear"]) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["damaged.so", "notes.txt"]


@pytest.mark.parametrize("name", ["cula.nothing", "decode", "nothing.at.all"])
def test_an_unknown_package_is_named(folder, monkeypatch, capsys, name):
    monkeypatch.setattr(cache, "missing_compiler", lambda: None)
    assert cache.main(["fill", "--arch", "sm_90a", name]) == 1
    said = capsys.readouterr().out
    assert said.startswith(f"{name}: not installed; ") and FAMILY in said


def test_without_a_gpu_or_a_compiler_it_says_what_is_missing(folder, monkeypatch, capsys):
    monkeypatch.setattr(cache, "missing_compiler", lambda: None)
    monkeypatch.setattr(cache.torch.cuda, "is_available", lambda: False)
    assert cache.main(["fill"]) == 1
    assert "no GPU here; name one with --arch" in capsys.readouterr().out
    monkeypatch.setattr(cache, "missing_compiler", lambda: "cutlass is not installed")
    assert cache.main(["fill", "--arch", "sm_90a"]) == 1
    assert capsys.readouterr().out == "cutlass is not installed\n"


@pytest.mark.slow
def test_what_is_filled_is_there_the_next_time(folder, capfd):
    pytest.importorskip("cutlass")
    for each, jobs in ((" s", "2"), ("there", "3")):
        assert cache.main(["fill", "--arch", "sm_90a", "--jobs", jobs, FAMILY]) == 0
        lines = capfd.readouterr().out.splitlines()
        assert lines and all(line.startswith(f"{FAMILY} sm_90a ") for line in lines)
        assert all(line.endswith(each) for line in lines)
        numbers = sorted(int(line.split()[2].split("/")[0]) for line in lines)
        assert numbers == list(range(1, len(lines) + 1))


def test_no_jobs_are_refused(folder, capsys):
    with pytest.raises(SystemExit):
        cache.main(["fill", "--arch", "sm_90a", "--jobs", "0"])
    assert "--jobs: 0; must be at least 1" in capsys.readouterr().err
