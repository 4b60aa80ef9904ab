"""The four distributions: the same shape, honest metadata, and wheels that keep to themselves."""

import re
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tools.check_wheel import problems

ROOT = Path(__file__).parents[1]
PACKAGES = ("common", "kda", "lightning", "decode")


def folder(package: str) -> Path:
    return ROOT / f"packages/cula-{package}"


def declared(package: str) -> list[Requirement]:
    """The requirements in a package's pyproject.toml (read without tomllib: Python 3.10)."""
    text = (folder(package) / "pyproject.toml").read_text()
    listed = re.search(r"^dependencies = \[(.*?)\]\n", text, re.MULTILINE | re.DOTALL)
    assert listed
    return [Requirement(line) for line in re.findall(r'"([^"]+)"', listed[1])]


@pytest.mark.parametrize("package", PACKAGES)
def test_license_copies_are_equal(package: str) -> None:
    # Copies, since a link to a file outside a package is left out of its sdist.
    copy = folder(package) / "LICENSE"
    assert not copy.is_symlink()
    assert copy.read_bytes() == (ROOT / "LICENSE").read_bytes()


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_is_complete(package: str) -> None:
    for name in ("README.md", "CHANGELOG.md", f"src/cula/{package}/py.typed", "tests"):
        assert (folder(package) / name).exists(), name


def test_manifests_differ_only_where_they_must() -> None:
    def shared(package: str) -> str:
        text = (folder(package) / "pyproject.toml").read_text().replace(f"cula-{package}", "NAME")
        text = re.sub(r"^description = .*\n", "", text, flags=re.MULTILINE)
        text = re.sub(r"^dependencies = \[.*?\]\n", "", text, flags=re.MULTILINE | re.DOTALL)
        return text.partition("\n[tool.uv.sources]")[0].strip()

    assert len({shared(package) for package in PACKAGES}) == 1


@pytest.mark.parametrize("package", PACKAGES[1:])
def test_a_family_depends_on_common_alone(package: str) -> None:
    (only,) = declared(package)
    assert only.name == "cula-common"
    assert {clause.operator for clause in only.specifier} == {">=", "<"}


def test_development_versions_lie_in_the_declared_ranges() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = [Requirement(line) for line in lines if line and not line.startswith("#")]
    versions = {pin.name: next(iter(pin.specifier)).version for pin in pinned}
    requirements = declared("common")
    assert {"torch", "nvidia-cutlass-dsl", "apache-tvm-ffi"} == {r.name for r in requirements}
    for requirement in requirements:
        assert versions[requirement.name] in requirement.specifier, requirement


def write_wheel(path: Path, names: tuple[str, ...], version: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, "")
        archive.writestr("cula_kda-0.2.0.dist-info/METADATA", f"Name: cula-kda\nVersion: {version}")
    return path


def test_check_wheel_finds_what_is_wrong(tmp_path: Path) -> None:
    good = (
        "cula/kda/__init__.py",
        "cula/kda/py.typed",
        "cula_kda-0.2.0.dist-info/licenses/LICENSE",
    )
    wheel = tmp_path / "cula_kda-0.2.0-py3-none-any.whl"
    assert problems(write_wheel(wheel, good, "0.2.0"), "0.2.0") == []
    assert problems(write_wheel(wheel, (*good, "cula/__init__.py"), "0.2.0")) == [
        "cula/__init__.py: outside cula/kda/"
    ]
    assert problems(write_wheel(wheel, (*good, "cula/decode/op.py"), "0.2.0"))
    assert problems(write_wheel(wheel, good[:1], "0.2.0")) == [
        "cula/kda/py.typed: missing",
        "cula_kda-0.2.0.dist-info/licenses/LICENSE: missing",
    ]
    assert problems(write_wheel(wheel, good, "0.1.9"), "0.2.0") == ["version: 0.1.9; must be 0.2.0"]
