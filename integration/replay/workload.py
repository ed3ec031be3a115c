"""Prompts from hash ids: made-up tokens that share prefixes exactly where the recorded ones did."""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt

from .trace import Trace

Tokens = npt.NDArray[np.int32]


class Prompts:
    """Builds the token ids of any turn of a trace.

    Every (session, hash id) seeds its own run of uniformly random tokens; the rest of the prompt, up to
    ``input_length``, is filled with tokens seeded by the turn. With ``b = block_tokens``, which may be a
    fraction, block ``i`` covers the tokens from ``floor(i * b)`` to ``floor((i + 1) * b)``: where it lies
    depends on its place alone, so equal leading ids give equal leading tokens at any scale. Where equal ids
    mean the same tokens in every session (``trace.shared_ids``), the session is left out of the seed.

    Args:
        trace: the trace, scaled or not.
        vocab_size: token ids are in ``[0, vocab_size)``.
        seed: same seed, same tokens.
    """

    def __init__(self, trace: Trace, vocab_size: int, seed: int = 0) -> None:
        self.trace, self.vocab_size, self.seed = trace, vocab_size, seed
        self._width = int(trace.block_tokens) + 2
        self._blocks: dict[tuple[int, int], Tokens] = {}

    def prompt(self, session: int, turn: int) -> list[int]:
        """Token ids of one turn.

        Args:
            session: index into ``trace.sessions``.
            turn: index into its turns.
        """
        record = self.trace.sessions[session].turns[turn]
        owner = 0 if self.trace.shared_ids else self._owner(session)
        parts: list[Tokens] = []
        filled = 0
        for place, hash_id in enumerate(record.hash_ids):
            end = min(int((place + 1) * self.trace.block_tokens), record.input_length)
            parts.append(self._block(owner, hash_id)[: end - filled])
            filled = end
        parts.append(self._random(record.input_length - filled, 1, self._owner(session), turn))
        tokens: list[int] = np.concatenate(parts).tolist()
        return tokens

    def forget(self, session: int) -> None:
        """Drop what is remembered of a session that has ended."""
        if not self.trace.shared_ids:
            owner = self._owner(session)
            self._blocks = {key: value for key, value in self._blocks.items() if key[0] != owner}

    def _owner(self, session: int) -> int:
        return zlib.crc32(self.trace.sessions[session].session_id.encode()) + 1

    def _block(self, owner: int, hash_id: int) -> Tokens:
        key = (owner, hash_id)
        if key not in self._blocks:
            self._blocks[key] = self._random(self._width, 0, owner, hash_id)
        return self._blocks[key]

    def _random(self, size: int, kind: int, owner: int, number: int) -> Tokens:
        generator = np.random.default_rng([self.seed, kind, owner, number])
        return generator.integers(0, self.vocab_size, size=size, dtype=np.int32)
