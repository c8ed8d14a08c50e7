"""Which continuations are proposed?

A leaf: the engine is whole without it. Two features propose tokens that the loop in scheduler.py
then treats like any others. *Prompt lookup* guesses the next tokens of a sequence, and one forward
pass verifies them all. *Beam search* ranks the offers of several sequences; the scheduler turns its
choice into forks and frees, and beams share every block up to where they part (paper, section 4.4).

Invariants: a draft never changes what is sampled; no beam is listed twice, nothing follows an end
token, and a score is

    sum of logprobs / generated length ** length_penalty,   the end token counted.

Next: scheduler.py, which computes what is proposed.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from nanopage.arguments import Checked, between, neutral, require
from nanopage.sequence import Request, SamplingParams, Sequence


@dataclass(frozen=True)
class PromptLookup(Checked):
    """Drafts without a draft model: what followed the last tokens when they came up before.

    Names as in vLLM's speculative_config, method "ngram" (v1/spec_decode/ngram_proposer.py). Each
    sequence keeps an index from n-gram to the position behind its latest occurrence: a token adds
    one entry for each n, and a step looks up at most as many, however long the text.
    """

    num_speculative_tokens: int = between(1)
    method: str = "ngram"
    model: Any = neutral(None, "ngram", "[ngram]", instead="drafts from the text itself")
    prompt_lookup_min: int | None = between(1, default=None)
    prompt_lookup_max: int | None = between(1, default=None)
    few: ClassVar[int] = 4  # so many sequences always draft

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.method == "ngram", "method", self.method, "'ngram'")
        require(bool(self.sizes), "prompt_lookup_max", self.prompt_lookup_max,
                f"at least prompt_lookup_min={self.prompt_lookup_min}")

    @property
    def sizes(self) -> range:
        """The n of the n-grams, longest first; where one bound is not given it is the other."""
        longest = self.prompt_lookup_max or self.prompt_lookup_min or 5
        return range(longest, (self.prompt_lookup_min or longest) - 1, -1)

    def propose(self, seq: Sequence, most: int, num_running: int = 1) -> list[int]:
        """At most `most` tokens; none if the last n-gram is new, the longest n first.

        A rejected draft was computed for nothing. Among a few sequences that costs little, since a
        step mostly reads weights; the more there are, the surer a draft must be. To know is free: a
        guess is made at every step, drafted or not, and compared with the tokens that come.
        """
        notes = seq.draft_notes = seq.draft_notes or DraftNotes()
        token_ids = seq.token_ids
        came = token_ids[notes.num_indexed:][:len(notes.guess)]
        is_right = came == notes.guess[:len(came)]
        notes.streak = notes.streak + len(came) if is_right else 0
        for end in range(notes.num_indexed, len(token_ids)):
            for n in self.sizes:
                notes.index[tuple(token_ids[max(0, end - n):end])] = end
        notes.num_indexed = len(token_ids)
        found = (notes.index.get(tuple(token_ids[-n:])) for n in self.sizes)
        start = next((end for end in found if end is not None), len(token_ids))
        notes.guess = token_ids[start:start + self.num_speculative_tokens]
        return notes.guess[:most] if notes.streak >= num_running - self.few else []


@dataclass
class DraftNotes:
    """What the drafter remembers of a sequence."""

    streak: int = 0  # tokens that lately came as they were guessed, without a wrong one between
    guess: list[int] = field(default_factory=list)  # of the tokens from num_indexed on
    num_indexed: int = 1
    index: dict[tuple[int, ...], int] = field(default_factory=dict)  # n-gram -> position behind it


@dataclass
class BeamSearchParams(Checked):
    """Names as in vLLM. Raises ValueError naming the field, its value and what is allowed."""

    beam_width: int = between(1)
    max_tokens: int = between(1)
    ignore_eos: bool = False
    length_penalty: float = between(-10, 10, default=1.0)
    temperature: Any = neutral(0.0, instead="ranks beams by their own probability")

    def to_sampling_params(self, num_end_tokens: int) -> SamplingParams:
        """What each beam is asked for: so many offers that, even if the best ones all end,
        enough are left to continue with (as many as transformers looks at)."""
        num_offers = max(2, 1 + (0 if self.ignore_eos else num_end_tokens)) * self.beam_width
        return SamplingParams(temperature=0, max_tokens=self.max_tokens, logprobs=num_offers,
                              ignore_eos=self.ignore_eos)


@dataclass(eq=False)
class BeamRequest(Request):
    """A request whose sequences are its live beams, and in the end its results.

    The ranking is transformers' (`num_beams`, generation/utils.py, `_beam_search`).
    """

    beams: BeamSearchParams = field(kw_only=True)
    ended: list[Sequence] = field(default_factory=list, init=False)  # best first

    def advance(self) -> list[tuple[Sequence, Sequence]]:
        """Take every beam's offers; returns (parent, child) for each beam that lives on.

        If none does, the search is over, and `sequences` are the results.
        """
        width = self.beams.beam_width
        offers = [((beam.cumulative_logprob or 0.0) + offer.logprob, beam, token_id)
                  for beam in self.sequences for token_id, offer in (beam.candidates or {}).items()]
        offers.sort(key=lambda offer: -offer[0])
        live: list[tuple[Sequence, Sequence]] = []
        for place, (logprob, beam, token_id) in enumerate(offers[:self.params.logprobs]):
            child = Sequence(self, len(live))  # with nothing computed and no blocks yet
            child.token_ids = [*beam.token_ids, token_id]
            child.cumulative_logprob, child.logprobs = logprob, None
            is_end = token_id in self.stop_token_ids
            if child.num_generated_tokens < self.max_tokens and not is_end:
                live.append((beam, child))
            elif place < width:
                child.finish_reason = "stop" if is_end else "length"
                self.ended.append(child)
        self.ended.sort(key=self.score, reverse=True)
        del self.ended[width:]
        # Stop when even the best live beam, at its present length, would not be among the ended.
        if len(self.ended) == width and live:
            if self.score(live[0][1]) <= self.score(self.ended[-1]):
                live = []
        del live[width:]
        self.sequences = [child for _, child in live] or self.ended
        if not live:
            for index, seq in enumerate(self.ended):
                seq.index = index
                seq.read_text()
        return live

    def score(self, seq: Sequence) -> float:
        length = seq.num_generated_tokens ** self.beams.length_penalty
        return (seq.cumulative_logprob or 0.0) / length
