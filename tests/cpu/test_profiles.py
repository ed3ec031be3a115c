"""Shipped profiles load, and each kind of bad input gives one line naming file, line and field."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import vamp_profiles
from vamp_profiles import ProfileError, Quantity, load_hardware, load_model, load_policy, shipped

Loader = Callable[[str | Path], object]
LOADERS: dict[str, Loader] = {"hardware": load_hardware, "model": load_model, "policy": load_policy}
FOLDER = Path(vamp_profiles.__file__).parent
SHIPPED = [(kind, name) for kind in LOADERS for name in shipped(kind)]

PAPER = (FOLDER / "policy" / "paper.toml").read_text()


def line_of(text: str, statement: str, after: str = "") -> int:
    """Line of the first ``statement`` at or below the line ``after``."""
    lines = text.split("\n")
    start = lines.index(after) if after else 0
    return lines.index(statement, start) + 1


def refusal(path: Path, text: str, load: Loader = load_policy) -> str:
    path.write_text(text)
    with pytest.raises(ProfileError) as caught:
        load(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_what_ships() -> None:
    assert shipped("hardware") == ("cpu", "h200")
    assert shipped("model") == ("qwen3-next-80b-a3b", "tiny-qwen3-next")
    assert shipped("policy") == ("cpu", "measured", "paper")


@pytest.mark.parametrize(("kind", "name"), SHIPPED)
def test_shipped(kind: str, name: str) -> None:
    profile = LOADERS[kind](name)
    assert vars(profile)["name"] == name
    quantities = [value for value in vars(profile).values() if isinstance(value, Quantity)]
    assert len(quantities) >= 6
    assert LOADERS[kind](FOLDER / kind / f"{name}.toml") == profile


def test_derived_values() -> None:
    model = load_model("qwen3-next-80b-a3b")
    assert model.expert_bytes == 6 * 1024 * 1024
    assert model.prefill_s(24) == pytest.approx(1 / 84000)
    assert model.prefill_s(48) == pytest.approx(2 / 84000)
    tiny = load_model("tiny-qwen3-next")
    assert tiny.expert_bytes == 131072 + 65536
    assert tiny.expert_bytes % load_hardware("cpu").granularity.value == 0


def test_optional_quantities_may_be_left_out() -> None:
    assert load_hardware("cpu").peer_read_bandwidth is None
    peer = load_hardware("h200").peer_read_bandwidth
    assert peer is not None and peer.value == 374e9


def test_unknown_name_lists_what_ships() -> None:
    with pytest.raises(
        ProfileError, match=r"^policy profile 'fast': not shipped; use one of cpu, measured, paper,"
    ):
        load_policy("fast")


@pytest.mark.parametrize("path", ["missing/x.toml", "x.toml"])
def test_missing_file(path: str) -> None:
    with pytest.raises(ProfileError, match=rf"^{path}: No such file or directory; give the path"):
        load_policy(path)


def test_profile_of_another_kind() -> None:
    with pytest.raises(ProfileError, match=r"h200\.toml:3: kind: is 'hardware'; write kind = \"policy\"$"):
        load_policy(FOLDER / "hardware" / "h200.toml")


# old text, new text, line (a statement of the new text, below a header), field, part of the message
CASES = {
    "unknown key": (
        "[alpha]",
        "[aplha]\nvalue = 1\n\n[alpha]",
        ("[aplha]", ""),
        "aplha",
        "unknown key; a policy profile has kind, name, hit_rate, alpha,",
    ),
    "unknown key of a quantity": (
        "[tau]\nvalue",
        "[tau]\nvalues",
        ("values = 40.0", "[tau]"),
        "tau.values",
        "a quantity has value, unit",
    ),
    "unknown sub-table": ("[t_sched]", "[tau.x]\n[t_sched]", ("[tau.x]", ""), "tau.x", "unknown key"),
    "missing text": ('name = "paper"\n', "", None, "name", 'missing; write name = "paper"'),
    "missing key of a quantity": (
        '[tau]\nvalue = 40.0\nunit = "s"\n',
        "[tau]\nvalue = 40.0\n",
        ("[tau]", ""),
        "tau.unit",
        'unit = "s"',
    ),
    "text for a number": (
        "value = 40.0",
        'value = "40"',
        ('value = "40"', ""),
        "tau.value",
        "not a number; write for example 40",
    ),
    "truth value for a number": (
        "value = 40.0",
        "value = true",
        ("value = true", ""),
        "tau.value",
        "is True, not a number",
    ),
    "fraction for a count": (
        "value = 100\n",
        "value = 100.5\n",
        ("value = 100.5", ""),
        "horizon.value",
        "not a whole number; write for example 100",
    ),
    "wrong unit": (
        'value = 40.0\nunit = "s"',
        'value = 40.0\nunit = "ms"',
        ('unit = "ms"', ""),
        "tau.unit",
        "is 'ms'; write \"s\"",
    ),
    "wrong provenance": (
        'unit = "step"\nprovenance = "configured"',
        'unit = "step"\nprovenance = "guessed"',
        ('provenance = "guessed"', ""),
        "horizon.provenance",
        'write "measured" or "configured" or "paper"',
    ),
    "empty source": (
        'source = "order of magnitude of one scheduling pass; the paper gives no value"',
        'source = ""',
        ('source = ""', ""),
        "t_sched.source",
        "how the value was obtained",
    ),
    "below the range": (
        "value = 40.0",
        "value = 0",
        ("value = 0", ""),
        "tau.value",
        "is 0, must be over 0 and at most 1e+09; for example 40",
    ),
    "above the range": (
        "value = 0.15",
        "value = 1.5",
        ("value = 1.5", ""),
        "max_offload_ratio.value",
        "must be at least 0 and at most 1; for example 0.5",
    ),
    "not a number": ("value = 40.0", "value = nan", ("value = nan", ""), "tau.value", "is nan, must be"),
    "endless": ("value = 40.0", "value = inf", ("value = inf", ""), "tau.value", "is inf, must be"),
    "not a table": (
        'name = "paper"',
        'name = "paper"\ntau = 40.0',
        ("tau = 40.0", ""),
        "tau",
        'is 40.0, not a table; write [tau] with value = 40, unit = "s"',
    ),
    "text outside its choices": (
        'hit_rate = "observed"',
        'hit_rate = "both"',
        ('hit_rate = "both"', ""),
        "hit_rate",
        'write hit_rate = "observed" or "reusable"',
    ),
    "table for a text": ('name = "paper"', "name = {}", ("name = {}", ""), "name", "is {}; write name"),
    "no value after the sign": ("value = 40.0", "value =", ("value =", ""), "value", "Invalid value"),
    "no sign": ("value = 40.0", "value 40.0", ("value 40.0", ""), "value", "write TOML such as"),
    "key twice": (
        'name = "paper"',
        'name = "paper"\nname = "x"',
        ('name = "x"', ""),
        "name",
        "Cannot overwrite a value",
    ),
    "too deep": ("value = 40.0", f"value = {'[' * 20000}", None, "source", "recursion"),
    "too many digits": ("value = 40.0", f"value = {'9' * 5000}", None, "source", "integer string"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_bad_input(case: tuple[str, str, tuple[str, str] | None, str, str], tmp_path: Path) -> None:
    old, new, statement, field, part = case
    tau_dropped = PAPER.replace(PAPER[PAPER.index("[tau]") : PAPER.index("[t_sched]")], "")
    text = (tau_dropped if new.endswith("tau = 40.0") else PAPER).replace(old, new, 1)
    assert text != PAPER
    message = refusal(tmp_path / "x.toml", text)
    if statement is None:
        line = 1 if field == "name" else len(text.rstrip("\n").split("\n"))
    else:
        line = line_of(text, *statement)
    assert message.startswith(f"{tmp_path / 'x.toml'}:{line}: {field}: ")
    assert part in message


def test_missing_table_points_at_the_end(tmp_path: Path) -> None:
    text = PAPER[: PAPER.index("[min_dwell]")]
    last = len(text.rstrip("\n").split("\n"))
    message = refusal(tmp_path / "x.toml", text)
    assert f"x.toml:{last}: min_dwell: missing; add the table [min_dwell] with value = 10, unit" in message


@pytest.mark.parametrize("text", ["", "# nothing\n"])
def test_empty_file(text: str, tmp_path: Path) -> None:
    assert 'x.toml:1: kind: missing; write kind = "policy"' in refusal(tmp_path / "x.toml", text)


def test_inline_and_dotted_tables_are_found(tmp_path: Path) -> None:
    head, rest = PAPER[: PAPER.index("[tau]")], PAPER[PAPER.index("[t_sched]") :]
    inline = 'tau = {value = -1, unit = "s", provenance = "configured", source = "x"}\n'
    dotted = 'tau.unit = "s"\ntau.value = -1\ntau.provenance = "configured"\ntau.source = "x"\n'
    for form, below in ((inline, 0), (dotted, 1)):
        text = form + head + rest
        assert f"x.toml:{1 + below}: tau.value: is -1, must be" in refusal(tmp_path / "x.toml", text)


def test_not_text(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(b'kind = "policy"\nname = "\xff"\n')
    with pytest.raises(ProfileError, match=r"x\.toml:2: encoding: is not UTF-8 text; save"):
        load_policy(path)


@pytest.mark.parametrize(("kind", "name"), SHIPPED)
def test_any_line_left_out_is_refused_in_one_line_or_was_needless(
    kind: str, name: str, tmp_path: Path
) -> None:
    lines = (FOLDER / kind / f"{name}.toml").read_text().split("\n")
    for index, line in enumerate(lines):
        if line and not line.startswith("#"):
            text = "\n".join(lines[:index] + lines[index + 1 :])
            message = refusal(tmp_path / "x.toml", text, LOADERS[kind])
            assert re.match(rf"{re.escape(str(tmp_path))}/x\.toml:\d+: [\w.]+: .+; .+", message)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(index=st.integers(0, len(PAPER) - 1), junk=st.text(alphabet="[]{}=\"'.#\\\n 1-\u00e9", max_size=6))
def test_junk_never_escapes_as_another_error(index: int, junk: str, tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(PAPER[:index] + junk + PAPER[index + 1 :], encoding="utf-8", errors="replace")
    try:
        load_policy(path)
    except ProfileError as error:
        assert "\n" not in str(error)
