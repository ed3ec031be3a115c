"""When a prefill step may follow another while experts are out of HBM.

A step of many tokens touches nearly every expert that is out, and reads all of them over the link, whether it
prefills one prompt or ten: a third of a second for a quarter of the experts of 24 layers of Qwen3-Next.
Requests that arrive one after another would each cost all that decode such a step. Held back, they share one.
"""

from __future__ import annotations

from collections.abc import Sequence

# Reads shorter than this are about a step of their own; nothing is won by holding requests back.
LEAST_READ_S = 0.01
# A long prompt leaves room for so many prompts in all.
MOST_TOGETHER = 8
# Requests are held until they have waited together for so many times as long as their prefill would stop
# those who decode, times the number of these. Were arrivals independent, as long as it stops them would keep
# the sum of both delays least; but sessions answer what they were told, so that who finishes decoding
# meanwhile is not stopped, and comes with the next pass: the more decode, the more of them do.
PATIENCE = 2.0


def longest_prompt(budget: int, lengths: Sequence[int], block_tokens: int) -> int:
    """Most tokens of a step of ``budget`` for one prompt, in whole blocks; 0 is no limit.

    The chunks of a long prompt would fill one step after the other, each of which reads every expert that is
    out, while short prompts wait that could have shared these reads. As much as leaves room for all of them,
    so that the step is full, and at least the part of one of ``MOST_TOGETHER``.

    Args:
        lengths: tokens that are to be computed of each prompt.
    """
    if len(lengths) < 2 or sum(lengths) <= budget:
        return 0
    left, most = budget, 0
    for place, length in enumerate(sorted(lengths)):
        most = left // (len(lengths) - place)
        if length > most:
            break
        left -= length
    return max(max(most, budget // MOST_TOGETHER) // block_tokens, 1) * block_tokens


class PrefillPace:
    """Keeps prefill steps to a share of the time. What has nothing else to do need not ask.

    Args:
        share: of the time that steps with prefills may take for their reads; 1 never holds a request.

    Attributes:
        held_steps: steps in which waiting requests were held.
    """

    def __init__(self, share: float) -> None:
        assert 0 < share <= 1
        self.share = share
        self.held_steps = 0
        self._last_s = float("-inf")

    def paces(self, read_s: float) -> bool:
        """Whether anybody is held, or cut for others, where a step's host reads take ``read_s``."""
        return self.share < 1 and read_s >= LEAST_READ_S

    def hold(self, now_s: float, read_s: float, waiting: int, waited_s: float, decoding: int) -> bool:
        """Whether prefills should wait in this step.

        Nobody does who has waited for long, or whose reads would stop few others (``PATIENCE``).

        Args:
            read_s: seconds of host reads of a step that touches every expert out of HBM.
            waiting: requests to hold.
            waited_s: seconds that they have waited, summed.
            decoding: requests that decode.
        """
        if not waiting or not self.paces(read_s):
            return False
        held = self.since(now_s) < read_s / self.share and waited_s < PATIENCE * decoding**2 * read_s
        self.held_steps += held
        return held

    def prefilled(self, now_s: float) -> None:
        """A step was scheduled that prefills, and could have prefilled more."""
        self._last_s = now_s

    def since(self, now_s: float) -> float:
        """Seconds since then."""
        return now_s - self._last_s
