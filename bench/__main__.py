"""``python -m bench <command> [options]``: the one door to everything that is measured here.

A command is a module of this folder that defines ``COMMAND`` (one line of help) and
``main(argv) -> exit code``. Adding a family means adding its module: nothing is listed by hand.
"""

import importlib
import pkgutil
import sys
from types import ModuleType

import bench
from bench.checkout import use_sources_if_not_installed

_NOT_COMMANDS = {"__main__", "tests"}


def find_commands() -> dict[str, ModuleType]:
    """The commands of this folder by name.

    Returns:
        Module per command name, in alphabetical order.
    """
    commands = {}
    for module in pkgutil.iter_modules(bench.__path__):
        # the published script names are entry points of their own
        if module.name in _NOT_COMMANDS or module.name.startswith(("bench_", "generate_")):
            continue
        loaded = importlib.import_module(f"bench.{module.name}")
        if hasattr(loaded, "COMMAND"):
            commands[module.name] = loaded
    return commands


def main(argv: list[str]) -> int:
    """Run one command.

    Args:
        argv: the command's name and its options.

    Returns:
        The exit code: the command's own, 0 for help, 2 for an unknown command.
    """
    commands = find_commands()
    asked = argv[0] if argv else "--help"
    if asked in commands:
        return commands[asked].main(argv[1:])
    usage = ["usage: python -m bench COMMAND [options]", ""]
    usage += [f"  {name:12} {module.COMMAND}" for name, module in commands.items()]
    usage += ["", "python -m bench COMMAND --help lists a command's options."]
    if asked in ("-h", "--help"):
        print("\n".join(usage))
        return 0
    print("\n".join([f"bench: no command {asked!r}", *usage]), file=sys.stderr)
    return 2


if __name__ == "__main__":
    use_sources_if_not_installed()
    sys.exit(main(sys.argv[1:]))
