"""Causal language models of any library: their parts and configuration, and how they run while they are scored."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchrl_llm_kl._numerics import is_dtensor
from torchrl_llm_kl._private import activate_adapters, active_adapters, compiled_call, compiled_inside, own_adapters
from torchrl_llm_kl._typing import asked, call_of, has
from torchrl_llm_kl.scoring._options import ScoreOptions
from torchrl_llm_kl.scoring._wrapping import is_zero3, unwrapped

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Fact = TypeVar("Fact")

# Configuration entries that scale the logits, with the power: 1 for a factor, -1 for a divisor.
_FACTORS = {"logit_scale": 1, "output_multiplier": 1, "lm_head_multiplier": 1, "logits_scaling": -1}
_SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap")
# Attribute of the input embedding of an offloaded model: the device that scores.
OFFLOADED = "_scored_on"
_SAMPLES = 16  # values of each tensor that fingerprint() compares
_POSITION_LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len")

# ---------------------------------------------------------------------- how a model is run


# Configuration entries for placeholder tokens, which a model replaces by features of images, videos or sounds.
_PLACEHOLDERS = [f"{kind}_token_{end}" for kind in ("image", "video", "audio", "speech") for end in ("id", "index")]
_PLACEHOLDERS += ["image_patch_id", "visual_indicator_token_ids", "audio_prompt_token_id", "audio_latent_token_id"]
_PLACEHOLDERS += ["audio_delay_token_id", "media_placeholder_token_id", "img_context_token_id"]


@dataclass(frozen=True)
class Route:
    """How to get logits from a model: the body and then the head at scored positions, or the model's own full forward."""

    path: Literal["head", "full"]
    # Whether to pass attention_mask. A causal model never attends to padding on its right, but flash attention skips it then.
    mask: bool = True
    positions: bool = True  # whether to pass position_ids
    # How a shared prefix is forwarded once: in a pack with the sequences that continue it, or by forking its state.
    sharing: Literal["packs", "forks"] | None = None
    # Why the head does not use the fused kernel. None if the probe has proven the kernel.
    unfused: str | None = "the scorer has probe=False"


class Inspection:
    """Remembers facts about a model that change only with its modules, their own forwards or its configuration.

    A scorer keeps them, since reading all of them again would cost as much as the forward of a small model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.modules = model, modules_of(model)
        self._facts: dict[Callable[[nn.Module], object], object] = {}
        self._held = [module.__dict__ for module in self.modules]
        self._configs = configs_of(self.modules)
        self._state = self._read()

    def holds(self) -> bool:
        """Whether the facts are still valid. Wrappers, adapters and shards change modules, classes or attributes."""
        return self._state == self._read()

    def _read(self) -> list[object]:
        children = [child for module in self.modules for child in module._modules.values()]
        own = [each.get(name) for name in ("config", "forward") for each in self._held]
        settings = [dict(asked(config, "__dict__", dict) or {}) for config in self._configs]
        # A module that is compiled, or begins to checkpoint, has one more attribute.
        return [children, [*map(type, self.modules)], [*map(len, self._held)], own, settings]

    def of(self, read: Callable[[nn.Module], Fact]) -> Fact:
        """The result of a function of the model. It is computed once."""
        if read not in self._facts:
            self._facts[read] = read(self.model)
        return cast(Fact, self._facts[read])


def modules_of(model: nn.Module) -> list[nn.Module]:
    """All modules of a model, like ``model.modules()`` in a third of the time. Shared ones appear repeatedly."""
    out = [model]
    for module in out:  # the list grows
        out += [child for child in module._modules.values() if child is not None]
    return out


def configs_of(modules: list[nn.Module]) -> list[Any]:
    """The configurations of some modules, each once."""
    return list({id(x): x for module in modules if (x := asked(module, "config", object)) is not None}.values())


@dataclass(frozen=True, eq=False)
class Setup:
    """A model and the options of one call. ``options.dtype`` is the autocast dtype that applies."""

    inspection: Inspection
    route: Route
    device: torch.device  # where the model expects token ids
    # With `grad` the model runs in its own mode, otherwise in evaluation mode.
    options: ScoreOptions = field(default_factory=ScoreOptions)

    @property
    def model(self) -> nn.Module:
        """The scored model."""
        return self.inspection.model

    @property
    def sampler(self) -> tuple[float, ...]:
        """The sampling settings on which log-probs depend."""
        return self.options.sampling.temperature, *self.options.sampling.truncation

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context in which the settings apply to the model. Its state is restored at the end, also after an error."""
        with ExitStack() as stack:
            if self.options.adapters is not True:
                stack.enter_context(_adapters_switched(self.model, self.options.adapters))
            if not self.options.grad:
                stack.enter_context(torch.no_grad())
                stack.enter_context(evaluating(self.model, self.inspection.modules))
            if self.options.dtype is not None:
                stack.enter_context(torch.autocast(self.device.type, self.options.dtype))
            # Branches have gradients of their own, without the head's.
            whole = self.options.grad and not self.options.recompute
            if whole and (embedding := _tied_embedding(self.model)) is not None:
                stack.enter_context(_one_gradient(embedding))
            yield


