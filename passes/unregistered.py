"""Trainable tensors that no module registers: a program would hold them as constants, and nobody would train them.

A loss that closes over a parameter, layers in a plain list, an attribute that needs a gradient: the first call of torch
with one of them, while the model is traced, is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor as _is_functorch_wrapped_tensor  # private; seen in 2.13.0
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autoptd.errors import InputsError


class RefuseUnregistered(TorchFunctionMode):
    """Meanwhile raise InputsError where torch is called with a trainable tensor that `model` does not register.

    `names`: by id, of the parameters that `model` has copies of.
    """

    def __init__(self, model: nn.Module, names: Mapping[int, str]) -> None:
        super().__init__()
        self.known, self.names = {id(p) for p in model.parameters()}, names

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # dynamo, which control flow such as torch.cond calls while it is traced, would trace this too
        for x in () if torch.compiler.is_dynamo_compiling() else pytree.tree_leaves((args, kwargs)):
            # what is computed from the model is traced, and of a class of the tracer's
            own = (type(x) is Tensor and not _is_functorch_wrapped_tensor(x)) or isinstance(x, nn.Parameter)
            if own and x.requires_grad and id(x) not in self.known:
                self._refuse(x)
        return func(*args, **(kwargs or {}))

    def _refuse(self, x: Tensor) -> None:
        if name := self.names.get(id(x)):
            raise InputsError(
                f"the parameter {name} is read past the model that is traced, and would be a constant",
                where=name,
                fix="read it as an attribute of the module in forward; a loss gets it from the outputs, or is a "
                "method of the model",
            )
        raise InputsError(
            f"a trainable tensor {list(x.shape)} is used that no module registers, so that no optimizer would train it",
            fix="make it an nn.Parameter of the model or of a loss that is an nn.Module, keep layers in an "
            "nn.ModuleList; or detach() what is a constant",
        )
