"""`any-agent completion`: the script knows what the parser knows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from any_agent.cli.main import main

TRY = """
source {script}
function=$(complete -p any-agent | sed 's/.*-F \\([^ ]*\\).*/\\1/')
COMP_WORDS=({words}) COMP_CWORD={last} COMPREPLY=()
$function any-agent "${{COMP_WORDS[COMP_CWORD]}}" "${{COMP_WORDS[COMP_CWORD-1]}}"
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def test_bash_completes_commands_options_and_choices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "any-agent"
    script.write_text(capsys.readouterr().out)
    for words, offered in (
        ("any-agent sess", ["sessions"]),
        ("any-agent sessions ta", ["tail"]),
        ("any-agent sessions tail --min", ["--min-reward"]),
        ("any-agent export --format p", ["parquet", "prompt-completion", "preferences"]),
        ("any-agent completion f", ["fish"]),
    ):
        program = TRY.format(script=script, words=words, last=len(words.split()) - 1)
        done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=30)
        assert (done.stdout.split(), done.stderr) == (offered, "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_all_commands(capsys: pytest.CaptureFixture[str], shell: str) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("status", "replay", "export", "rotate", "max-tokens"):
        assert word in script, word
    # A menu shows the short help, not the whole description; bash's has none.
    assert ("print sessions as they end" in script) == (shell != "bash")
    assert "REWARD is the sum" not in script


def test_completion_without_its_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert "pip install shtab" in capsys.readouterr().err
