"""The answer as people read it: a table of plain beside flattened, the switches with their reasons, the sweep."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from steppe.core.ledger import PEAKS
from steppe.core.units import format_bytes, format_tokens
from steppe.planner.answer import Answer, Side
from steppe.planner.context import LONGEST, in_words


def report(told: Answer) -> str:
    """Everything about one number of ranks."""
    job = told.job
    title = (
        f"{told.model}: S {format_tokens(job.batch.seq_len)}, batch {job.batch.batch}, {job.world} ranks with "
        f"{format_bytes(job.machine.device_memory_bytes)} each"
    )
    switches = [(s.flattener, "on" if s.on else "off", s.why) for s in told.switches]
    return "\n".join(
        (
            title,
            "",
            *table(["per rank", "plain", "flattened"], _rows(told)),
            *(
                f"{name} peak: {_holders(side)}"
                for name, side in (("plain", told.plain), ("flattened", told.flattened))
            ),
            "",
            "switches, in the method's order of decision",
            *_hanging(switches),
            "",
            *(f"* {sentence}" for sentence in (*told.sentences, *_rates(told))),
        )
    )


def _rows(told: Answer) -> Iterator[Sequence[str]]:
    plain, flat = told.plain, told.flattened
    for name in PEAKS:
        yield f"{name} peak", format_bytes(plain.peaks[name]), format_bytes(flat.peaks[name])
    for label, of in _LINES:
        yield label, of(plain), of(flat)


def _fit(side: Side) -> str:
    seen = side.chosen
    if seen.device_missing:
        return f"no, {format_bytes(seen.device_missing)} too many"
    return f"no, host misses {format_bytes(seen.host_missing)}" if seen.host_missing else "yes"


def _holders(side: Side) -> str:
    holders = side.chosen.forecast.ledger.holders
    most = sorted(holders, key=lambda owner: -holders[owner])[:4]
    return ", ".join(f"{in_words(owner)} {format_bytes(holders[owner])}" for owner in most)


def _context(side: Side) -> str:
    tokens = side.context.num_tokens
    if tokens >= LONGEST:
        return f"{format_tokens(tokens)} or more"
    return f"{format_tokens(tokens)} (then {in_words(side.context.stopped_by)})"


_LINES = (
    ("device peak", lambda s: format_bytes(s.chosen.forecast.device_peak_bytes)),
    ("  at", lambda s: s.chosen.forecast.ledger.moment),
    ("reserved, at least", lambda s: format_bytes(s.chosen.forecast.reserved_bytes)),
    ("fits", _fit),
    ("first step", lambda s: format_bytes(s.chosen.forecast.phases["first step"])),
    ("evaluation", lambda s: format_bytes(s.chosen.forecast.phases["evaluation"])),
    ("host memory of a node", lambda s: format_bytes(s.chosen.forecast.host_bytes_per_node)),
    ("longest context", _context),
    ("tokens/s, modelled", lambda s: f"{s.chosen.time.tokens_per_second:,.0f}"),
    ("longest part of a step", lambda s: s.chosen.time.longest),
)


def _rates(told: Answer) -> Iterator[str]:
    if told.rates["link"]:
        yield f"to hide what passes over the host link behind compute: {told.rates['link'] / 1e9:.2f} GB/s each way"
    if told.rates["host_memory"]:
        rate = told.rates["host_memory"] / 1e9
        yield f"to keep the update on the host within a tenth of the step: {rate:.1f} GB/s of host memory a node"


def sweep_report(answers: Sequence[Answer], refused: Mapping[int, str]) -> str:
    """Several numbers of ranks side by side, which peaks fall when devices double, and why some numbers can't be."""
    head = [
        "ranks",
        *(f"{name}, plain" for name in PEAKS),
        "plain peak",
        "flattened",
        "context plain",
        "flattened",
        "on",
    ]
    lines = table(head, (_sweep_row(told) for told in answers))
    said = (*falls(answers), *(f"{world} ranks: {why}" for world, why in refused.items()))
    return "\n".join((*lines, "", *(f"* {line}" for line in said)))


def _sweep_row(told: Answer) -> Sequence[str]:
    plain, flat = told.plain, told.flattened
    on = ", ".join(s.flattener for s in told.switches if s.on) or "none"
    peak = format_bytes(plain.chosen.forecast.device_peak_bytes)
    return (
        str(told.job.world),
        *(format_bytes(plain.peaks[name]) for name in PEAKS),
        peak if plain.chosen.fits else f"{peak} (no)",
        format_bytes(flat.chosen.forecast.device_peak_bytes) + ("" if flat.chosen.fits else " (no)"),
        format_tokens(plain.context.num_tokens),
        format_tokens(flat.context.num_tokens),
        on,
    )


def falls(answers: Sequence[Answer]) -> Iterator[str]:
    """What more devices do to each plain peak, and which one hits the ceiling at the largest number."""
    if len(answers) < 2:
        return
    first, *_, last = sorted(answers, key=lambda told: told.job.world)
    factor = last.job.world / first.job.world
    for name in PEAKS:
        before, after = first.plain.peaks[name], last.plain.peaks[name]
        if before:
            verb = "falls" if after < before else "doesn't fall"
            times = f" ({before / max(after, 1):.1f}x over {factor:g}x the devices)" if after < before else ""
            yield f"{name}: {format_bytes(before)} -> {format_bytes(after)}, {verb}{times}"
    holders = last.plain.chosen.forecast.ledger.holders
    most = max(PEAKS, key=lambda name: holders.get(name, 0))
    yield f"at {last.job.world} ranks {most} is the largest of the four at plain's peak: it hits the ceiling next"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Columns padded to their widest cell, the first to the left and the others to the right."""
    cells = [list(head), *(list(row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]).rstrip()
        for row in cells
    ]
    return [lines[0], "-" * min(len(lines[0]), 120), *lines[1:]]


def _hanging(rows: Sequence[tuple[str, str, str]]) -> Iterator[str]:
    width = max(len(name) for name, _, _ in rows)
    for name, state, why in rows:
        yield f"{name.ljust(width)}  {state.ljust(3)}  {why}"
