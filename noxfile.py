"""The one door to everything that is done to this repository: ``nox -l`` lists it.

A session only prepares an environment; what it then runs is a plain command that also works without
nox. ``nox --no-venv -s NAME`` runs it with the interpreter at hand (a GPU machine without a package
index, say), the sources on PYTHONPATH.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "tests"]

ROOT = Path(__file__).parent
PACKAGES = ("common", "kda", "lightning", "decode")
FAMILIES = PACKAGES[1:]
CONSTRAINTS = "constraints.txt"
TEST_TOOLS = ("pytest", "numpy")
BUILD_TOOLS = ("build", "hatchling", "hatch-vcs", "setuptools-scm")


# --- environments -------------------------------------------------------------------------------


def fla_on_gpu() -> tuple[str, ...]:
    """FLA, the baseline and a fallback, where there is a GPU to run it."""
    return ("fla-core",) if shutil.which("nvidia-smi") else ()


def third_party(session: nox.Session) -> Path:
    """The site-packages that hold torch and the compiler, installed once for all sessions.

    A session's own environment sees this folder and adds only cula packages. So a package is still
    tested with nothing but itself and cula-common beside it, and torch lies on disk once, not seven
    times. ``nox -s wheels`` is the check that starts from nothing.
    """
    if sys.version_info < (3, 11):
        session.error("constraints.txt holds versions for Python 3.11 or later; run nox with one")
    home = ROOT / ".nox" / "third-party"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    python, site = home / "bin" / "python", home / "lib" / version / "site-packages"
    stamp = home / "installed"
    manifest = ROOT / "packages" / "cula-common" / "pyproject.toml"
    wanted = "\n".join(
        [version, (ROOT / CONSTRAINTS).read_text(), manifest.read_text(), *TEST_TOOLS]
    )
    if stamp.exists() and stamp.read_text() == wanted:
        return site
    # Installing cula-common and taking it out again leaves what its metadata asks for.
    shutil.rmtree(home, ignore_errors=True)
    run = session.run_install
    run(sys.executable, "-m", "virtualenv", "-q", str(home), external=True)
    pip = (str(python), "-m", "pip", "--disable-pip-version-check")
    common = str(manifest.parent)
    run(*pip, "install", "-q", "-c", CONSTRAINTS, common, *TEST_TOOLS, external=True)
    run(*pip, "uninstall", "-q", "-y", "cula-common", external=True)
    stamp.write_text(wanted)
    return site


def prepare(session: nox.Session, *packages: str, tools: tuple[str, ...] = ()) -> None:
    """Give the session ``packages`` (editable) and ``tools`` beside the third-party packages."""
    if session.venv_backend == "none":
        sources = [str(ROOT / f"packages/cula-{package}/src") for package in packages]
        inherited = [path for path in [os.environ.get("PYTHONPATH")] if path]
        session.env["PYTHONPATH"] = os.pathsep.join([*sources, str(ROOT), *inherited])
        return
    site = third_party(session)
    own = next(Path(session.virtualenv.location).glob("lib/python3*/site-packages"))
    # addsitedir, not a bare path: the compiler's wheel has a .pth of its own, to be read too.
    (own / "third_party.pth").write_text(f"import site; site.addsitedir({str(site)!r})\n")
    editable = [arg for package in packages for arg in ("-e", f"packages/cula-{package}")]
    session.install("-q", "-c", CONSTRAINTS, *editable, *tools)


# --- checks -------------------------------------------------------------------------------------


@nox.session
def demo(session: nox.Session) -> None:
    """Prefill and generate with every family, checked against the reference."""
    prepare(session, *PACKAGES, tools=fla_on_gpu())
    session.run("python", "-m", "demo", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """ruff: format and rules."""
    if session.venv_backend != "none":
        session.install("-q", "-c", CONSTRAINTS, "ruff")
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")


@nox.session
def typecheck(session: nox.Session) -> None:
    """Pyright's basic rules over the host code (device code is CuTe DSL's to check)."""
    # basedpyright is pyright with Node.js as a wheel: it downloads nothing at first use.
    prepare(session, *PACKAGES, tools=("basedpyright",))
    session.run("basedpyright", "--project", "pyproject.toml", *session.posargs)


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Every package's tests, each in its own environment, and the repository's."""
    for package in PACKAGES:
        session.notify(f"tests-{package}")
    session.notify("tests-repo")


@nox.session(name="tests-repo", tags=["tests"])
def tests_repo(session: nox.Session) -> None:
    """The repository's own tests: import direction, packaging, README examples, bench, demo."""
    prepare(session, *PACKAGES, tools=(*BUILD_TOOLS, *fla_on_gpu()))
    folders = [name for name in ("tests", "bench", "demo") if (ROOT / name).is_dir()]
    session.run("python", "-m", "pytest", *folders, *session.posargs)


