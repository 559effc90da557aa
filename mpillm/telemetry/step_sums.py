"""What steps cost, by what they held: sums over steps of about the same size, in constant memory."""

from __future__ import annotations

COLUMNS = (
    "n",  # steps
    "seconds",  # of all of them
    "contexts",  # sequences that computed context, summed over the steps
    "context_tokens",
    "context_pairs",  # pairs of a context's token and one that it attends to
    "generations",  # sequences that generated a token
    "generation_pairs",
)


class StepSums:
    """Sums over steps, a row of `COLUMNS` for each size.

    A size is the number of contexts' tokens and of generating sequences, each to about an eighth, and of
    what these attend to, to about a quarter: answers that begin together grow together, and only the steps of
    one number of sequences tell what their length costs. A step that follows another at once counts from that
    one's end, so that what is done between steps is in it.
    """

    def __init__(self) -> None:
        self._rows: dict[tuple[int, int, int], list[float]] = {}

    def add(
        self,
        seconds: float,
        contexts: int,
        generations: int,
        context_tokens: int,
        context_pairs: int,
        generation_pairs: int,
    ) -> None:
        """Add a step."""
        size = _size(context_tokens), _size(generations), _size(generation_pairs, bits=3)
        row = self._rows.get(size)
        if row is None:
            row = self._rows[size] = [0.0] * len(COLUMNS)
        row[0] += 1
        row[1] += seconds
        row[2] += contexts
        row[3] += context_tokens
        row[4] += context_pairs
        row[5] += generations
        row[6] += generation_pairs

    def to_json(self) -> dict[str, list[float]]:
        """Return the rows as columns, by name."""
        rows = [self._rows[size] for size in sorted(self._rows)]
        return {name: [round(row[i], 6) for row in rows] for i, name in enumerate(COLUMNS)}


def _size(n: int, bits: int = 4) -> int:
    """Return the first `bits` bits: the same for counts that differ by less than an eighth, or a quarter."""
    shift = max(0, n.bit_length() - bits)
    return n >> shift << shift
