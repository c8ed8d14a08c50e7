"""nanopage: PagedAttention, and the engine that grew around it, small enough to read.

Reading order: sequence, block_manager, scheduler, attention, layers, sampler, model_runner, engine.
"""

from nanopage.engine import LLM, TextPrompt, TokensPrompt
from nanopage.proposals import BeamSearchParams
from nanopage.sequence import CompletionOutput, Logprob, RequestOutput, SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "BeamSearchParams", "RequestOutput", "CompletionOutput",
           "Logprob", "TextPrompt", "TokensPrompt"]