@contextmanager
def evaluating(model: nn.Module, modules: list[nn.Module] | None = None) -> Iterator[None]:
    """Context in which all ``modules``, by default of the model, are in evaluation mode. Restores each one's mode."""
    training = [module for module in modules or modules_of(model) if module.training]
    try:
        for module in training:  # by attribute, since a scripted module keeps its mode outside of __dict__
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


_LOCKS: weakref.WeakKeyDictionary[object, threading.RLock] = weakref.WeakKeyDictionary()
_LOCKS_GUARD = threading.Lock()


@contextmanager
def locked(*models: object) -> Iterator[None]:
    """Hold the lock of each model's body. Scoring may temporarily change a model's mode, adapters and attention.

    An inspection of a model holds the same lock, which takes less time.
    """
    with ExitStack() as stack:
        # Models with the same body share its lock. All callers lock in the same order, which prevents deadlocks.
        for model in sorted(map(_shared, models), key=id):
            with _LOCKS_GUARD:
                lock = _LOCKS.setdefault(model, threading.RLock())
            stack.enter_context(lock)
        yield


def _shared(model: object) -> object:
    """The object whose lock a model uses: its body without wrappers, or the model itself if it has no body."""
    if isinstance(model, Inspection):
        return model.of(_shared)
    body = find_body(model) if isinstance(model, nn.Module) else None
    return model if body is None else unwrapped(body)


def call(module: nn.Module, input_ids: Tensor, **options: object) -> Any:
    """Call ``module`` with the options that its ``forward`` accepts, by keyword."""
    forward = module.forward
    own = inspect.ismethod(forward) and forward.__func__
    # Reading the signature of a class's method in each call would take as long as a small layer.
    parameters = _parameters_of(own) if own else inspect.signature(forward).parameters
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        options = {name: value for name, value in options.items() if name in parameters}
        if "input_ids" not in parameters:
            return module(input_ids, **options)
    return module(input_ids=input_ids, **options)


@cache
def _parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def read_output(output: object, name: Literal["logits", "last_hidden_state"]) -> Tensor:
    """Read a model's ``logits [b, T, V]`` or a body's ``last_hidden_state [b, T, H]`` from the output of its forward."""
    value = output.get(name) if isinstance(output, Mapping) else asked(output, name, Tensor, output)
    if isinstance(value, (tuple, list)) and value:
        value = value[0]
    if not isinstance(value, Tensor):
        raise TypeError(f"expected {name!r}, or a tuple that starts with it, got {type(output).__name__}.")
    return value


# ---------------------------------------------------------------------- PEFT adapters


def adapter_layers(model: nn.Module) -> list[Any]:
    """PEFT's layers. Their ``disable_adapters`` is a bool, while a transformers model has a method of that name."""
    return [module for module in model.modules() if asked(module, "disable_adapters", bool) is not None]


def check_has_adapters(model: nn.Module, adapters: bool | str = False) -> None:
    """Raise a ValueError if the adapters cannot be disabled, or the named one not activated."""
    layers, name = adapter_layers(model), type(model).__name__
    if not layers and (isinstance(adapters, str) or not has(model, "disable_adapter")):
        raise ValueError(f"{name} has no PEFT adapters to switch off: pass a reference, or call get_peft_model.")
    if isinstance(adapters, str) and adapters not in (names := set[str]().union(*map(_adapter_names, layers))):
        raise ValueError(f"{name} has the adapters {sorted(names)}, not {adapters!r}: pass one of these, or load it.")
    if any(asked(layer, "merged", bool) for layer in layers):
        raise ValueError(f"{name} has adapters merged into its weights: call unmerge_adapter() first.")


