"""When a prefill step may follow another while experts are out of HBM.

A step of many tokens touches nearly every expert that is out, and reads all of them over the link, whether it
prefills one prompt or ten: a third of a second for a quarter of the experts of 24 layers of Qwen3-Next.
Requests that arrive one after another would each cost all that decode such a step. Held back, they share one.
"""

from __future__ import annotations

# Reads shorter than this are about a step of their own; nothing is won by holding requests back.
LEAST_READ_S = 0.01
# A long prompt leaves room for so many prompts in all.
MOST_TOGETHER = 4


def longest_prompt(budget: int, prompts: int, block_tokens: int) -> int:
    """Most tokens of a step of ``budget`` for one of ``prompts`` prompts, in whole blocks; 0 is no limit.

    The chunks of a long prompt would fill one step after the other, each of which reads every expert that is
    out, while short prompts wait that could have shared these reads.
    """
    if prompts < 2:
        return 0
    return max(budget // min(prompts, MOST_TOGETHER) // block_tokens, 1) * block_tokens


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

    def hold(self, now_s: float, read_s: float, waiting: bool) -> bool:
        """Whether prefills should wait in this step.

        Args:
            read_s: seconds of host reads of a step that touches every expert out of HBM.
            waiting: whether there is a request to hold.
        """
        if not waiting or self.share == 1 or read_s < LEAST_READ_S:
            return False
        held = now_s < self._last_s + read_s / self.share
        self.held_steps += held
        return held

    def prefilled(self, now_s: float) -> None:
        """A step was scheduled that prefills, and could have prefilled more."""
        self._last_s = now_s
