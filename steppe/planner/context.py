"""The longest sequence that fits, plain and flattened, and the peak that stops it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from steppe.core.ledger import PEAKS
from steppe.core.policy import Off
from steppe.planner.layouts import Job, divisors, layouts
from steppe.planner.predict import PLAIN, Policies
from steppe.planner.search import Candidate, candidate, programs

LONGEST = 2**26  # 64M tokens: longer ones are reported as "at least"
STEP_TOKENS = 1024


@dataclass(frozen=True)
class Context:
    """The longest S in steps of 1,024 tokens (or of D, if that is more), and what the next step runs into."""

    num_tokens: int
    stopped_by: str  # the owner of the peak that doesn't fit at the next step; "" when nothing stops it
    missing_bytes: int


_NOTHING = Context(0, "", 2**62)


def max_context(job: Job) -> Context:
    """The longest context of any layout under any program that may run, the one with most switches tried first.

    Policies as they are, not fitted into the host: where its memory stops the run, `search` may go a little further.
    """
    return _longest(job, _all_programs)


def max_context_plain(job: Job) -> Context:
    """The same of the plain program on its own strongest layout."""
    return _longest(job, lambda job: (PLAIN,))


def _all_programs(job: Job) -> tuple[Policies, ...]:
    """Every program that some layout may run at the longest length: at short ones less pays, so these are all."""
    longest = job.with_seq_len(_most(_step(job)))
    found = [way for shape in layouts(longest, longest_first=True) for way in programs(longest, shape)]
    unlike = {tuple(way.items()): way for way in found}.values()
    return tuple(sorted(unlike, key=lambda way: -_num_on(way)))


def _num_on(policies: Policies) -> int:
    return sum(not isinstance(policy, Off) for policy in policies.values())


def _most(step: int) -> int:
    return LONGEST // step * step


def _rank(context: Context) -> tuple[int, int]:
    return context.num_tokens, -context.missing_bytes


def _longest(job: Job, ways: Callable[[Job], tuple[Policies, ...]]) -> Context:
    """Over D the largest only: it leaves each rank the fewest tokens; over E_p, P and programs all that beat the best
    so far, the largest groups first."""
    step = _step(job)
    open_job = job.with_seq_len(step)
    best = _NOTHING
    shapes = list(layouts(open_job, longest_first=True))[::-1]
    for policies in ways(open_job):
        for shape in shapes:
            at = _at(open_job, shape.mesh.sequence, shape.mesh.expert, shape.mesh.vocab, policies)
            if not best.num_tokens:
                best = max(best, _boundary_of(at, step, 0), key=_rank)
            elif best.num_tokens < LONGEST and at(best.num_tokens + step).fits:
                best = _boundary_of(at, step, best.num_tokens)
    return best


def _step(job: Job) -> int:
    """Every D that the heads allow divides this, so that one grid serves all layouts."""
    largest = max(n for n in divisors(job.world) if job.model.num_heads % n == 0)
    return max(STEP_TOKENS, job.sequence or 1) if STEP_TOKENS % largest == 0 else STEP_TOKENS * largest


def _at(job: Job, sequence: int, expert: int, vocab: int, policies: Policies) -> Callable[[int], Candidate]:
    return lambda tokens: candidate(job.with_seq_len(tokens).shape(sequence, expert, vocab), policies, job.without)


def _boundary_of(at: Callable[[int], Candidate], step: int, known: int) -> Context:
    """The last step that fits. The ledger grows with S, nearly in proportion, so the line through the two ends is a
    good guess of where it meets the memory; a guess that falls short is followed by a halving."""
    low, high = max(known, step), _most(step)
    if not at(low).fits:
        return _stopped(0, at(step))
    beyond = at(high)
    if beyond.fits:
        return Context(LONGEST, "", 0)
    guess = True
    while high - low > step:
        middle = _guess(at(low), beyond, low, high, step) if guess else (low + high) // 2
        middle = min(max(middle // step * step, low + step), high - step)
        seen = at(middle)
        shrunk = (high - middle if seen.fits else middle - low) * 4 < high - low
        low, high, beyond = (middle, high, beyond) if seen.fits else (low, middle, seen)
        guess = shrunk or not guess
    return _stopped(low, beyond)


def _guess(inside: Candidate, beyond: Candidate, low: int, high: int, step: int) -> int:
    """Where the line of device bytes (or host bytes, if they stop the run) crosses the limit; one step above it."""
    machine = inside.shape.machine
    if beyond.device_missing:
        ends, limit = (
            (inside.forecast.device_peak_bytes, beyond.forecast.device_peak_bytes),
            machine.device_memory_bytes,
        )
    else:
        ends = (inside.forecast.host_bytes_per_node, beyond.forecast.host_bytes_per_node)
        limit = machine.host_memory_bytes
    share = (limit - ends[0]) / max(ends[1] - ends[0], 1)
    return low + round(share * (high - low)) + (step if share < 0.5 else 0)


def _stopped(tokens: int, beyond: Candidate) -> Context:
    if beyond.host_missing and not beyond.device_missing:
        return Context(tokens, "host memory", beyond.host_missing)
    return Context(tokens, top_peak(beyond), beyond.device_missing)


def in_words(owner: str) -> str:
    """An owner as a reader knows it: `other` holds the norms, the MLP and the gradients of the block at work."""
    return "activations of a block" if owner == "other" else owner


def top_peak(seen: Candidate) -> str:
    """Who holds most at the peak; of the four peaks the largest when they hold half of it."""
    holders = seen.forecast.ledger.holders
    peaks = {name: holders.get(name, 0) for name in PEAKS}
    if 2 * sum(peaks.values()) >= sum(holders.values()):
        return max(peaks, key=lambda name: peaks[name])
    return max(holders, key=lambda name: holders[name])
