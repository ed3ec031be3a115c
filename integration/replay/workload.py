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
        # What the last prompt of each session had in blocks: the next one mostly begins with the same.
        self._begun: dict[int, tuple[tuple[int, ...], Tokens]] = {}

    def prompt(self, session: int, turn: int) -> list[int]:
        """Token ids of one turn.

        Args:
            session: index into ``trace.sessions``.
            turn: index into its turns.
        """
        record = self.trace.sessions[session].turns[turn]
        owner = 0 if self.trace.shared_ids else self._owner(session)
        common, begun = self._common(session, record.hash_ids)
        begun = begun[: record.input_length]
        parts, filled = [begun], len(begun)
        for place in range(common, len(record.hash_ids)):
            end = min(int((place + 1) * self.trace.block_tokens), record.input_length)
            parts.append(self._block(owner, record.hash_ids[place])[: end - filled])
            filled = end
        blocks = np.concatenate(parts)
        self._begun[session] = record.hash_ids, blocks
        tail = self._random(record.input_length - filled, 1, self._owner(session), turn)
        tokens: list[int] = np.concatenate((blocks, tail)).tolist()
        return tokens

    def _common(self, session: int, ids: tuple[int, ...]) -> tuple[int, Tokens]:
        """How many leading ids the session's last prompt had too, and the tokens of these."""
        last, tokens = self._begun.get(session, ((), np.empty(0, np.int32)))
        pairs = enumerate(zip(last, ids, strict=False))
        common = next((place for place, (a, b) in pairs if a != b), min(len(last), len(ids)))
        # A prompt that was cut has fewer tokens than ids.
        while common and int(common * self.trace.block_tokens) > len(tokens):
            common -= 1
        return common, tokens[: int(common * self.trace.block_tokens)]

    def forget(self, session: int) -> None:
        """Drop what is remembered of a session that has ended."""
        self._begun.pop(session, None)
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
