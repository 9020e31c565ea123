"""``any-agent completion``: a script that completes the commands and options in a shell."""

from __future__ import annotations

import argparse

from any_agent.errors import ConfigError

_DESCRIPTION = """\
Print a script for the shell that completes the commands, options and values of this version.
"""
_EPILOG = """\
  bash  any-agent completion bash > ~/.local/share/bash-completion/completions/any-agent
  zsh   any-agent completion zsh > ~/.zfunc/_any-agent    (with fpath+=~/.zfunc before compinit)
  fish  any-agent completion fish > ~/.config/fish/completions/any-agent.fish

Print it again after an upgrade. A new shell knows it.
"""
_FILES = ("FILE", "PATH")
_FOLDERS = ("DIR",)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "completion",
        help="print a script that completes commands and options in a shell",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    try:
        import shtab
    except ModuleNotFoundError:
        raise ConfigError(
            'completion needs the package shtab: pip install shtab, or "any-agent-rl[serve]"'
        ) from None
    whole: argparse.ArgumentParser = arguments.whole
    for action in _actions(whole):
        if action.metavar in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.metavar in _FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                below.description = None  # a menu has room for the short help
    print(shtab.complete(whole, arguments.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the options and arguments of a parser and of all commands below it."""
    found = []
    for action in parser._actions:
        found.append(action)
        if isinstance(action, argparse._SubParsersAction):
            found += [one for below in action.choices.values() for one in _actions(below)]
    return found
