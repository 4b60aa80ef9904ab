"""What is recorded about where a result comes from."""

import subprocess

import pytest

from bench import environment


def git(folder, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True)


@pytest.fixture
def checkout(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "code.py").write_text("x = 1\n")
    (tmp_path / "packages").mkdir()
    (tmp_path / "pyproject.toml").write_text("")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    return tmp_path


def test_a_clean_checkout_is_its_commit(checkout):
    state = environment.source_state(root=checkout)
    assert len(state["commit"]) == 40 and state["dirty"] is False


@pytest.mark.parametrize(
    ("changed", "dirty"),
    [
        ("bench/code.py", True),
        ("packages/new.py", True),
        ("bench/results/h200/decode.json", False),
        ("README.md", False),
    ],
)
def test_what_a_result_depends_on_makes_it_dirty(checkout, changed, dirty):
    path = checkout / changed
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("something else\n")
    assert environment.source_state(root=checkout)["dirty"] is dirty


def test_a_copy_without_history_takes_the_word_of_the_caller(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert environment.source_state(root=tmp_path) == {}
    # a copy may also carry a history of its own, which says nothing
    git(tmp_path, "init", "-q")
    assert environment.source_state("abc123", tmp_path) == {"commit": "abc123", "dirty": False}
    assert environment.source_state("abc-dirty", tmp_path) == {"commit": "abc", "dirty": True}


@pytest.mark.parametrize(
    ("gpu", "folder"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 5090", "geforce-rtx-5090"),
        ("Tesla/T4", "tesla-t4"),
    ],
)
def test_the_folder_is_named_after_the_gpu(gpu, folder):
    assert environment.gpu_folder(gpu) == folder


def test_the_driver_is_only_asked(monkeypatch):
    asked = []

    def answer(command):
        asked.append(command)
        return "580.159.04, 1980, 3201, [N/A], 3201, 34"

    monkeypatch.setattr(environment, "_output", answer)
    driver, clocks = environment._ask_driver()
    assert driver == "580.159.04"
    assert clocks == {
        "sm_mhz": 1980,
        "memory_mhz": 3201,
        "memory_max_mhz": 3201,
        "temperature_c": 34,
    }
    assert all(word.startswith("-") for word in asked[0][1:]) and "--query-gpu" in asked[0][1]


def test_unknown_things_are_absent(monkeypatch):
    monkeypatch.setattr(environment, "_output", lambda command: None)
    env = environment.environment()
    assert not {"driver", "commit", "dirty", "copy_tbps", "clocks"} & set(env)
    assert "date" in env and None not in env.values()
