"""Loads models, tokenizers and adapters from disk or the hub, and writes the model folders of a run."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_llm_kl._registry import first_sentence
from torchrl_llm_kl.training._checkpoints import flush_folder

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from torchrl_llm_kl.training._config import LoraConfig, ModelConfig, TrainConfig

#: Settings of a transformers model that drop activations or layers in training mode, except in the head of a classifier.
_DROPS = re.compile(r"^(?!classifier|summary).*(dropout|_drop|pdrop|layerdrop|drop_rate)")


class ModelError(ValueError):
    """A model or a tokenizer cannot be loaded or used. The message gives the reason in one sentence."""


def load_model(
    name: str, *, dtype: str = "auto", device: str | None = None, attention: str | None = None
) -> PreTrainedModel:
    """Load a causal language model of transformers, frozen, in evaluation mode.

    Args:
        name: a folder that ``save_pretrained`` wrote, or a name on the hub.

    Keyword Args:
        dtype: ``"auto"`` (as in the checkpoint), ``"float32"``, ``"bfloat16"``, ``"float16"`` or ``"float64"``.
        device: the device. None takes the accelerator if there is one.
        attention: the ``attn_implementation`` of transformers. None takes its default.

    Raises:
        ModelError: if the model cannot be loaded.
        ValueError: if this machine does not have the device.

    Example:
        >>> model = load_model("Qwen/Qwen2.5-0.5B-Instruct", dtype="bfloat16")  # doctest: +SKIP
        >>> load_model("./nowhere")
        Traceback (most recent call last):
        ...
        torchrl_llm_kl.training._models.ModelError: cannot load the model './nowhere', which is not a folder here, from...
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    place = device_of_setting(device)
    logging.disable_progress_bar()  # they would mix with the bars of this program
    with _loading("model", name):
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, attn_implementation=attention)
        return model.to(place).eval().requires_grad_(False)


def device_of_setting(device: str | None, *, name: str = "device") -> torch.device:
    """The device of a setting. None takes the accelerator if there is one.

    Raises:
        ValueError: if this machine does not have the device. The message names the setting.

    Example:
        >>> device_of_setting("cpu")
        device(type='cpu')
    """
    import torch

    from torchrl_llm_kl._numerics import read_device

    return read_device(device or torch.accelerator.current_accelerator(check_available=True) or "cpu", name)


def load_model_config(name: str) -> PreTrainedConfig:
    """Load the configuration of a causal language model, without its weights.

    Args:
        name: a folder that ``save_pretrained`` wrote for a model or for adapters, or a name on the hub.

    Raises:
        ModelError: if the configuration cannot be loaded.

    Example:
        >>> load_model_config("Qwen/Qwen2.5-0.5B-Instruct").model_type  # doctest: +SKIP
        'qwen2'
    """
    from transformers import AutoConfig

    path = Path(name).expanduser()
    with _loading("model", name):
        if path.is_dir() and not (path / "config.json").exists():  # a folder of adapters names the model
            adapters = json.loads((path / "adapter_config.json").read_text(encoding="utf-8"))
            return load_model_config(adapters["base_model_name_or_path"])
        return AutoConfig.from_pretrained(name)


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder, or of a name on the hub.

    Raises:
        ModelError: if the tokenizer cannot be loaded.

    Example:
        >>> tokenizer = load_tokenizer("Qwen/Qwen2.5-0.5B-Instruct")  # doctest: +SKIP
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    folder = Path(name).expanduser()
    files = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json")
    # From a folder without these files transformers may build a tokenizer without a vocabulary.
    if folder.is_dir() and not any((folder / file).exists() for file in files):
        raise ModelError(f"the folder {name} holds no tokenizer: expected {' or '.join(files)}.")
    with _loading("tokenizer", name):
        if get_tokenizer_config(name).get("tokenizer_class") in ("TokenizersBackend", "PreTrainedTokenizerFast"):
            # AutoTokenizer would take the class of the model's family, which may split text differently.
            return PreTrainedTokenizerFast.from_pretrained(name)
        return AutoTokenizer.from_pretrained(name)


