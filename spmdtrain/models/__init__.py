"""Models that the experiments share; nothing in the library depends on them."""

from spmdtrain.models.generation import (
    GenerationOptions,
    NewTokens,
    generate,
    in_order,
    stream,
)
from spmdtrain.models.mlp import MLP, MLP_RULES, mlp_rules
from spmdtrain.models.mobilenet import MobileNetV2
from spmdtrain.models.transformer import (
    GPT2_RULES,
    TRANSFORMER_RULES,
    Transformer,
    TransformerConfig,
)

__all__ = [
    "GPT2_RULES",
    "MLP",
    "MLP_RULES",
    "TRANSFORMER_RULES",
    "GenerationOptions",
    "MobileNetV2",
    "NewTokens",
    "Transformer",
    "TransformerConfig",
    "generate",
    "in_order",
    "mlp_rules",
    "stream",
]
