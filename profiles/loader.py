"""Reads a profile and says in one line what is wrong with it."""

from __future__ import annotations

import math
import re
import tomllib
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args, get_type_hints

from vamp_profiles.schema import (
    HardwareProfile,
    ModelProfile,
    PolicyProfile,
    ProfileError,
    Provenance,
    Quantity,
    QuantityRule,
    TextRule,
)

Profile = TypeVar("Profile", HardwareProfile, ModelProfile, PolicyProfile)

QUANTITY_KEYS = ("value", "unit", "provenance", "source")
PROVENANCES = get_args(Provenance)


def load_hardware(name_or_path: str | Path) -> HardwareProfile:
    """The hardware profile of that name among those shipped, or at that path (``/`` or ``.toml`` in it).

    Raises:
        ProfileError: in one line, what is wrong, where, and what would work.
    """
    return _load(HardwareProfile, "hardware", name_or_path)


def load_model(name_or_path: str | Path) -> ModelProfile:
    """The model profile of that name or at that path; see ``load_hardware``."""
    return _load(ModelProfile, "model", name_or_path)


def load_policy(name_or_path: str | Path) -> PolicyProfile:
    """The policy profile of that name or at that path; see ``load_hardware``."""
    return _load(PolicyProfile, "policy", name_or_path)


def shipped(kind: str) -> tuple[str, ...]:
    """Names of the profiles of ``kind`` (hardware, model or policy) that come with the package."""
    return tuple(sorted(path.stem for path in (Path(__file__).parent / kind).glob("*.toml")))


def _load(cls: type[Profile], kind: str, name_or_path: str | Path) -> Profile:
    return _Reader(_locate(kind, name_or_path)).profile(cls, kind)


def _locate(kind: str, name_or_path: str | Path) -> Path:
    name = str(name_or_path)
    if isinstance(name_or_path, Path) or "/" in name or name.endswith(".toml"):
        return Path(name_or_path)
    if name not in shipped(kind):
        known = ", ".join(shipped(kind))
        raise ProfileError(
            f"{kind} profile {name!r}: not shipped; use one of {known}, or a path to a .toml file"
        )
    return Path(__file__).parent / kind / f"{name}.toml"


