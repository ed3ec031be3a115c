"""Find out the format of a trace file and read it."""

from __future__ import annotations

import io
import json
from pathlib import Path

from .trace import Trace, TraceError
from .trace_jsonl import read_mooncake, read_sessions
from .trace_traj import read_traj

FORMATS = ("session", "mooncake", "traj")


def load_trace(path: Path, format: str | None = None, block_tokens: int | None = None) -> Trace:
    """Read a trace.

    Args:
        path: .jsonl, .traj, or either compressed as .zst.
        format: one of ``FORMATS``; None to go by extension, then by the fields of the first row.
        block_tokens: tokens per hash id; None to infer it.

    Raises:
        TraceError: the file cannot be read as that format.
    """
    if format is not None and format not in FORMATS:
        raise TraceError(path, None, None, f"unknown format '{format}'; give one of {', '.join(FORMATS)}")
    text = read_text(path)
    if not text.strip():
        raise TraceError(path, None, None, "the file is empty; give one JSON object per turn")
    kind = format or detect(path, text)
    if kind == "traj":
        return read_traj(path, text)
    reader = read_sessions if kind == "session" else read_mooncake
    return reader(path, io.StringIO(text), block_tokens)


def read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TraceError(path, None, None, f"cannot be read ({error.strerror}); give a trace file") from None
    if path.suffix == ".zst":
        data = decompress(path, data)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise TraceError(
            path, line, None, "not UTF-8 text; give .jsonl, .traj or one of them as .zst"
        ) from None


def decompress(path: Path, data: bytes) -> bytes:
    try:
        import zstandard
    except ImportError:
        raise TraceError(
            path, None, None, "needs the package zstandard; install it or give plain .jsonl"
        ) from None
    # Long-distance files need a window larger than the decoder's default of 128 MiB.
    decoder = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    try:
        return decoder.stream_reader(io.BytesIO(data)).read()
    except zstandard.ZstdError as error:
        raise TraceError(path, None, None, f"not a zstd file ({error}); give plain .jsonl") from None


def detect(path: Path, text: str) -> str:
    """Name the format by the extension or else by the fields of the first row."""
    if ".traj" in path.suffixes:
        return "traj"
    first = next(line for line in text.splitlines() if line.strip())
    try:
        row = json.loads(first)
    except json.JSONDecodeError:
        # A pretty-printed trajectory starts with a lone brace; a broken row is for the reader to report.
        return "traj" if '"trajectory"' in text[:4096] else "session"
    if isinstance(row, dict):
        if "trajectory" in row:
            return "traj"
        if "session_id" in row or "turn" in row:
            return "session"
        if "hash_ids" in row and "timestamp" in row:
            return "mooncake"
    known = (
        "session rows have session_id and turn, mooncake rows timestamp and hash_ids, traj files trajectory"
    )
    raise TraceError(path, None, None, f"unknown format: {known}; or give --format")
