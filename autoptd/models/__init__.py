"""Models by name, file or callable, built without weights, and their example inputs. `__all__` is imported from here;
`models.load` also loads callables. Imports errors and the cost models' file readers only.

Shipped models are JSON configurations in the Hugging Face format, with a `source` (where the shapes are published), an
optional `note`, and an optional `seq`: the default tokens per sample, if it is not the usual one.
"""

from autoptd.models.inputs import example_inputs, model_name, sequence_limit
from autoptd.models.load import describe_models, load_model, model_names

__all__ = ["describe_models", "example_inputs", "load_model", "model_name", "model_names", "sequence_limit"]
