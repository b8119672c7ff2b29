"""Checks of the user's model: removes torch.compile wrappers and refuses modules and tensors that cannot be planned.

`torch.compile(model)` is a wrapper module whose parameters are named `_orig_mod.…`. autoptd compiles the code it emits
(`compile=True`), so it plans the wrapped module, anywhere in the model. Wrappers that distribute or shard are refused,
because the plan decides that. `OptimizedModule` is private to torch (seen in 2.13.0); no other file of autoptd uses it.
It is imported where a module is looked at, because its import takes a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor as _is_functorch_wrapped_tensor  # private; seen in 2.13.0
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from autoptd.errors import InputsError, TraceError
from autoptd.passes.kept.copies import shallow_copy
from autoptd.passes.known.seeds import refuse_generators

_SHOWN = 4  # places named in an error
_DP = "pass the wrapped module, model.module: data parallelism is part of the plan"
_ZERO = "pass the module before it is wrapped: the plan shards it, fix={'zero': 3}"
_DISTRIBUTE = {  # classes that distribute the module they wrap -> the fix
    "torch.nn.parallel.distributed.DistributedDataParallel": _DP,
    "torch.nn.parallel.data_parallel.DataParallel": _DP,
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": _ZERO,
    "torch.distributed.fsdp.FSDPModule": _ZERO,
}
_QUANTISED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "bitsandbytes.")  # modules of such classes


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model without `torch.compile` wrappers: itself if it has none, else a copy of the modules on the way
    to each wrapper, with the same parameters."""
    from torch._dynamo import OptimizedModule

    if not any(isinstance(module, OptimizedModule) for module in model.modules()):
        return model
    made: dict[int, nn.Module] = {}

    def plain(module: nn.Module) -> nn.Module:
        if id(module) not in made:
            inner = module
            while isinstance(inner, OptimizedModule):
                inner = inner._orig_mod
            children = {name: None if m is None else plain(m) for name, m in inner._modules.items()}
            if any(children[name] is not m for name, m in inner._modules.items()):
                inner = shallow_copy(inner)
                inner._modules = children
            made[id(module)] = inner
        return made[id(module)]

    return plain(model)


def compiled_notes(model: nn.Module) -> list[str]:
    """Return the plan's note about modules wrapped in `torch.compile`, if there are any."""
    from torch._dynamo import OptimizedModule

    names = [
        ".".join(part for part in name.split(".") if part != "_orig_mod") or "the model"
        for name, module in model.named_modules()
        if isinstance(module, OptimizedModule) or getattr(module, "_compiled_call_impl", None) is not None
    ]
    shown = ", ".join(dict.fromkeys(names[:_SHOWN])) + (
        f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    )
    return [f"torch.compile of {shown} is ignored by the plan; compile=True compiles its blocks"] if names else []


Found = Iterator[tuple[str, str]]  # (module or tensor, fix; "" if the fix is that of the check)


def _distributing(model: nn.Module) -> Found:
    for name, module in model.named_modules():
        for base in type(module).__mro__:
            if fix := _DISTRIBUTE.get(f"{base.__module__}.{base.__qualname__}"):
                yield f"{name or 'the model'} ({base.__name__})", fix


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _lazy(model: nn.Module) -> Found:
    return ((name, "") for name, x in _tensors(model) if is_lazy(x))


def _quantised(model: nn.Module) -> Found:
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if type(module).__module__.startswith(_QUANTISED) and not name.startswith(inside):
            inside += (f"{name}.",)
            yield f"{name or 'the model'} ({type(module).__name__})", ""


def _wrapped(model: nn.Module) -> Found:
    for name, x in _tensors(model):
        if is_traceable_wrapper_subclass(x) or x.is_quantized:
            yield f"{name} ({type(x.data).__name__})", ""


def _sparse(model: nn.Module) -> Found:
    """Return parameters and buffers that are saved; others are refused where forward reads them."""
    saved = (
        (f"{path}.{key}".lstrip("."), b)
        for path, module in model.named_modules()
        for key, b in module._buffers.items()
        if b is not None and key not in module._non_persistent_buffers_set
    )
    return ((name, "") for name, x in (*model.named_parameters(), *saved) if x.layout != torch.strided)


def _complex(model: nn.Module) -> Found:
    return ((name, "") for name, p in model.named_parameters() if p.requires_grad and p.is_complex())


def _expanded(model: nn.Module) -> Found:
    for name, p in model.named_parameters():
        if p.requires_grad and any(n > 1 and step == 0 for n, step in zip(p.shape, p.stride(), strict=True)):
            yield name, ""


