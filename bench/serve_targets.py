"""What the engine must reach on one H200, held against rows of results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from serve_rows import Row, Rows, best, boundary, engine, vamp

MOVED_AT_10 = {16: 1.30, 64: 1.55}


class Verdict(NamedTuple):
    """One line of the table; ``met`` is ``None`` where nothing was measured."""

    figure: str
    target: str
    measured: str
    met: bool | None


def ratio(one: float | None, other: float | None) -> float:
    """``one / other``; 0 where either is missing."""
    return one / other if one is not None and other else 0.0


def against(replays: Rows, rows: list[Row], figure: str, ttft: float, turns: float) -> Verdict:
    """The best of ``rows`` by turns/s against its anchor."""
    target = f"TTFT p90 {ttft:g}x lower, turns/s {turns:g}x"
    row = best(rows, lambda r: r["turns_per_s"] or 0.0)
    anchor = replays.anchor(row) if row is not None else None
    if row is None or anchor is None:
        return Verdict(figure, target, "not measured", None)
    lower = ratio(anchor["ttft_s_p90"], row["ttft_s_p90"])
    more = ratio(row["turns_per_s"], anchor["turns_per_s"])
    measured = f"{row['arm']}: TTFT p90 {lower:.1f}x lower, turns/s {more:.2f}x"
    return Verdict(figure, target, measured, lower >= ttft and more >= turns)


def serving(replays: Rows, workload: str) -> Iterator[Verdict]:
    """The targets of the replays."""
    at = {n: replays.where(sessions=n, workload=workload) for n in (16, 28)}
    yield against(replays, vamp(at[28]), "28 sessions, best VAMP arm against unmodified", 15, 3)
    yield _near_upper(replays, vamp(at[28]))
    off10, off25 = vamp(at[16], 0.10, False), vamp(at[28], 0.25, False)
    yield against(replays, off10, "16 sessions, host KV off, 10 % of experts moved", 10, 2)
    yield _tpot(replays, off10)
    yield against(replays, off25, "28 sessions, host KV off, up to 25 % moved", 8, 1.6)
    yield from _boundaries(replays, workload)
    yield from _host_kv(replays, workload)
    yield from _hits(replays, [*vamp(at[28]), *off10])


def _near_upper(replays: Rows, rows: list[Row]) -> Verdict:
    figure, target = "28 sessions, best VAMP arm against the upper bound", "turns/s within 15 %"
    row = best(rows, lambda r: r["turns_per_s"] or 0.0)
    upper = replays.upper(row) if row is not None else None
    if row is None or upper is None:
        return Verdict(figure, target, "not measured", None)
    share = ratio(row["turns_per_s"], upper["turns_per_s"])
    return Verdict(figure, target, f"{row['arm']}: {100 * share:.0f} % of it", share >= 0.85)


def _tpot(replays: Rows, rows: list[Row]) -> Verdict:
    figure, target = "16 sessions, the same arm, TPOT p50", "not above the unmodified arm's"
    row = best(rows, lambda r: r["turns_per_s"] or 0.0)
    anchor = replays.anchor(row) if row is not None else None
    times = [found and found["tpot_s_p50"] for found in (row, anchor)]
    if None in times:
        return Verdict(figure, target, "not measured", None)
    mine, its = (1e3 * value for value in times)
    return Verdict(figure, target, f"{mine:.1f} ms against {its:.1f} ms", mine <= its)


def _boundaries(replays: Rows, workload: str) -> Iterator[Verdict]:
    plain = boundary(replays.where(arm="vllm", workload=workload))
    for most, factor in ((0.10, 1.8), (0.25, 2.5)):
        figure = f"sessions with TTFT p90 at most 1 s, host KV off, {100 * most:.0f} % of experts out"
        arms = {r["arm"] for r in vamp(replays.where(workload=workload), most, False)}
        found = [boundary(replays.where(arm=arm, workload=workload)) for arm in sorted(arms)]
        mine = max((n for n in found if n is not None), default=None)
        target = f"{factor:g}x the unmodified one"
        if mine is None or plain is None:
            yield Verdict(figure, target, f"{mine or '-'} against {plain or '-'}", None)
        else:
            yield Verdict(figure, target, f"{mine} against {plain}", mine >= factor * plain)


def _host_kv(replays: Rows, workload: str) -> Iterator[Verdict]:
    figure, target = "against unmodified with host KV offloading", "not worse by more than 3 %"
    for plain in sorted(replays.where(arm="vllm_host_kv", workload=workload), key=lambda r: r["sessions"]):
        rows = vamp(replays.where(sessions=plain["sessions"], workload=workload), 1.0, True)
        row = best(rows, lambda r: r["turns_per_s"] or 0.0)
        if row is None:
            continue
        turns = ratio(row["turns_per_s"], plain["turns_per_s"])
        ttft = ratio(row["ttft_s_p90"], plain["ttft_s_p90"])
        measured = (
            f"{row['arm']}, mean level {row['level_mean']:.1f}: turns/s {turns:.2f}x, TTFT p90 {ttft:.2f}x"
        )
        yield Verdict(
            f"{plain['sessions']} sessions, {figure}", target, measured, turns >= 0.97 and ttft <= 1.03
        )


def _hits(replays: Rows, rows: list[Row]) -> Iterator[Verdict]:
    figure, target = "prefix hit rate", "at least 90 % of the upper bound's"
    for row in {id(row): row for row in rows}.values():
        upper = replays.upper(row)
        if upper is None:
            continue
        share = ratio(row["prefix_hit_rate"], upper["prefix_hit_rate"])
        measured = f"{100 * (row['prefix_hit_rate'] or 0):.1f} %: {100 * share:.0f} % of it"
        yield Verdict(f"{row['sessions']} sessions, {row['arm']}, {figure}", target, measured, share >= 0.9)


def steps(decode: Rows) -> Iterator[Verdict]:
    """The targets of decode steps."""
    ours, plain = level_zero(decode, "vamp"), level_zero(decode, "vllm")
    both = sorted(set(ours) & set(plain))
    if both:
        worst = max(both, key=lambda batch: ours[batch] / plain[batch])
        over = ours[worst] / plain[worst]
        measured = f"{100 * (over - 1):+.1f} % at batch {worst}, the worst of {', '.join(map(str, both))}"
        yield Verdict("decode step, level 0, our kernel", "at most 2 % slower", measured, over <= 1.02)
    for share, limits in ((0.05, {16: 1.10, 64: 1.10}), (0.10, MOVED_AT_10)):
        for batch, limit in limits.items():
            figure = f"decode step, {100 * share:.0f} % offloaded, batch {batch}, against level 0"
            yield from _moved(decode, "vamp", share, batch, figure, limit)
    figure = "decode step, 10 % in the HBM of another GPU, batch 64, against level 0"
    yield from _moved(decode, "vamp_peer", 0.10, 64, figure, 1.10)


def _moved(decode: Rows, arm: str, share: float, batch: int, figure: str, limit: float) -> Iterator[Verdict]:
    """A decode step with ``share`` of the experts out, where its engine was measured at level 0 too."""
    for row in decode.where(arm=arm, batch=batch, level_share=share):
        zero = decode.at_level_zero(row)
        if zero is not None:
            over = row["ms_median"] / zero
            yield Verdict(figure, f"at most {limit:.2f}x", f"{over:.2f}x", over <= limit)


def level_zero(decode: Rows, arm: str) -> dict[int, float]:
    """Median milliseconds at level 0 by batch; the least of several passes."""
    result: dict[int, float] = {}
    for row in decode.where(arm=arm, level_share=0.0):
        result[row["batch"]] = min(row["ms_median"], result.get(row["batch"], row["ms_median"]))
    return result


def growths(found: Rows) -> Iterator[Verdict]:
    """The targets of a growth, by the worst of its repeats."""
    for arm, limit in (("vamp", 3.0), ("vamp_vllm_kernel", 30.0)):
        for name in sorted({engine(row) for row in found.where(arm=arm)}):
            rows = [row for row in found.where(arm=arm) if engine(row) == name]
            bubble, total = (max(r[key] for r in rows) for key in ("bubble_ms", "total_ms"))
            figure = f"growth of {rows[0]['growth_gib']:.2f} GiB, {name}"
            measured = f"{bubble:.1f} ms, total {total:.1f} ms, the worst of {len(rows)}"
            target = f"bubble at most {limit:g} ms, total at most 40 ms"
            yield Verdict(figure, target, measured, bubble <= limit and total <= 40)
