"""Language models over a slot cache by absolute position; in `law` the choice of tokens from their logits.

The only room that imports torch and transformers. `load` makes a model, by `pretrained` where it has files of weights;
`runners` compute its forwards, `kv_cache` keeps count of the slots, `law` chooses the tokens of targets and of plain
decoding, `guesses` draft. `heads` draft beside a target, `training` teaches them, and drafters. It knows no session, no
wire and no log.
"""

from specwire.core.model import Feed, ModelError, ModelInfo, ModelLost
from specwire.lm.kv_cache import LanguageModel
from specwire.lm.load import load_model, native_dtype

__all__ = [
    "Feed",
    "LanguageModel",
    "ModelError",
    "ModelInfo",
    "ModelLost",
    "load_model",
    "native_dtype",
]