def _shared(model: nn.Module) -> Found:
    """Yield pairs of a trainable parameter and another tensor of the model that overlaps it in memory."""
    trainable = {id(p) for p in model.parameters() if p.requires_grad}
    attributes = [
        (f"{name}.{key}" if name else key, value)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, Tensor) and not _recomputed(module, key)
    ]
    spans: dict[int, list[tuple[int, int, str, int]]] = {}  # storage -> byte of first and last element, name, id
    for name, x in (*_tensors(model), *attributes):
        if x.numel() and x.layout == torch.strided:
            first = int(x.storage_offset()) * x.itemsize
            last = first + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) * x.itemsize
            spans.setdefault(x.untyped_storage()._cdata, []).append((first, last, name, id(x)))
    for tensors in spans.values():
        tensors.sort()
        for i, (_, last, name, this) in enumerate(tensors):
            for first, _, other, that in tensors[i + 1 :]:
                if first > last:
                    break
                if this != that and not trainable.isdisjoint((this, that)):
                    yield f"{name} and {other}", ""


def _unwritable(model: nn.Module) -> Found:
    """Yield names that a plan file cannot hold: with lone surrogates, or very long."""
    modules = (name for name, _ in model.named_modules())
    for name in (*modules, *(name for name, _ in _tensors(model))):
        if len(name.encode(errors="ignore")) > _LONGEST or name.encode(errors="ignore").decode() != name:
            yield name if len(name) <= _LONGEST else f"{name[:100]}…", ""


def _recomputed(module: nn.Module, key: str) -> bool:
    """Return whether a hook sets the attribute before every pass: the weight of a spectral norm, initially an alias."""
    return any(getattr(hook, "name", None) == key for hook in module._forward_pre_hooks.values())


_LONGEST = 900  # bytes of a name
_DENSE = "make it dense: x.to_dense()"
_UNSUITABLE: tuple[tuple[Callable[[nn.Module], Found], str, str], ...] = (  # check, what is wrong, fix
    (_unwritable, f"have names that are not valid Unicode or have more than {_LONGEST} bytes", "rename them"),
    (_distributing, "are wrappers that distribute the model, which the plan does", ""),
    (_lazy, "have no shape yet: they are lazily initialised", "run one batch through the model first"),
    (
        _quantised,
        "are quantised, and cannot be trained",
        "plan the model before it is quantised, or run the quantised part outside and pass its outputs as an input",
    ),
    (
        _wrapped,
        "are tensor subclasses or quantised tensors",
        "pass the module with plain parameters, before it is sharded or quantised",
    ),
    (_sparse, "are not dense tensors", _DENSE),
    (
        _complex,
        "are complex and trainable, which torch's fused optimizers do not step",
        "store real and imaginary part as two parameters: torch.complex(self.re, self.im) in forward",
    ),
    (
        _expanded,
        "are expanded: several of their elements share one number in memory, which torch's optimizers do not step",
        "give every element its own memory: nn.Parameter(x.clone()), or expand in forward",
    ),
    (
        _shared,
        "share memory without being one parameter: ranks would update one of them and not the other",
        "tie the parameters themselves (a.weight = b.weight), or compute one from the other in forward",
    ),
)


def refuse_unsuitable(model: nn.Module) -> None:
    """Raise InputsError naming the modules or tensors that cannot be trained as they are."""
    for find, what, fix in _UNSUITABLE:
        places = dict(find(model))
        if places:
            more = [f"and {len(places) - _SHOWN} more"] if len(places) > _SHOWN else []
            raise InputsError(
                f"parts of the model {what}",
                where="\n".join([*list(places)[:_SHOWN], *more]),
                fix=fix or next(iter(places.values())),
            )


class UnregisteredTensor(InputsError):
    """A tensor of the model is not read as its module registers it, maybe since forward makes the module."""


@dataclass(frozen=True)
class Originals:
    """The user's parameters and buffers: names by id, also by that of a copy's, and of those that are not dense."""

    names: Mapping[int, str]
    sparse: frozenset[str]

    @staticmethod
    def of(model: nn.Module, copied: nn.Module) -> Originals:
        """Return those of the user's model, and of the copy that is traced."""
        names = {id(x): name for whole in (model, copied) for name, x in registered(whole).items()}
        return Originals(names, frozenset(n for n, x in registered(model).items() if x.layout != torch.strided))


