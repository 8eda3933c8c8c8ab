"""The parity ladder: climbs the checks in order on one model and one contract, and says how each ended."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from zerogap.models.decoder import Decoder
from zerogap.verify import checks
from zerogap.verify.checks import Subject, Tally

Check = Callable[[Subject, Tally], None]

LADDER: dict[int, tuple[str, Check]] = {
    1: ("trainer: batch m = batch n", checks.batch_size),
    2: ("trainer: packed = alone", checks.packing),
    3: ("engine prefill = trainer", checks.prefill),
    4: ("chunked prefill = whole", checks.chunked_prefill),
    5: ("decode = prefill", checks.decoding),
    6: ("prefix hit, preemption, page size = cold", checks.cache_states),
    7: ("speculative decoding = plain", checks.speculation),
    8: ("after step, update, reload: digests, 3-7", checks.second_step),
    10: ("rollout log-probs = trainer, several steps", checks.direct),
}


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """How one check ended.

    Attributes:
        number, name: its place and meaning in the ladder.
        compared, differing: numbers compared, and numbers that differ in at least one bit.
        first: the first difference in words, or empty.
        seconds: wall time.
    """

    number: int
    name: str
    compared: int
    differing: int
    first: str
    seconds: float

    @property
    def exact(self) -> bool:
        """True if something was compared and nothing differs."""
        return self.compared > 0 and self.differing == 0


def climb(subject: Subject, numbers: Sequence[int] = tuple(LADDER)) -> Iterator[CheckResult]:
    """Run checks in order, yielding each result as it is there. Calibrated KV scales come from the subject's sequences
    where the decoder has none."""
    if subject.decoder.needs_calibration:
        subject.decoder.calibrate(subject.sequences)
    for number in numbers:
        name, check = LADDER[number]
        tally, began = Tally(), time.perf_counter()
        check(subject, tally)
        yield CheckResult(number, name, tally.compared, tally.differing, tally.first, time.perf_counter() - began)


def subject_for(decoder: Decoder, texts: Sequence[Sequence[int]] = (), seed: int = 0, max_length: int = 150) -> Subject:
    """A subject with sequences of lengths around the KV block: random ids, and given token ids of real text.

    Args:
        texts: token ids of real text, cut to `max_length`; without a tokenizer there are none.
    """
    generator = np.random.default_rng(seed)
    longest = min(max_length, decoder.max_positions - 20)  # room for what check 6 draws
    lengths = [n for n in (3, 64, 65, longest) if n <= longest]
    sequences: list[Sequence[int]] = [generator.integers(0, decoder.spec.vocab_size, n).tolist() for n in lengths]
    sequences += [list(t)[:longest] for t in texts if len(t) > 2]
    large = sum(np.prod(h.spec.shape) for h in decoder.weights.values()) > 1e9
    return Subject(decoder, sequences, trainable=("last:1",) if large else ("all",))