@contextmanager
def _loading(what: str, name: str) -> Iterator[None]:
    """Turn errors of transformers into a :class:`ModelError` that states where the model was searched."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, ImportError) as error:
        where = "" if Path(name).expanduser().is_dir() else ", which is not a folder here, from the hub"
        raise ModelError(f"cannot load the {what} {name!r}{where}: {first_sentence(error)}") from error


# ------------------------------------------------------------------ the policy of a run


def chat_tokenizer(name: str, template: str | None = None) -> PreTrainedTokenizerBase:
    """Load a tokenizer that renders conversations, pads on the left, and has a padding token.

    Args:
        name: a folder, or a name on the hub.
        template: the path of a file with a chat template, or ``"plain"`` for
            :data:`~torchrl_llm_kl.masks.PLAIN_TEMPLATE`. None for the tokenizer's own.

    Raises:
        ModelError: if there is no chat template, or neither a padding token nor an end token.

    Example:
        >>> tokenizer = chat_tokenizer("Qwen/Qwen2.5-0.5B-Instruct")  # doctest: +SKIP
    """
    from torchrl_llm_kl.masks import PLAIN_TEMPLATE

    tokenizer = load_tokenizer(name)
    if template is not None:
        tokenizer.chat_template = PLAIN_TEMPLATE if template == "plain" else _read_template(template)
    if tokenizer.chat_template is None:
        raise ModelError(
            f"the tokenizer of {name!r} has no chat template: for a base model set model.template=plain, and sampler.end to a "
            "text that ends an answer. Otherwise choose an instruction-tuned model."
        )
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ModelError(
                f"the tokenizer of {name!r} has neither a padding token nor an end token: save it with a pad_token to a folder "
                "and set model.tokenizer."
            )
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    return tokenizer


def _read_template(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        expected = "expected plain, or a file with a chat template"
        raise ModelError(f"model.template is {path}: {first_sentence(error)}; {expected}.") from error


def load_policy(config: TrainConfig, folder: Path | None = None) -> Any:
    """Load the model that a run trains. Its trained parameters require gradients.

    Args:
        config: the settings of the run. With ``lora`` the model is frozen and gets adapters.
        folder: the folder that :func:`save_policy` wrote. None at the start of a run, where torch's generator initialises new
            adapters.

    Raises:
        ModelError: if the model cannot be loaded.

    Example:
        >>> policy = load_policy(config)  # doctest: +SKIP
    """
    settings, lora = config.model, config.lora
    if lora is None:
        policy = _load(settings, settings.name if folder is None else str(folder)).requires_grad_(True)
    else:
        policy = _with_adapters(_load(settings, settings.name), lora, folder)
    if settings.gradient_checkpointing:
        _checkpoint_layers(policy)
    return policy.eval()  # the model is trained in this mode: with dropout, sampling and scoring would disagree


def _load(settings: ModelConfig, name: str) -> PreTrainedModel:
    return load_model(name, dtype=settings.dtype, device=settings.device, attention=settings.attention)


def _with_adapters(model: PreTrainedModel, lora: LoraConfig, folder: Path | None) -> Any:
    from peft import LoraConfig as Settings, PeftModel, get_peft_model

    # PEFT takes "all-linear" only as a string, and names of layers as a list.
    targets = lora.targets[0] if lora.targets == ["all-linear"] else list(lora.targets)
    settings = Settings(r=lora.r, lora_alpha=lora.alpha, target_modules=targets, task_type="CAUSAL_LM")  # type: ignore[arg-type]
    with warnings.catch_warnings():
        # PEFT reads this attribute, which transformers deprecates.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        if folder is not None:
            return PeftModel.from_pretrained(model, folder, is_trainable=True)
        return get_peft_model(model, settings)


def _checkpoint_layers(policy: Any) -> None:
    """Enable activation checkpointing, which transformers uses only in training mode. Dropout must therefore be 0."""
    # Attention takes its dropout from the configuration and has no module for it.
    drops = {name for name, value in policy.config.get_text_config().to_dict().items() if _DROPS.search(name) and value}
    drops |= {name for name, part in policy.named_modules() if type(part).__name__ == "Dropout" and part.p > 0}
    if drops:
        dropped = ", ".join(sorted(drops))
        raise ModelError(f"model.gradient_checkpointing trains with dropout ({dropped}): set it to 0 in config.json.")
    # transformers 5.24 renamed the method.
    enable = getattr(policy, "activation_checkpointing_enable", None) or policy.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def policy_without_weights(config: TrainConfig, model_config: PreTrainedConfig) -> PreTrainedModel:
    """Build the policy without weights, to check the settings of attention, adapters and gradient checkpointing.

    Args:
        config: the settings of the run.
        model_config: the configuration of the model.

    Raises:
        ModelError: if the model does not support a setting.

    Example:
        >>> policy_without_weights(config, load_model_config(config.model.name))  # doctest: +SKIP
    """
    import torch
    from transformers import AutoModelForCausalLM

    attention = config.model.attention
    with torch.device("meta"):
        try:
            model = AutoModelForCausalLM.from_config(model_config, attn_implementation=attention)
        except (ValueError, ImportError) as error:
            given = f"model.name is {config.model.name}, model.attention is {attention}"
            raise ModelError(f"{given}: {first_sentence(error)}") from error
        if config.lora is not None:
            model = _with_adapters(model, config.lora, None)
    if config.model.gradient_checkpointing:
        _checkpoint_layers(model)
    return model


def save_policy(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    weights: dict[str, torch.Tensor] | None = None,
) -> None:
    """Save a policy and its tokenizer. A policy with adapters saves only the adapters.

    Args:
        policy: the result of :func:`load_policy`.
        tokenizer: its tokenizer.
        folder: the folder to write.

    Keyword Args:
        weights: the gathered weights of a sharded policy. None for the policy's own.

    Example:
        >>> save_policy(policy, tokenizer, Path("model"))  # doctest: +SKIP
    """
    if hasattr(policy, "peft_config"):
        # Otherwise PEFT asks the hub for the size of the vocabulary.
        policy.save_pretrained(folder, save_embedding_layers=False, state_dict=weights)
    else:
        policy.save_pretrained(folder, state_dict=weights)
    tokenizer.save_pretrained(folder)


def export_policy(config: TrainConfig, saved: Path, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the final folder, for ``from_pretrained``, from a folder of :func:`save_policy`. An earlier one is replaced.

    Adapters are merged into the model's weights unless ``lora.merge`` is false.

    Example:
        >>> export_policy(config, Path("model"), tokenizer, Path("final"))  # doctest: +SKIP
    """
    new = folder.with_name(f".new-{folder.name}")
    shutil.rmtree(new, ignore_errors=True)
    if config.lora is not None and config.lora.merge:
        merged = load_policy(config, saved).merge_and_unload()
        save_policy(merged, tokenizer, new)
    else:
        shutil.copytree(saved, new)
    # Renamed when it is complete, so that a killed process leaves no half-written final folder.
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)
    flush_folder(folder.parent)