class RegisteredTensors(TorchFunctionMode):
    """Mode in which torch reads the traced tensors of `model` where code reaches those that they stand for, as a loss
    does that closes over the model, or a list of buffers.

    Raises UnregisteredTensor for a trainable tensor that `model` does not register; at the end for a buffer read so if
    forward puts another tensor in its place, since code that holds the first one does not see that. Raises InputsError
    for a read of a buffer that is not dense, for which a dense one stands here; UnsupportedOp for a generator.
    """

    def __init__(self, model: nn.Module, originals: Originals) -> None:
        super().__init__()
        self.model, self.names, self.read = model, originals.names, set[str]()
        self.traced = registered(model)
        self.known = {id(x) for x in self.traced.values()}
        self.sparse = {id(self.traced[name]): name for name in originals.sparse}

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        now = registered(self.model)
        if raised[0] is None and (moved := [name for name in self.read if now.get(name) is not self.traced[name]]):
            raise UnregisteredTensor(
                f"forward puts another tensor in the place of {moved[0]}, which is read from a list, a closure or the "
                "like as well: that may hold the first one",
                where=moved[0],
                fix="write to it in place (x.copy_(…)), or read it as an attribute of the module in forward",
            )

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # control flow such as torch.cond calls dynamo while it is traced, and dynamo would trace this loop too
        if not torch.compiler.is_dynamo_compiling():
            leaves, spec = pytree.tree_flatten((args, kwargs))
            refuse_generators(leaves)
            found = [self._traced(x) if isinstance(x, Tensor) else x for x in leaves]
            if any(x is not y for x, y in zip(leaves, found, strict=True)):
                args, kwargs = pytree.tree_unflatten(found, spec)
        return func(*args, **(kwargs or {}))

    def _traced(self, x: Tensor) -> Tensor:
        if id(x) not in self.known and (name := self.names.get(id(x))):
            self.read.add(name)
            x = self.traced[name]
        if id(x) in self.sparse:
            what = "forward reads a buffer that is not a dense tensor"
            raise InputsError(what, where=self.sparse[id(x)], fix=_DENSE)
        if id(x) in self.known:
            return x
        # tensors computed from the model are traced, and have one of the tracer's classes
        own = (type(x) is Tensor and not _is_functorch_wrapped_tensor(x)) or isinstance(x, nn.Parameter)
        if own and x.requires_grad:
            raise UnregisteredTensor(
                f"a trainable tensor {list(x.shape)} is used that no module registers, so that no optimizer would "
                "train it",
                fix="make it an nn.Parameter of the model or of a loss that is an nn.Module, store layers in an "
                "nn.ModuleList; or detach() it if it is a constant",
            )
        return x


def registered(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model, by all of their names."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def eval_notes(model: nn.Module) -> list[str]:
    """Return the plan's note about modules in eval mode, which changes dropout and batch norms, if there are any."""
    names = [name for name, _ in _in_eval(model, "", set())]
    if not names:
        return []
    if names == [""]:
        return [f"the model was passed in eval mode: {_MEANING}; call model.train() before planning to change both"]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [f"passed in eval mode: {', '.join(n or 'the model itself' for n in names[:_SHOWN])}{more}: {_MEANING}"]


def copy_modes(model: nn.Module, other: nn.Module) -> None:
    """Set the train or eval mode of every module of `other`, of the same structure, to that in `model`."""
    modes = {name: module.training for name, module in model.named_modules(remove_duplicate=False)}
    for name, module in other.named_modules(remove_duplicate=False):
        module.training = modes.get(name, model.training)


def modes_of(*models: object) -> Callable[[], AbstractContextManager[None]]:
    """Return a context manager in which all modules of some models are in the modes in which they are now."""
    noted = [(m, m.training) for model in models if isinstance(model, nn.Module) for m in model.modules()]

    @contextmanager
    def in_modes() -> Iterator[None]:
        others = [(m, m.training) for m, mode in noted if m.training != mode]
        try:
            for m, mode in others:
                m.training = not mode
            yield
        finally:
            for m, mode in others:
                m.training = mode

    return in_modes


_MEANING = "no dropout there, and batch norms use their running statistics"


def _in_eval(module: nn.Module, name: str, seen: set[int]) -> list[tuple[str, nn.Module]]:
    """Return the outermost modules that are in eval mode throughout, and single ones with submodules in train mode."""
    if id(module) in seen:
        return []
    seen.add(id(module))
    if not any(m.training for m in module.modules()):
        return [(name, module)]
    found = [] if module.training else [(name, module)]
    for key, child in module.named_children():
        found += _in_eval(child, f"{name}.{key}" if name else key, seen)
    return found


def refuse_scripted(model: nn.Module) -> None:
    """Raise TraceError for modules already compiled by torch.jit: the tracer cannot see their ops."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise TraceError(
                f"{name or 'the model'} was compiled by torch.jit.script or torch.jit.trace, and cannot be traced",
                where=name,
                fix="pass the original module instead of the result of torch.jit",
            )