def check_base_is_frozen(model: nn.Module) -> None:
    """Raise a ValueError if parameters outside the adapters are trained. A step would move the reference, which shares them."""
    names = set[str](asked(model, "peft_config", dict) or ()).union(*map(_adapter_names, adapter_layers(model)))
    holders = [module for module in model.modules() if isinstance(module, (nn.ModuleDict, nn.ParameterDict))]
    # PEFT keeps the parameters of an adapter under its name: layer.lora_A["default"], model.prompt_encoder["default"].
    owned = {id(x) for each in holders for name, x in each.named_parameters() if name.split(".")[0] in names}
    trained = [name for name, x in model.named_parameters() if x.requires_grad and id(x) not in owned]
    if trained:
        raise ValueError(
            f"{type(model).__name__} trains {len(trained)} parameters outside its adapters, such as {trained[0]}: each step "
            "would move the reference. Freeze them (LoRA: bias='none'), or pass a frozen copy of the model as the reference."
        )


def _adapter_names(layer: object) -> set[str]:
    """The names of the adapters in a PEFT layer."""
    held = (attrgetter(name)(layer) for name in asked(layer, "adapter_layer_names", tuple) or ())  # some are dotted
    names = {name for each in held if isinstance(each, (nn.ModuleDict, nn.ParameterDict)) for name in each}
    return names | own_adapters(layer)


@contextmanager
def _adapters_switched(model: nn.Module, adapters: bool | str) -> Iterator[None]:
    """Context in which adapters are disabled, or only the named one is active. Restores layers and ``requires_grad``."""
    check_has_adapters(model, adapters)
    layers, on = adapter_layers(model), adapters is not False
    before = [(layer, layer.disable_adapters, active_adapters(layer)) for layer in layers]
    trainable = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        # disable_adapter also disables prompts and prefixes, which are not in layers.
        with cast(Any, model).disable_adapter() if not on and has(model, "disable_adapter") else nullcontext():
            for layer in layers:
                if layer.disable_adapters == on:
                    layer.enable_adapters(on)
                if isinstance(adapters, str):  # PEFT's set_adapter would also make it trainable
                    activate_adapters(layer, [adapters] if adapters in _adapter_names(layer) else [])
            yield
    finally:
        for layer, disabled, active in before:
            if layer.disable_adapters != disabled:
                layer.enable_adapters(not disabled)
            if isinstance(adapters, str):
                activate_adapters(layer, active)
        for parameter, flag in trainable:
            parameter.requires_grad_(flag)


# ---------------------------------------------------------------------- the gradient of a tied head


def _tied_embedding(model: nn.Module) -> nn.Module | None:
    """The embedding, if it shares a trained weight with the head: a plain parameter that eager code looks up."""
    embedding, head = _embedding(model), find_head(model)
    weight = asked(embedding, "weight", nn.Parameter)
    if weight is None or weight is not asked(head, "weight", nn.Parameter) or type(weight) is not nn.Parameter:
        return None
    # In half precision a frequent token's sum would round after each addition. A graph of torch.compile has no hooks.
    if weight.dtype not in (torch.float32, torch.float64) or torch.compiler.is_compiling():
        return None
    # A hook of the user must see the whole gradient.
    hooks = (asked(weight, "_backward_hooks", dict) or {}).values()
    usual = (
        weight.requires_grad and not is_zero3(embedding) and all(asked(x, "func", object) is _add_rows for x in hooks)
    )
    return embedding if usual and not is_compiled(model) else None


@contextmanager
def _one_gradient(embedding: nn.Module) -> Iterator[None]:
    """Context in which the embedding adds its gradient to the tied head's, in place.

    Autograd would allocate a second gradient of the size of the weight for the embedding, and hold both.
    """
    lookup, usual = _TiedLookup(cast(nn.Parameter, embedding.weight)), embedding.forward
    own = "forward" in vars(embedding)  # another library has wrapped it

    def forward(*args: object, **kwargs: object) -> Tensor:
        with lookup:
            return usual(*args, **kwargs)

    embedding.forward = forward
    try:
        yield
    finally:
        if own:
            embedding.forward = usual
        else:
            del embedding.forward


