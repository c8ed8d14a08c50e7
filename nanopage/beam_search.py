"""Which continuations live on?

Beam search keeps the `beam_width` most likely unfinished texts. In every step each live beam offers
its most likely next tokens; the best of all offers become the next beams, so a beam may continue
in several ways, in one, or in none. The scheduler turns that into forks and frees: beams share
every block up to where they part (paper, section 4.4). Here is only the ranking, and it is
transformers' (`num_beams`, generation/utils.py, `_beam_search`).

Invariants: no beam is listed twice; nothing follows an end token; a score is
    sum of logprobs / generated length ** length_penalty,   the end token counted.

Next: scheduler.py, which decides whose tokens are computed next.
"""

from dataclasses import dataclass

from nanopage.sequence import Sequence, check_bool, check_number


@dataclass
class BeamSearchParams:
    """Names as in vLLM. Raises ValueError naming the field, its value and what is allowed."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        check_number("beam_width", self.beam_width, 1)
        check_number("max_tokens", self.max_tokens, 1)
        check_bool("ignore_eos", self.ignore_eos)
        check_number("length_penalty", self.length_penalty, -100, 100, integer=False)


@dataclass(frozen=True)
class Candidate:
    """`beam` continued by `token_id`."""

    beam: Sequence
    token_id: int
    cumulative_logprob: float

    def grow(self, index: int) -> Sequence:
        """The continued sequence, with nothing computed and no blocks yet."""
        seq = Sequence(self.beam.request, index, self.beam.seed)
        seq.token_ids = self.beam.token_ids + [self.token_id]
        seq.cumulative_logprob = self.cumulative_logprob
        return seq


class BeamSearch:
    """The state of one beam-search request beside its live beams."""

    def __init__(self, params: BeamSearchParams, num_end_tokens: int) -> None:
        self.beam_width = params.beam_width
        self.length_penalty = params.length_penalty
        # Even if the best ones all end, enough are left to continue with.
        self.num_candidates = max(2, 1 + num_end_tokens) * params.beam_width
        self.finished: list[tuple[float, Candidate]] = []  # best first

    def rank(self, beams: list[Sequence]) -> list[Candidate]:
        """The next beams, best first; none if the search is over."""
        request = beams[0].request
        num_generated = beams[0].num_generated_tokens + 1
        candidates = [
            Candidate(beam, token_id, beam.cumulative_logprob + offer.logprob)
            for beam in beams for token_id, offer in (beam.candidates or {}).items()]
        candidates.sort(key=lambda candidate: -candidate.cumulative_logprob)
        at_limit = num_generated == request.max_tokens
        live = []
        for place, candidate in enumerate(candidates[:self.num_candidates]):
            if not at_limit and candidate.token_id not in request.stop_token_ids:
                live.append(candidate)
            elif place < self.beam_width:
                self.finished.append((self._score(candidate, num_generated), candidate))
        self.finished.sort(key=lambda scored: -scored[0])
        del self.finished[self.beam_width:]
        # Stop when even the best live beam, at its present length, would not be among the finished.
        if len(self.finished) == self.beam_width and live:
            if self._score(live[0], num_generated) <= self.finished[-1][0]:
                return []
        return live[:self.beam_width]

    def _score(self, candidate: Candidate, num_generated: int) -> float:
        return candidate.cumulative_logprob / num_generated ** self.length_penalty

    def results(self) -> list[Sequence]:
        """The finished beams, best first."""
        sequences = []
        for index, (_, candidate) in enumerate(self.finished):
            seq = candidate.grow(index)
            ended = candidate.token_id in seq.request.stop_token_ids
            seq.finish_reason = "stop" if ended else "length"
            if seq.detokenizer is not None:
                seq.detokenizer.flush(seq.output_token_ids)
            sequences.append(seq)
        return sequences
