"""The first call in a new process: how its time gets from there to here."""

import subprocess

import pytest

from bench import first_call


def answers(monkeypatch, *processes: tuple[int, str, str]) -> list[list[str]]:
    """Stand in for new processes, each with an exit code, an output and an error output."""
    left, commands = list(processes), []

    def run(command, **options):
        commands.append(command)
        code, out, err = left.pop(0)
        return subprocess.CompletedProcess(command, code, out, err)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_the_process_that_fills_the_cache_does_not_count(monkeypatch):
    lines = [f'some library says hello\n{{"seconds": {x}}}\n' for x in (9.0, 0.2, 0.3)]
    commands = answers(monkeypatch, *((0, line, "") for line in lines))
    assert first_call.measure("kda_decode") == pytest.approx(0.25e6)
    assert {tuple(command[1:]) for command in commands} == {
        ("-m", "bench.first_call", "kda_decode")
    }


def test_a_process_that_fails_is_quoted(monkeypatch):
    answers(monkeypatch, (1, "", "Traceback ...\nRuntimeError: No CUDA GPUs are available\n"))
    with pytest.raises(RuntimeError, match=r"(?s)kda_decode in a new process: .*No CUDA GPUs"):
        first_call.measure("kda_decode")
