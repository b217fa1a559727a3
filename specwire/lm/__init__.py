"""Language models over an absolute-position slot cache, and the choice of tokens from their logits."""

from specwire.lm.interface import Feed, LanguageModel, ModelError, ModelInfo, ModelLost
from specwire.lm.load import load_model, native_dtype
from specwire.lm.sampler import RowSampling, choose, log_probabilities, logprobs

__all__ = [
    "Feed",
    "LanguageModel",
    "ModelError",
    "ModelInfo",
    "ModelLost",
    "RowSampling",
    "choose",
    "load_model",
    "log_probabilities",
    "logprobs",
    "native_dtype",
]
