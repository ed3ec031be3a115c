"""The command line where no engine is needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from vamp_integration import compat
from vamp_integration.cli.main import main

BARE = """
import sys
for heavy in ("vllm", "torch", "transformers", "matplotlib"):
    sys.modules[heavy] = None  # importing it now fails
from vamp_integration.cli.main import main
sys.argv = ["vamp", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["serve", "--help"],
        ["replay", "--help"],
        ["make-model", "--help"],
        ["status", "--help"],
        ["doctor", "--help"],
        ["profile-routing", "--help"],
    ],
)
def test_help_needs_no_engine(argv: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", BARE, *argv], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Usage: vamp ")


def refused(argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(sys, "argv", ["vamp", *argv])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


@pytest.mark.parametrize("argv", [["no-such-command"], ["make-model"], ["make-model", "x", "--seed", "many"]])
def test_usage_errors_end_with_2(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(argv, monkeypatch, capsys).startswith("Usage: vamp")


def test_a_bad_setting_is_one_line_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    err = refused(["make-model", str(tmp_path / "m"), "--top-k", "99"], monkeypatch, capsys)
    assert err.startswith("vamp: error: top_k: 99 ") and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--max-offload-ratio", "1.5", "max_offload_ratio: 1.5 is outside 0..1; try 0.25"),
        ("--peer-hbm-gib", "-1", "peer_hbm_gib: -1.0 is not finite and 0 or more; try 0 (off)"),
    ],
)
def test_a_bad_setting_is_found_before_vllm_is_looked_for(
    option: str, value: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compat, "installed_vllm", lambda: pytest.fail("looked for vLLM"))
    err = refused(["serve", "m", option, value], monkeypatch, capsys)
    assert err == f"vamp: error: {says}\n"


def test_an_unsupported_vllm_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compat, "installed_vllm", lambda: "0.31.0")
    err = refused(["serve", "m"], monkeypatch, capsys)
    assert err.startswith("vamp: error: vLLM 0.31.0 is outside the supported range") and err.count("\n") == 1
