"""nanopage: PagedAttention, and the engine that grew around it, small enough to read.

Reading order: sequence, block_manager, scheduler, attention, layers, model_runner, engine.
"""

from nanopage.engine import LLM
from nanopage.sequence import CompletionOutput, Logprob, RequestOutput, SamplingParams

__all__ = ["LLM", "SamplingParams", "RequestOutput", "CompletionOutput", "Logprob"]
