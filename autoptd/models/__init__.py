"""Models by name, file or callable, always without weights: shipped configurations live here as JSON.

A configuration is in the Hugging Face dialect with a `source` (where its shapes are published), perhaps a `note`, and a
`seq` where its step is not of the usual length (tokens per sample, unless another number is asked for).
"""

from autoptd.models.inputs import example_inputs, model_name, sequence_limit
from autoptd.models.load import describe_models, load_model, model_names

__all__ = ["describe_models", "example_inputs", "load_model", "model_name", "model_names", "sequence_limit"]