class _Reader:
    """One file: its lines to point at, its tables for values."""

    def __init__(self, path: Path) -> None:
        self.path = path
        text = self._read()
        self.lines = text.rstrip("\n").split("\n")
        try:
            self.tables = tomllib.loads(text)
        except (ValueError, RecursionError) as error:  # syntax; also too many digits, nested too deeply
            found = re.search(r" \(at line (\d+), column \d+\)$", str(error))
            line = int(found[1]) if found else len(self.lines)
            key = re.match(r"\s*\[?\s*([\w.-]+)", self.lines[line - 1])
            problem = re.sub(r" \(at .*\)$", "", str(error))
            self._fail(line, key[1] if key else "syntax", f'{problem}; write TOML such as: name = "text"')

    def profile(self, cls: type[Profile], kind: str) -> Profile:
        rules = _rules(cls)
        self._field("kind", rules["kind"])  # first: a profile of another kind has many unknown keys
        for key in self.tables:
            if key not in rules:
                self._fail(self._line(key), key, f"unknown key; a {kind} profile has {', '.join(rules)}")
        values: dict[str, Any] = {key: self._field(key, rule) for key, rule in rules.items()}
        return cls(**values)

    def _read(self) -> str:
        try:
            return self.path.read_text(encoding="utf-8")
        except OSError as error:
            raise ProfileError(
                f"{self.path}: {error.strerror}; give the path of a readable .toml file"
            ) from error
        except UnicodeDecodeError as error:
            line = error.object[: error.start].count(b"\n") + 1
            self._fail(line, "encoding", "is not UTF-8 text; save the file as UTF-8")

    def _field(self, key: str, rule: QuantityRule | TextRule) -> str | Quantity[Any] | None:
        if isinstance(rule, TextRule):
            return self._text(key, rule)
        if key not in self.tables:
            if rule.optional:
                return None
            self._fail(len(self.lines), key, f"missing; add the table [{key}] with {_example(rule)}")
        return self._quantity(key, rule)

    def _text(self, key: str, rule: TextRule) -> str:
        works = f"write {key} = {_quoted(rule.choices or (rule.example,))}"
        if key not in self.tables:
            self._fail(1, key, f"missing; {works}")
        value = self.tables[key]
        if not isinstance(value, str) or not value or (rule.choices and value not in rule.choices):
            self._fail(self._line(key), key, f"is {value!r}; {works}")
        return value

    def _quantity(self, key: str, rule: QuantityRule) -> Quantity[Any]:
        table = self.tables[key]
        if not isinstance(table, dict):
            self._fail(
                self._line(key), key, f"is {table!r}, not a table; write [{key}] with {_example(rule)}"
            )
        for name in table:
            if name not in QUANTITY_KEYS:
                known = ", ".join(QUANTITY_KEYS)
                self._fail(self._line(key, name), f"{key}.{name}", f"unknown key; a quantity has {known}")
        for name in QUANTITY_KEYS:
            if name not in table:
                self._fail(self._line(key), f"{key}.{name}", f"missing; a quantity has {_example(rule)}")
        self._check(key, "unit", table["unit"], (rule.unit,))
        self._check(key, "provenance", table["provenance"], PROVENANCES)
        self._check(key, "source", table["source"], ())
        return Quantity(
            self._number(key, table["value"], rule), rule.unit, table["provenance"], table["source"]
        )

    def _check(self, key: str, name: str, value: object, choices: tuple[str, ...]) -> None:
        if not isinstance(value, str) or not value or (choices and value not in choices):
            works = _quoted(choices) or "how the value was obtained, as text"
            self._fail(self._line(key, name), f"{key}.{name}", f"is {value!r}; write {works}")

    def _number(self, key: str, value: object, rule: QuantityRule) -> int | float:
        line, name = self._line(key, "value"), f"{key}.value"
        kind = "a whole number" if rule.whole else "a number"
        wanted = int if rule.whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, wanted):
            self._fail(line, name, f"is {value!r}, not {kind}; write for example {rule.example:.6g}")
        below = value <= rule.low if rule.open_low else value < rule.low
        if below or value > rule.high or not math.isfinite(value):
            bounds = f"{'over' if rule.open_low else 'at least'} {rule.low:.6g} and at most {rule.high:.6g}"
            self._fail(line, name, f"is {value!r}, must be {bounds}; for example {rule.example:.6g}")
        return int(value) if rule.whole else float(value)

    def _line(self, key: str, name: str | None = None) -> int:
        """Line of ``key``, or of ``name`` within its table where ``name`` has a line of its own."""
        header, inside = 0, False
        for number, line in enumerate(self.lines, 1):
            if re.match(rf"\s*(\[\s*)?[\"']?{re.escape(key)}[\"']?\s*[\]=.]", line):
                header, inside = header or number, line.lstrip().startswith("[")
                if name is not None and re.match(rf"[^=]*\.\s*[\"']?{re.escape(name)}[\"']?\s*[\]=]", line):
                    return number
            elif line.lstrip().startswith("["):
                inside = False
            elif inside and name is not None and re.match(rf"\s*[\"']?{re.escape(name)}[\"']?\s*=", line):
                return number
        return header or 1

    def _fail(self, line: int, field: str, problem: str) -> NoReturn:
        one_line = " ".join(problem.split())
        raise ProfileError(f"{self.path}:{line}: {field}: {one_line}")


def _rules(cls: type[Profile]) -> dict[str, QuantityRule | TextRule]:
    return {name: get_args(hint)[1] for name, hint in get_type_hints(cls, include_extras=True).items()}


def _quoted(choices: tuple[str, ...]) -> str:
    return " or ".join(f'"{choice}"' for choice in choices)


def _example(rule: QuantityRule) -> str:
    number = f"{rule.example:.6g}"
    return f'value = {number}, unit = "{rule.unit}", provenance = "configured", source = "..."'
