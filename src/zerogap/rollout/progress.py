"""What an engine tells of its work: counts since it was built, how far a call is, single tokens as they are drawn."""

import dataclasses


@dataclasses.dataclass
class Statistics:
    """Counts since construction. Seconds of a step that computes both kinds of rows are split by their number.

    Attributes:
        prefill_tokens: rows that computed known tokens (prompts, and what a preemption or an update made necessary).
        decode_tokens: rows that computed the newest drawn token of a sequence, one each.
        draft_tokens: rows that computed guesses behind these.
        accepted_tokens: of the guesses, those that became tokens without a row of their own: each saved one.
        decode_cost, plain_cost: what decoding cost by the model that speculation decides with (`PassCost`), and what
            the same tokens would have cost without guesses.
        cache_hit_tokens: tokens whose keys and values were found in the prefix cache.
        preemptions: times a sequence had to give up its pages.
    """

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    decode_cost: float = 0.0
    plain_cost: float = 0.0
    cache_hit_tokens: int = 0
    preemptions: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a call of `generate` is: samples finished of all, tokens drawn, seconds since it began."""

    finished: int
    total: int
    tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


@dataclasses.dataclass(frozen=True)
class TokenEvent:
    """One drawn token of a stream.

    Attributes:
        index: which request, in input order (prompt by prompt, then sample by sample).
        token, logprob: the drawn id and its log-prob.
        text: the text that became certain with it; empty without a tokenizer, and often for parts of characters.
        finish_reason: `stop` or `length` on a request's last token, else None.
    """

    index: int
    token: int
    logprob: float
    text: str
    finish_reason: str | None