class _TiedLookup(TorchFunctionMode):
    """Context in which lookups in a weight have the gradient of :class:`_RowsOfTied`."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if func is nn.functional.embedding and args[1] is self.weight:
            padding, special = options.get("padding_idx"), ("max_norm", "scale_grad_by_freq", "sparse")
            if not any(options.get(name) for name in special):
                return _RowsOfTied.apply(args[0], self.weight, padding)
        return func(*args, **options)


class _RowsOfTied(torch.autograd.Function):
    """Rows of a weight. The backward stores their gradient, and a hook adds it when the weight's gradient is complete."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: nn.Parameter, padding: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.padding, ctx.rows = padding, _PendingRows(weight)
        return nn.functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None]:
        (ids,) = ctx.saved_tensors
        if ctx.padding is not None:
            grad = grad.masked_fill((ids == ctx.padding)[..., None], 0.0)
        if torch.is_grad_enabled():  # the graph of a second derivative
            return None, ctx.rows.zeros.index_put((ids,), grad, accumulate=True), None
        ctx.rows.pending = ids, grad
        return None, None, None


class _PendingRows:
    """The gradient of looked up rows until the weight's hook runs. The graph of a forward owns it."""

    def __init__(self, weight: nn.Parameter) -> None:
        self.pending: tuple[Tensor, Tensor] | None = None
        self._like = weight.detach()
        # A weak reference, since the end of the graph removes the hook.
        self._handle = weight.register_hook(partial(_add_rows, weakref.ref(self)))

    @property
    def zeros(self) -> Tensor:
        """A gradient of 0."""
        return torch.zeros_like(self._like)

    def __del__(self) -> None:
        self._handle.remove()


def _add_rows(owner: weakref.ref[_PendingRows], grad: Tensor | None) -> Tensor | None:
    """Add the pending rows to the gradient of the weight, in place."""
    rows = owner()
    if rows is None or rows.pending is None:
        return grad
    (ids, values), rows.pending = rows.pending, None
    grad = rows.zeros if grad is None else grad.contiguous()
    return grad.index_put_((ids,), values.to(grad.dtype), accumulate=True)


# ---------------------------------------------------------------------- body and head


def find_head(model: nn.Module) -> nn.Module | None:
    """The module that maps hidden states to logits."""
    head = call_of(unwrapped(model), "get_output_embeddings")
    return head if isinstance(head, nn.Module) else None


def head_weight(model: nn.Module) -> Tensor | None:
    """The weight of the head."""
    return asked(find_head(model), "weight", Tensor)


def find_body(model: nn.Module) -> nn.Module | None:
    """The module that maps token ids to the head's input."""
    model = unwrapped(model)
    parts = (asked(model, name, nn.Module) for name in ("base_model", "model"))
    for candidate in (call_of(model, "get_decoder"), *parts):
        if isinstance(candidate, nn.Module) and candidate is not model:
            return _as_compiled(model, candidate)
    return None


def _as_compiled(model: nn.Module, body: nn.Module) -> nn.Module:
    """The module in the model that runs ``body``: itself, or the result of ``torch.compile(body)`` that replaced it."""
    waiting = [model]
    while waiting:
        for child in waiting.pop().children():
            if child is body or compiled_inside(child) is body:
                return child
            if not isinstance(child, nn.ModuleList):
                waiting.append(child)
    return body


