"""A tag versions one package; sources build with git, from a shallow clone, and without git."""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tools.check_wheel import problems

pytest.importorskip("hatchling", reason="building needs hatchling and hatch-vcs")
pytest.importorskip("hatch_vcs", reason="building needs hatchling and hatch-vcs")

ROOT = Path(__file__).parents[1]
PACKAGES = ("common", "kda", "lightning", "decode")
# The scratch repositories are their own: no outer git or version setting reaches them.
ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("GIT_", "SETUPTOOLS_SCM", "HATCH_"))
}


def run(command: list[str], folder: Path, **variables: str) -> None:
    environment = {**ENVIRONMENT, **variables}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def git(folder: Path, *args: str, **variables: str) -> None:
    identity = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    run(["git", *identity, *args], folder, **variables)


def build(package_folder: Path, target: str, **variables: str) -> Path:
    """Build a package where it lies, and return the file."""
    out = package_folder / "made"
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)]
    run(command, package_folder, **variables)
    (made,) = out.iterdir()
    return made


def wheel_version(package_folder: Path, **variables: str) -> str:
    """The version of the wheel that a package folder builds; the wheel has to be sound."""
    wheel = build(package_folder, "wheel", **variables)
    assert problems(wheel) == []
    return wheel.name.split("-")[1]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A scratch clone of this repository's HEAD, without its tags."""
    if not (ROOT / ".git").exists():
        pytest.skip("the sources are not a git checkout")
    git(tmp_path, "clone", "--quiet", "--no-tags", str(ROOT), "clone")
    return tmp_path / "clone"


def test_a_tag_versions_its_package_alone(clone: Path) -> None:
    git(clone, "tag", "-a", "cula-kda-v0.2.0", "-m", "cula-kda 0.2.0")
    versions = {p: wheel_version(clone / f"packages/cula-{p}") for p in PACKAGES}
    assert versions.pop("kda") == "0.2.0"
    assert all(version.startswith("0.1.") for version in versions.values())


def test_the_final_version_wins_over_its_candidate_on_one_commit(clone: Path) -> None:
    # of annotated tags git describe takes the newer one; of lightweight ones it may take either
    for day, version in enumerate(("0.2.0rc1", "0.2.0"), start=1):
        date = {"GIT_COMMITTER_DATE": f"2030-01-0{day}T00:00:00Z"}
        git(clone, "tag", "-a", f"cula-kda-v{version}", "-m", version, **date)
    assert wheel_version(clone / "packages/cula-kda") == "0.2.0"


def test_a_commit_after_a_tag_is_no_prerelease_but_newer(clone: Path) -> None:
    git(clone, "tag", "-a", "cula-kda-v0.2.0", "-m", "cula-kda 0.2.0")
    git(clone, "commit", "--quiet", "--allow-empty", "-m", "next")
    assert wheel_version(clone / "packages/cula-kda").startswith("0.2.0.post1+")


@pytest.mark.parametrize("package", PACKAGES)
def test_an_sdist_builds_the_same_version_without_git(
    clone: Path, tmp_path: Path, package: str
) -> None:
    git(clone, "tag", "-a", f"cula-{package}-v0.3.0", "-m", "release")
    sdist = build(clone / f"packages/cula-{package}", "sdist")
    # unpacked inside somebody else's repository, whose tags must not count
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "--quiet")
    git(other, "commit", "--quiet", "--allow-empty", "-m", "theirs")
    git(other, "tag", "-a", f"cula-{package}-v9.9.9", "-m", "theirs")
    with tarfile.open(sdist) as archive:
        archive.extractall(other)
    assert wheel_version(other / sdist.name.removesuffix(".tar.gz")) == "0.3.0"


def test_a_shallow_clone_builds_within_the_siblings_bounds(clone: Path, tmp_path: Path) -> None:
    git(clone, "commit", "--quiet", "--allow-empty", "-m", "next")
    git(tmp_path, "clone", "--quiet", "--depth", "1", clone.as_uri(), "shallow")
    for package in PACKAGES:
        assert wheel_version(tmp_path / f"shallow/packages/cula-{package}").startswith("0.1.")


def test_sources_without_git_build_the_last_release(clone: Path, tmp_path: Path) -> None:
    shutil.copytree(clone, tmp_path / "copy", ignore=shutil.ignore_patterns(".git"))
    for package in PACKAGES:
        assert wheel_version(tmp_path / f"copy/packages/cula-{package}") == "0.1.0"


def test_a_version_can_be_given_to_one_package(clone: Path) -> None:
    given = {"SETUPTOOLS_SCM_PRETEND_VERSION_FOR_CULA_KDA": "7.0.0"}
    assert wheel_version(clone / "packages/cula-kda", **given) == "7.0.0"
    assert wheel_version(clone / "packages/cula-decode", **given).startswith("0.1.")