def package_sessions(package: str) -> None:
    """Define the sessions that every package has."""

    @nox.session(name=f"tests-{package}", tags=["tests"])
    def test(session: nox.Session) -> None:
        prepare(session, *dict.fromkeys(("common", package)), tools=fla_on_gpu())
        session.run("python", "-m", "pytest", f"packages/cula-{package}", *session.posargs)

    test.__doc__ = f"Tests of cula-{package}, with nothing but it and cula-common installed."

    @nox.session(name=f"compile-{package}", tags=["compile"])
    def compile_(session: nox.Session) -> None:
        prepare(session, *dict.fromkeys(("common", package)))
        command = ("-m", "cula.common.compile_check", f"cula.{package}")
        session.run("python", *command, *session.posargs)

    compile_.__doc__ = (
        f"Compile every kernel of cula-{package} for every GPU it claims; no GPU needed."
    )

    @nox.session(name=f"build-{package}", tags=["build"])
    def build(session: nox.Session) -> None:
        build_package(session, package, ROOT / "dist")

    build.__doc__ = f"Build and check the sdist and wheel of cula-{package} into dist/."


def bench_session(family: str) -> None:
    """Define the benchmark session of one family."""

    @nox.session(name=f"bench-{family}", tags=["bench"])
    def bench(session: nox.Session) -> None:
        prepare(session, *PACKAGES, tools=fla_on_gpu())
        session.run("python", "-m", "bench", family, *session.posargs)

    bench.__doc__ = f"Benchmark {family} against the baselines and the hardware's floor."


for name in PACKAGES:
    package_sessions(name)
for name in FAMILIES:
    if (ROOT / "bench" / f"{name}.py").is_file():
        bench_session(name)


@nox.session
def report(session: nox.Session) -> None:
    """BENCHMARKS.md, its plots and the READMEs' figures, from the committed runs."""
    prepare(session, *PACKAGES, tools=("matplotlib",))
    session.run("python", "-m", "bench", "report", *session.posargs)


# --- wheels and releases ------------------------------------------------------------------------


def build_package(session: nox.Session, package: str, dist: Path, version: str = "") -> None:
    """Build ``cula-<package>`` into ``dist`` and check what came out."""
    if session.venv_backend != "none":
        session.install("-q", "-c", CONSTRAINTS, "twine", *BUILD_TOOLS)
    with tempfile.TemporaryDirectory() as fresh:
        source = f"packages/cula-{package}"
        session.run(
            "python", "-m", "build", "--no-isolation", "--outdir", fresh, source, silent=True
        )
        made = sorted(Path(fresh).iterdir())
        session.run("twine", "check", "--strict", *map(str, made))
        wheel = str(next(path for path in made if path.suffix == ".whl"))
        expected = ("--version", version) if version else ()
        session.run("python", "tools/check_wheel.py", wheel, *expected)
        dist.mkdir(exist_ok=True)
        for old in dist.glob(f"cula_{package}-*"):
            old.unlink()
        for path in made:
            shutil.copy(path, dist)


@nox.session
def wheels(session: nox.Session) -> None:
    """Build all four wheels, then install, import, mix and uninstall them in fresh environments."""
    with tempfile.TemporaryDirectory() as dist:
        for package in PACKAGES:
            build_package(session, package, Path(dist))
        session.run("python", "tools/check_install.py", dist, "--constraints", CONSTRAINTS)


def git(*args: str) -> str:
    """The output of a git command, stripped."""
    done = subprocess.run(["git", *args], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@nox.session
def release(session: nox.Session) -> None:
    """Tag and build one package: nox -s release -- kda 0.2.0."""
    if len(session.posargs) != 2 or session.posargs[0] not in PACKAGES:
        session.error(f"usage: nox -s release -- {{{'|'.join(PACKAGES)}}} VERSION")
    package, version = session.posargs
    if not re.fullmatch(r"\d+\.\d+\.\d+(rc\d+)?", version):
        session.error(f"version: {version}; must look like 0.2.0 or 0.2.0rc1")
    if git("status", "--porcelain"):
        session.error("the working tree is not clean: commit or remove what git status shows")
    changelog = (ROOT / f"packages/cula-{package}/CHANGELOG.md").read_text()
    heading = rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d\n(?P<body>.*?)(?=^## |\Z)"
    section = re.search(heading, changelog, re.MULTILINE | re.DOTALL)
    if section is None or not section["body"].strip():
        session.error(f"cula-{package}'s CHANGELOG has no dated, filled section [{version}]")
    tag = f"cula-{package}-v{version}"
    if git("tag", "--list", tag):
        session.error(f"tag {tag} exists already")
    # Annotated: of two lightweight tags on one commit, git describe may name the older.
    git("tag", "--annotate", tag, "--message", f"cula-{package} {version}")
    try:
        build_package(session, package, ROOT / "dist", version)
    except BaseException:
        git("tag", "--delete", tag)
        session.warn(f"the build failed: tag {tag} removed again")
        raise
    session.log(f"dist/ holds cula-{package} {version}. Publish it, then: git push origin {tag}")