def body_and_head(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The body and the head. Raises a TypeError if the model does not expose them."""
    body, head = find_body(model), find_head(model)
    if body is None or head is None:
        raise TypeError(f"{type(model).__name__} has no separate body and head.")
    return body, head


def whole_logits(model: nn.Module, logits: Tensor) -> Tensor:
    """The whole ``logits [..., V]`` of a forward, gathered without gradient if the head left them sharded."""
    if not is_dtensor(logits) and shards_logits(model, logits):
        from torch.distributed.tensor import DTensor, Shard

        weight = cast(DTensor, head_weight(model))
        shape = torch.Size((*logits.shape[:-1], weight.shape[0]))
        stride = torch.empty(shape, device="meta").stride()
        placements = [Shard(logits.ndim - 1) if each.is_shard() else each for each in weight.placements]
        logits = DTensor.from_local(logits, weight.device_mesh, placements, shape=shape, stride=stride)
    return cast("DTensor", logits).full_tensor() if is_dtensor(logits) else logits


def check_whole_sequence(model: nn.Module) -> None:
    """Raise a ValueError if a tensor parallel plan of torch or transformers shards the sequence."""
    for name, module in model.named_modules():
        for hook in (module.__dict__.get("forward"), *module._forward_pre_hooks.values()):
            # Both libraries bind the parallel style in the closure of a hook, so it is found there.
            held = [cell.cell_contents for cell in asked(hook, "__closure__", tuple) or ()]
            made = {type(x).__name__ for x in held}
            made |= {asked(asked(x, "func", object, x), "__qualname__", str, "") for x in held}
            if any(each.split(".")[0] == "SequenceParallel" for each in made):
                raise ValueError(f"{name} of {type(model).__name__} is sequence parallel: leave it out of the plan.")


def shards_logits(model: nn.Module, logits: Tensor) -> bool:
    """Whether the logits of a forward cover only this rank's slice of the vocabulary."""
    weight = head_weight(model)
    return is_dtensor(logits) or (weight is not None and is_dtensor(weight) and logits.shape[-1] != weight.shape[0])


@dataclass(frozen=True)
class LogitMap:
    """Maps the head's output to logits: a factor, then the soft-cap ``c * tanh(logits / c)``."""

    scale: float = 1.0
    soft_cap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.soft_cap is None else self.soft_cap * torch.tanh(logits / self.soft_cap)


def logit_map(model: nn.Module) -> LogitMap:
    """The factor and the soft-cap from the model's configuration."""
    config = text_config(model)
    scale = 1.0
    for name, power in _FACTORS.items():
        value = asked(config, name, (int, float))
        if value:
            scale *= float(value) ** power
    caps = [float(cap) for cap in (asked(config, name, (int, float)) for name in _SOFT_CAPS) if cap]
    return LogitMap(scale, caps[0] if caps else None)


# ---------------------------------------------------------------------- configuration and weights


def vocab_size(model: nn.Module) -> int | None:
    """The number of token ids that the model can embed, or None if unknown."""
    weight = _weight_of(_embedding(model))
    if weight is None:
        return None
    shape = asked(weight, "ds_shape", tuple, tuple(weight.shape))
    # FSDP flattens a sharded weight, so the configuration gives the number.
    return shape[0] if len(shape) == 2 else asked(text_config(model), "vocab_size", int)


def output_size(model: nn.Module) -> int | None:
    """The number of tokens with a logit, by default the number of embeddings, or None if unknown."""
    size = asked(find_head(model), "out_features", int)
    return vocab_size(model) if size is None else size


def trains_with(model: nn.Module, other: nn.Module) -> bool:
    """Whether ``other`` shares all trained weights of ``model``, so that an optimizer step changes both."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad] or list(model.parameters())
    others = {_memory(parameter) for parameter in other.parameters()}
    return bool(trained) and all(_memory(parameter) in others for parameter in trained)


def _memory(parameter: Tensor) -> tuple[str, int]:
    """The address of a parameter, or its identity if it is sharded or on the meta device."""
    address = parameter.data_ptr() if type(parameter.data) is Tensor else 0
    return ("memory", address) if address else ("object", id(parameter))


def _embedding(model: nn.Module) -> Any:
    return call_of(unwrapped(model), "get_input_embeddings")


def _weight_of(embedding: Any) -> Tensor | None:
    """The weight of the input embedding. With ZeRO-3 it is empty: reading the attribute itself could gather it."""
    return embedding._parameters.get("weight") if is_zero3(embedding) else asked(embedding, "weight", Tensor)


def model_device(facts: Inspection, default: torch.device) -> torch.device:
    """The device on which the model expects token ids."""
    embedding = facts.of(_embedding)
    offloaded_from = asked(embedding, OFFLOADED, torch.device)
    if offloaded_from is not None:
        return offloaded_from
    weight = _weight_of(embedding)
    if weight is not None:
        return weight.device
    return next((parameter.device for parameter in facts.model.parameters()), default)


def is_offloaded(model: nn.Module) -> bool:
    """Whether the model's layers are in host memory and copied to the device only to run."""
    return has(_embedding(model), OFFLOADED)


def is_compiled(model: nn.Module) -> bool:
    """Whether modules of the model are compiled."""
    return any(map(compiled_call, modules_of(model)))


def is_on_meta(modules: list[nn.Module]) -> bool:
    """Whether weights of some modules are on the meta device, so not loaded yet."""
    return any(x is not None and x.is_meta for module in modules for x in module._parameters.values())


def drops_layers(model: nn.Module) -> bool:
    """Whether layers are dropped at random, as in OPT in training mode."""
    return any(module.training and asked(module, "layerdrop", (int, float)) for module in model.modules())


def position_limit(model: nn.Module) -> int | None:
    """The number of positions that the configuration allows, or None without a limit."""
    config = text_config(model)
    limits = [asked(config, name, int) for name in _POSITION_LIMITS]
    return next((limit for limit in limits if limit is not None and limit > 0), None)


def has_window(model: nn.Module) -> bool:
    """Whether some layers attend only to a window of the past, by the configuration."""
    config = text_config(model)
    kinds = asked(config, "layer_types", (list, tuple))
    if kinds:
        return any("sliding" in kind or "chunked" in kind for kind in kinds)
    window, limit = asked(config, "sliding_window", int), position_limit(model)
    return window is not None and (limit is None or window < limit)


def frequency_switches(model: nn.Module) -> set[int]:
    """Lengths beyond which the model uses other rotary frequencies (longrope). Usually empty.

    The longest sequence of a forward decides for all sequences, so those on different sides of a switch must not share one.
    """
    config = text_config(model)
    rope = asked(config, "rope_parameters", dict) or asked(config, "rope_scaling", dict)
    if rope is None:
        return set()
    kinds = [rope, *(value for value in rope.values() if isinstance(value, Mapping))]  # for all layers, or by kind
    limits = [
        kind.get("original_max_position_embeddings") or asked(config, "original_max_position_embeddings", int)
        for kind in kinds
        if kind.get("rope_type", kind.get("type")) == "longrope"
    ]
    return {limit for limit in limits if isinstance(limit, int)}


def placeholders(model: object) -> dict[int, str]:
    """Token ids of placeholders for other inputs than text, with their names in the configuration or one of its parts."""
    names: dict[int, str] = {}
    configs = [asked(unwrapped(model), "config", object)]
    for config in configs:
        for name in _PLACEHOLDERS:
            ids = asked(config, name, (int, list, tuple))
            for each in ids if isinstance(ids, (list, tuple)) else [ids]:
                if isinstance(each, int):
                    names.setdefault(each, name)
        configs += [part for part in (asked(config, "__dict__", dict) or {}).values() if has(part, "get_text_config")]
    return names


def text_config(model: nn.Module) -> Any:
    """The configuration of the language model, which is a part of a multimodal model's, or None without a configuration."""
    config: Any = asked(unwrapped(model), "config", object)
    return config.get_text_config(decoder=True) if has(config, "get_text_config") else config


# ---------------------------------------------------------------------- changes of weights


def fingerprint(model: nn.Module) -> tuple[object, ...]:
    """A value that is equal while the model has the same weights, in the same memory, with the same active adapters.

    Addresses and version counters reveal every change that autograd sees: an optimizer step, ``load_state_dict``, ``.to``.
    A write through ``.data``, as weight updaters do, changes no counter. A sample of the values of each tensor reveals it.
    """
    # Of sharded tensors (DTensor, ZeRO-3) the part of this process.
    both = (*(asked(p, "ds_tensor", Tensor, p) for p in model.parameters()), *model.buffers())
    tensors = [cast("DTensor", t).to_local() if has(t, "to_local") else t for t in both]
    where = tuple((t.data_ptr(), t.device, t.dtype, -1 if t.is_inference() else t._version) for t in tensors)
    samples: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        some = flat[:: max(1, flat.numel() // _SAMPLES)][:_SAMPLES].double()
        samples.setdefault(tensor.device, []).append(some)
    # One host synchronization per device.
    values = tuple(torch.cat(some).cpu().numpy().tobytes() for some in samples.values())
    return where, values, adapter_state(model)


def adapter_state(model: nn.Module) -> tuple[object, ...]:
    """The active PEFT adapters of each layer, with their factors."""
    return tuple(
        (
            layer.disable_adapters,
            tuple(asked(layer, "active_adapters", (list, tuple)) or ()),
            asked(layer, "merged", bool, False),
            tuple((asked(layer, "scaling", dict) or {}).items()),
        )
        for layer in adapter_layers(model)
    )
