"""Losses of heads of transformers whose `forward` computes none: functions of their outputs, one for each task."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

TARGET = "labels"  # the name of their targets, which `forward` is not given


def lacks_loss(head: Any) -> bool:
    """Return whether a head's own code names no loss, or raises when it is given targets."""
    code = inspect.getsource(head.forward)
    return "loss" not in code or "raise NotImplementedError" in code


def classes(outputs: Mapping[str, Tensor], labels: Tensor) -> Tensor:
    """Return the cross entropy of the logits, of one label for each sample or for each token."""
    logits = outputs["logits"] if "logits" in outputs else outputs["last_hidden_state"]
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def depths(outputs: Mapping[str, Tensor], labels: Tensor) -> Tensor:
    """Return the mean squared error of the predicted depth, brought to the size of the true one."""
    predicted = outputs["predicted_depth"]
    if predicted.shape[1:] != labels.shape[1:]:
        predicted = F.interpolate(predicted[:, None], labels.shape[1:], mode="bilinear", align_corners=False)[:, 0]
    return F.mse_loss(predicted, labels)


LOSSES: Mapping[str, Callable[..., Tensor]] = {
    "image": classes,
    "causal": classes,
    "multimodal": classes,
    "depth": depths,
}
