"""Rows of the serving benchmark's results files, found and compared."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]
KINDS = ("replay", "decode_step", "growth")
HOST_KV = ("vllm_host_kv", "vamp_spill")


@dataclass(frozen=True)
class File:
    """One results file.

    Attributes:
        name: of the file.
        record: what is in it.
    """

    name: str
    record: Row


def read(folder: Path) -> list[File]:
    """The benchmark's files in ``folder`` by name, which begins with the date.

    Raises:
        ValueError: one is broken, or there is none.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            if record["name"] in KINDS and "bench/serve_h200.py" in record["command"]:
                found.append(File(path.name, record))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: not a results file ({error})") from error
    if not found:
        raise ValueError(f"{folder}: no results of bench/serve_h200.py in it")
    return found


def by_machine(files: Iterable[File]) -> dict[tuple[int, int], list[File]]:
    """Files by layers of the model and GPUs, those that most files have first."""
    found: dict[tuple[int, int], list[File]] = {}
    for file in files:
        layers, gpus = (
            max((row.get(name) or 0 for row in file.record["rows"]), default=0) for name in ("layers", "tp")
        )
        found.setdefault((layers, gpus), []).append(file)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def engine(row: Row) -> str:
    """The engine of a growth, as a title."""
    return row["arm"] + (" with KV offloading" if row.get("host_kv_gib") else "")


class Rows:
    """All rows of one kind; where a point was measured again, the newest."""

    def __init__(self, files: Iterable[File], kind: str, keys: tuple[str, ...]) -> None:
        self.rows: dict[tuple[Any, ...], Row] = {}
        self._of_file: dict[str, list[Row]] = {}
        for file in files:
            if file.record["name"] != kind:
                continue
            anchor = file.record.get("anchor")
            anchor = file.name if anchor == "this file" else anchor
            rows = [{**row, "file": file.name, "anchor": anchor} for row in file.record["rows"]]
            self._of_file[file.name] = rows
            for row in rows:
                key = tuple(row.get(name) for name in keys)
                self.rows.pop(key, None)
                self.rows[key] = row

    def where(self, **values: Any) -> list[Row]:
        return [row for row in self.rows.values() if all(row.get(k) == v for k, v in values.items())]

    def anchor(self, row: Row) -> Row | None:
        """The unmodified arm that ``row`` is compared with: its file's anchor, or the newest there is."""
        wanted = {"arm": "vllm", "sessions": row["sessions"], "workload": row["workload"]}
        named = self._of_file.get(row["anchor"] or "", [])
        found = [r for r in named if all(r[k] == v for k, v in wanted.items())] or self.where(**wanted)
        return found[-1] if found else None

    def at_level_zero(self, row: Row) -> float | None:
        """Milliseconds of a decode step at level 0 in the engine of ``row``, else of the newest there is."""
        wanted = {"arm": row["arm"], "batch": row["batch"], "level_share": 0.0}
        same = [r for r in self._of_file[row["file"]] if all(r[k] == v for k, v in wanted.items())]
        return min((r["ms_median"] for r in same or self.where(**wanted)), default=None)

    def upper(self, row: Row) -> Row | None:
        found = self.where(arm="upper_bound", sessions=row["sessions"], workload=row["workload"])
        return found[-1] if found else None


def vamp(rows: Iterable[Row], most: float = 1.0, host_kv: bool | None = None) -> list[Row]:
    """VAMP's rows with at most the share ``most`` of the experts out, with or without host KV."""
    chosen = [r for r in rows if r["arm"].startswith("vamp") and r["max_offload_ratio"] <= most + 1e-9]
    return [r for r in chosen if host_kv is None or (r["host_kv_gib"] > 0) == host_kv]


def best(rows: list[Row], value: Callable[[Row], float]) -> Row | None:
    return max(rows, key=value, default=None)


def boundary(rows: list[Row], limit_s: float = 1.0) -> int | None:
    """Most sessions with TTFT p90 within the limit, every smaller number measured being within it too."""
    largest = None
    for row in sorted(rows, key=lambda r: r["sessions"]):
        if row["ttft_s_p90"] is None or row["ttft_s_p90"] > limit_s:
            break
        largest = row["sessions"]
    return largest
