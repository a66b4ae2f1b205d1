"""TRL's configurations: the loss equals TRL's own trainer's, values and gradients, and no setting is dropped."""

import dataclasses
import importlib
import math
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torch import Tensor, nn

import elsewhere_batches as elsewhere
from closeness import assert_near
from elsewhere_batches import PROMPT, ROWS, OneDevice, agree, differ, ours, rollouts, scored, with_gradients
from project import tables
from refused import refused
from torchrl_llm_kl import PolicyLoss, ScoreOptions, from_trl, make_algorithm
from torchrl_llm_kl._foreign import TRL
from torchrl_llm_kl.losses import ImportanceWeights
from toy_tokenizer import build_tokenizer

#: Given to every configuration, so that it can be made without an accelerator.
#: Settings of three trainers whose losses are compared; refused settings and why; hints for foreign names.
CASES, PAIRED, CONTRASTIVE, REFUSED, HINTS = tables(__file__).values()
CPU: dict[str, Any] = {"use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True}


@contextmanager
def quiet() -> Iterator[None]:
    """Silences the warnings that TRL's imports and constructors raise. Also a decorator."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(scope="module")
@quiet()
def trl() -> Any:
    pytest.importorskip("datasets")
    return pytest.importorskip("trl")


EXPERIMENTAL = ("cpo", "orpo", "gkd", "tpo", "a2po", "iw_opd")
CLASSES = {"distillation": "Distillation", "iw_opd": "IWOPD"}


def trl_class(trl: Any, trainer: str, kind: str = "Config") -> Any:
    """The class, from TRL or from its package of experimental trainers."""
    module = importlib.import_module(f"trl.experimental.{trainer}") if trainer in EXPERIMENTAL else trl
    return getattr(module, f"{CLASSES.get(trainer, trainer.upper())}{kind}")


@pytest.fixture
def configured(trl: Any, tmp_path: Path) -> Any:
    """A function that makes a trainer's configuration."""

    @quiet()
    def made(trainer: str, **settings: Any) -> Any:
        return trl_class(trl, trainer)(output_dir=str(tmp_path), **CPU, gradient_checkpointing=False, **settings)

    return made


def theirs(trl: Any, model: Any, batch: dict[str, Tensor], config: Any, **state: Any) -> elsewhere.Found:
    """The loss and gradients of TRL's own trainer."""
    from datasets import Dataset

    given = {"train_dataset": Dataset.from_list([{"prompt": "a"}] * 8), "args": config}
    given["processing_class"] = build_tokenizer(pad_token="<|pad|>")
    with quiet():
        trainer = trl.GRPOTrainer(model, lambda completions, **_: [0.0] * len(completions), **given)
    for name, value in {"current_gradient_accumulation_steps": 1, **state}.items():
        setattr(trainer, name, value)
    model.train()
    inputs = {"prompt_ids": batch["ids"][:, :PROMPT], "prompt_mask": torch.ones(ROWS, PROMPT, dtype=torch.long)}
    inputs |= {"completion_ids": batch["ids"][:, PROMPT:], "completion_mask": batch["mask"].long()}
    inputs |= {"advantages": batch["advantage"], "num_items_in_batch": batch["mask"].sum()}
    inputs |= {"old_per_token_logps": batch["old"], "ref_per_token_logps": batch["ref"]}
    if state.get("use_vllm"):
        inputs["importance_sampling_ratio"] = _vllm_weights(trainer, batch)
    return with_gradients(model, lambda: trainer._compute_loss(model, inputs))


def _vllm_weights(trainer: Any, batch: dict[str, Tensor]) -> Tensor:
    """TRL computes these between generation and loss, so they are written out here, for its four modes."""
    log_ratio = (batch["old"] - batch["sampler"]) * batch["mask"]
    level, _, mode = trainer.vllm_importance_sampling_mode.partition("_")
    ratio = (log_ratio.sum(-1, keepdim=True) if level == "sequence" else log_ratio).exp()
    low, high = trainer.vllm_importance_sampling_clip_min, trainer.vllm_importance_sampling_clip_max
    if mode == "truncate":
        return ratio.clamp(min=low, max=high)
    return torch.where((ratio < (low or 0)) | (ratio > (high or math.inf)), 0, ratio)


@pytest.mark.parametrize("name", CASES)
def test_the_loss_equals_that_of_trls_trainer(trl: Any, model: Any, batch: Any, configured: Any, name: str) -> None:
    config = configured("grpo", **CASES[name])
    agree(ours(model, batch, from_trl(config)), theirs(trl, model, batch, config))
    # A mapping with the same settings is the same algorithm.
    by_name, by_config = from_trl(CASES[name]), from_trl(config)
    assert by_name.algorithm == by_config.algorithm
    assert repr(by_name.recipe) == repr(by_config.recipe)


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_corrections_of_vllms_log_probs(trl: Any, model: nn.Module, batch: Any, configured: Any, mode: str) -> None:
    of_vllm = {"mode": mode, "clip_max": 1.3, "clip_min": 0.7}
    settings = {"beta": 0.1} | {f"vllm_importance_sampling_{name}": value for name, value in of_vllm.items()}
    expected = theirs(trl, model, batch, configured("grpo", **settings), use_vllm=True)
    agree(ours(model, batch, from_trl({**settings, "use_vllm": True})), expected)
    (correction,) = from_trl({"use_vllm": True}).overrides["loss_args"]["corrections"]
    assert isinstance(correction, ImportanceWeights)
    usual = {"level": "sequence", "mode": "mask", "low": None, "high": 3.0, "ratio": "both"}
    assert correction.hyper == usual
    assert "loss_args" not in from_trl({"use_vllm": True, "vllm_importance_sampling_correction": False}).overrides


@pytest.mark.filterwarnings("ignore:rows of one group")  # each row has its own prompt
def test_the_transform_of_a_corrected_algorithm_moves_vllms_log_probs(model: Any, batch: dict[str, Tensor]) -> None:
    """The sampler's are under ``("log_probs", "full")``, as vLLM's wrapper stores them; the trainer's replace them."""
    found = from_trl({"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"})
    parts = found.make(model, group_key="query")
    rows = rollouts(batch).unbind(0)
    for i, row in enumerate(rows):
        row["log_probs"] = row["next"].pop("sampler_log_probs")
        row["next", "reward"], row["query"] = torch.tensor([i / ROWS]), torch.tensor(i // 2)
        del row["next", "log_probs"]
    out = parts.loss(parts.prepare(lazy_stack(rows)))
    ratio = (scored(model, batch)[0].detach() - batch["sampler"])[batch["mask"]].exp()
    assert_near(out["weight_mean"].double(), ratio.mean(), dtype=torch.float32, size=ratio.numel())


@pytest.mark.parametrize("trainer", ["grpo", "rloo"])
def test_limits_and_engines_of_the_sampler_are_not_called_ineffective(trainer: Any) -> None:
    found = from_trl({"max_completion_length": 256, "use_vllm": True}, trainer=trainer)
    notes = {row.name: row.note for row in found.outside if row.given}
    assert notes["max_completion_length"].endswith("`max_new_tokens` of the sampler")
    assert (trainer == "grpo") == ("use_vllm" in {row.name for row in found.translated})
    assert notes.get("use_vllm", "set it when you start the sampler") == "set it when you start the sampler"
    found = from_trl({"max_completion_length": 256, "loss_type": "dr_grpo"})
    assert found.overrides["max_len"] == 256


def test_advantages_by_hand(model: nn.Module) -> None:
    """Standard deviations of (1, 0) and (2, 2) are 1/sqrt(2) and 0; of all four, sqrt(11/12)."""
    for scale, sigma in (("group", 0.5**0.5), ("batch", (11 / 12) ** 0.5), (False, None), ("none", None)):
        parts = from_trl({"num_generations": 2, "scale_rewards": scale}).make(model)
        found = parts.prepare(elsewhere.one_prompt_each([1.0, 0.0, 2.0, 2.0], [1, 1, 2, 2]))["advantage"]
        high = 0.5 if sigma is None else 0.5 / (sigma + 1e-4)
        assert_near(found.squeeze(-1), torch.tensor([high, -high, 0, 0]), terms=4, size=2)
    # Several rewards are each normalised before they are summed.
    found = from_trl({"multi_objective_aggregation": "normalize_then_sum", "reward_weights": [1.0, 0.5]})
    preset = found.make(nn.Linear(1, 1)).algorithm
    assert (preset.advantage, preset.advantage_args) == ("gdpo", {"epsilon": 1e-4, "reward_weights": [1.0, 0.5]})
    assert preset.schema == "rewards"


def test_rloo_has_its_kl_in_the_reward() -> None:
    found = from_trl({"beta": 0.07, "num_generations": 4}, trainer="rloo")
    assert found.algorithm == "rloo"
    wanted = {"kl_loss": "none", "kl_reward": "k1", "kl_reward_coeff": 0.07, "group_size": 4}
    assert wanted.items() <= found.overrides.items()
    assert from_trl({}, trainer="rloo").overrides["kl_reward_coeff"] == 0.05
    assert [row.name for row in from_trl({"num_iterations": 2}, trainer="rloo").refused] == ["num_iterations"]


def test_rloos_gradient_equals_that_of_trls_trainer(trl: Any, model: nn.Module, batch: dict[str, Tensor]) -> None:
    """On the policy's own answers the ratio is 1. Values differ: TRL's is the mean advantage, whatever the answers' lengths."""
    log_prob, _ = scored(model, batch)
    mask = batch["mask"].double()
    scores = {"_get_per_token_logps_and_entropies": lambda *_, **__: (log_prob, log_prob, None)}
    own = OneDevice(epsilon_low=0.2, epsilon_high=0.2, **scores)
    ids = {"prompt_ids": batch["ids"], "prompt_mask": mask, "completion_ids": batch["ids"], "completion_mask": mask}
    old = {"old_logps": (log_prob.detach() * mask).sum(-1), "advantages": batch["advantage"]}
    _, expected = with_gradients(model, lambda: trl.RLOOTrainer._compute_loss(own, model, {**ids, **old}))
    found, gradients = ours(model, {**batch, "old": log_prob.detach()}, from_trl({"beta": 0.0}, trainer="rloo"))
    agree((found, gradients), (found, expected))


# ------------------------------------------------------------------ preferences
def paired(trl: Any, model: nn.Module, batch: dict[str, Tensor], config: Any) -> elsewhere.Found:
    """The loss and gradients of TRL's DPOTrainer, whose batch holds all chosen rows, then all rejected."""
    order = [*range(0, ROWS, 2), *range(1, ROWS, 2)]
    ids, mask = batch["ids"][order], batch["mask"][order]
    whole = torch.cat([torch.zeros(ROWS, PROMPT, dtype=torch.bool), mask], 1)
    ref = (batch["ref"] * batch["mask"])[order].sum(-1)
    if config.ld_alpha is not None:
        shorter = torch.minimum(*mask.sum(-1).chunk(2)).repeat(2)
        tail = torch.arange(elsewhere.WIDTH) >= shorter[:, None]
        ref = (batch["ref"][order] * mask * torch.where(tail, config.ld_alpha, 1.0)).sum(-1)

    def forward(**given: Any) -> SimpleNamespace:
        logits = model(given["input_ids"]).logits.log_softmax(-1)[:, :-1]
        found = logits.gather(-1, given["input_ids"][:, 1:, None])[..., 0] * whole[:, 1:]
        if config.f_divergence_type == "alpha_divergence":  # TRL bounds it for half and single precision only
            found = found.float()
        logged = dict.fromkeys(("entropy", "mean_logits"), found) | {"is_top1": found > 0}
        return SimpleNamespace(log_probs=found, **logged)

    names = ("beta", "label_smoothing", "ld_alpha", "f_divergence_type", "f_alpha_divergence_coef", "use_weighting")
    kinds = [config.loss_type] if isinstance(config.loss_type, str) else config.loss_type
    state = {"precompute_ref_logps": True, "loss_types": kinds, "args": config}
    state["loss_weights"] = config.loss_weights or [1.0] * len(kinds)
    own = OneDevice(_total_train_tokens=0, _tp_size=1, **state, **{name: getattr(config, name) for name in names})
    chosen, rejected = (ref.float() if config.f_divergence_type == "alpha_divergence" else ref).chunk(2)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": whole.long()}
    inputs |= {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
    return with_gradients(model, lambda: trl.DPOTrainer._compute_loss(own, forward, inputs, False))


@pytest.mark.parametrize("name", PAIRED)
def test_preference_losses(trl: Any, model: nn.Module, batch: dict[str, Tensor], configured: Any, name: str) -> None:
    config = configured("dpo", **PAIRED[name])
    found = from_trl(config)
    assert not found.refused
    agree(ours(model, batch, found), paired(trl, model, batch, config))
    if "ignores" in name:
        assert [row.name for row in found.outside if row.name == "label_smoothing"]


@pytest.mark.parametrize("kind", ["nll", "dft", "kto", "apo_zero_unpaired"])
def test_sft_and_kto_by_hand(model: nn.Module, batch: dict[str, Tensor], kind: str) -> None:
    """sft and dft: minus the mean log-prob, dft times the probability. kto: TRL's formulas for its two kinds, at a given KL."""
    weights = {"beta": 0.4, "desirable_weight": 1.5, "undesirable_weight": 0.5}
    sft, point = kind in ("nll", "dft"), 0.3 if kind == "kto" else 0.0
    data, chosen = rollouts(batch), torch.arange(ROWS) % 3 == 0
    data["chosen"], data["reference_point"] = chosen, torch.full((ROWS,), point)

    def by_hand() -> Tensor:
        log_prob, _ = scored(model, batch)
        if sft:
            return -(log_prob * (log_prob.detach().exp() if kind == "dft" else 1))[batch["mask"]].mean()
        distance = 0.4 * (((log_prob - batch["ref"]) * batch["mask"]).sum(-1) - point)
        return torch.where(chosen, 1.5 * torch.sigmoid(-distance), 0.5 * torch.sigmoid(distance)).mean()

    found = from_trl({"loss_type": kind, **({} if sft else weights)}, trainer="sft" if sft else "kto")
    agree(ours(model, batch, found, data), with_gradients(model, by_hand))


# ------------------------------------------------------------------ experimental trainers
PAD = 0


def bare_trainer(trainer: str, **state: Any) -> Any:
    """TRL's trainer without its constructor: it has only the given state, which is all that its loss reads."""
    kind = trl_class(None, trainer, "Trainer")
    made = kind.__new__(kind)
    padding = {"pad_token_id": PAD, "padding_value": PAD, "is_encoder_decoder": False}
    made.__dict__.update(vars(OneDevice(**{"args": SimpleNamespace(device="cpu"), **padding, **state})))
    return made


def columns(batch: dict[str, Tensor], prompt: int) -> dict[str, Tensor]:
    """Padded pairs as TRL's collator makes them, with the last ``prompt`` tokens of each prompt, which have no label."""
    found = {}
    for side, name in enumerate(("chosen", "rejected")):
        ids, mask = batch["ids"][side::2, PROMPT - prompt :].clone(), batch["mask"][side::2]
        attention = torch.cat([torch.ones(ROWS // 2, prompt, dtype=torch.bool), mask], 1)
        labels = ids.masked_fill(~attention, -100)
        labels[:, :prompt] = -100
        found |= {f"{name}_input_ids": ids.masked_fill(~attention, PAD), f"{name}_labels": labels}
        found[f"{name}_attention_mask"] = attention.long()
    return found


@pytest.mark.parametrize("name", CONTRASTIVE)
def test_cpo(model: nn.Module, batch: dict[str, Tensor], configured: Any, name: str) -> None:
    config = configured("cpo", **CONTRASTIVE[name])
    read = ("loss_type", "beta", "label_smoothing", "cpo_alpha", "simpo_gamma", "alpha")
    made = bare_trainer("cpo", **{key: getattr(config, key) for key in read})
    expected = with_gradients(model, lambda: made.get_batch_loss_metrics(model, columns(batch, PROMPT))[0])
    for found in (from_trl(config), from_trl(CONTRASTIVE[name], trainer="cpo")):
        assert not found.refused
        agree(ours(model, batch, found), expected)


def test_orpo(model: nn.Module, batch: dict[str, Tensor], configured: Any) -> None:
    """TRL's likelihood includes the prompt. Prompts of one token, which nothing predicts, leave the answer's."""
    found = from_trl(configured("orpo", beta=0.3))
    (row,) = found.translated
    assert row.note == "TRL's likelihood covers prompt and answer, here it covers only the answer"
    made = bare_trainer("orpo", beta=0.3)
    short = {**batch, "ids": batch["ids"][:, PROMPT - 1 :]}
    expected = with_gradients(model, lambda: made.get_batch_loss_metrics(model, columns(batch, 1))[0])
    each = zip(short["ids"], batch["mask"].sum(-1).tolist(), strict=True)
    rows = [TensorDict(tokens=TensorDict(prompt=ids[:1], full=ids[: 1 + length])) for ids, length in each]
    agree(ours(model, batch, found, lazy_stack(rows)), expected)
    whole = with_gradients(model, lambda: made.get_batch_loss_metrics(model, columns(batch, PROMPT))[0])
    assert differ(ours(model, batch, found), whole)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_gkd(model: nn.Module, batch: dict[str, Tensor], configured: Any, beta: float) -> None:
    """TRL computes the divergence at temperature 1; its setting of 0.9 is for sampling."""
    torch.manual_seed(1)
    teacher = type(model)(model.config).double().eval()  # type: ignore[call-arg]
    found = from_trl(configured("gkd", beta=beta, lmbda=0.25, temperature=0.8))
    assert not found.refused
    assert found.sampling.temperature == 0.8
    assert {"lmbda", "seq_kd"} <= {row.name for row in found.outside}
    ids = columns(batch, PROMPT)
    names = ("input_ids", "labels", "attention_mask")
    inputs = {name: torch.cat([ids[f"chosen_{name}"], ids[f"rejected_{name}"]]) for name in names}
    made = bare_trainer("gkd", beta=beta, teacher_model=teacher)
    count = batch["mask"].sum()
    expected = with_gradients(model, lambda: made.compute_loss(model, inputs, num_items_in_batch=count))
    parts = found.make(model, reference=teacher)
    agree(with_gradients(model, lambda: parts.loss(rollouts(batch)).total_loss), expected)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"beta": 0.3, "label_smoothing": 0.1, "tpo_alpha": 0.4},
        {"loss_type": "hinge", "beta": 0.4},
        {"loss_type": "ipo", "beta": 0.5, "tpo_alpha": 2.0},
        {"loss_type": "tpo-l", "beta": 1.5, "tpo_l_gamma": 0.3},
    ],
)
def test_tpo(model: nn.Module, batch: dict[str, Tensor], configured: Any, settings: dict[str, Any]) -> None:
    """TRL's batch holds all chosen rows, then all rejected, then all third."""
    config, rows = configured("tpo", **settings), ROWS // 3 * 3
    three = {key: x[:rows] for key, x in batch.items()}
    order = [*range(0, rows, 3), *range(1, rows, 3), *range(2, rows, 3)]
    mask = torch.cat([torch.zeros(rows, PROMPT, dtype=torch.bool), three["mask"]], 1)[order]
    inputs = {"input_ids": three["ids"][order], "completion_mask": mask.long()}
    inputs["attention_mask"] = torch.ones_like(mask).long()
    read = ("loss_type", "beta", "label_smoothing", "tpo_alpha", "tpo_l_gamma")
    state = {"_total_train_tokens": 0, "_tp_size": 1, "aux_loss_enabled": False}
    made = bare_trainer("tpo", **state, **{key: getattr(config, key) for key in read})
    made.model = model
    expected = with_gradients(model, lambda: made._compute_loss(model, inputs, False))
    found = from_trl(config)
    assert not found.refused
    agree(ours(model, three, found, rollouts(three)), expected)


def test_a2po(model: nn.Module, batch: dict[str, Tensor], configured: Any) -> None:
    """Rewards run from -1 to 1, and each prompt has the value 0.25."""
    found = from_trl(configured("a2po", beta2=0.3))
    assert not found.refused
    reward, value = torch.linspace(-1, 1, ROWS).double(), torch.full((ROWS,), 0.25).double()
    made = bare_trainer("a2po", args=SimpleNamespace(beta2=0.3, device="cpu"))
    made.model = model
    made._get_sequence_logps = lambda *_: (scored(model, batch)[0] * batch["mask"]).sum(-1)
    inputs = dict.fromkeys(("input_ids", "attention_mask", "logits_to_keep"))
    inputs |= {"ref_logps": (batch["ref"] * batch["mask"]).sum(-1), "rewards": reward, "v_star": value}
    expected = with_gradients(model, lambda: made.compute_loss(model, inputs))
    data = rollouts(batch)
    data["next", "reward"], data["reward_baseline"] = reward.unsqueeze(-1), value
    parts = found.make(model, reference="data")
    agree(with_gradients(model, lambda: parts.loss(parts.prepare(data)).total_loss), expected)


def test_trls_derived_configurations_are_not_read_as_their_base(trl: Any, configured: Any, tmp_path: Path) -> None:
    """GKDConfig and others are derived from SFTConfig, and have another loss."""
    from trl.experimental.gold import GOLDConfig

    class Mine(trl.SFTConfig):
        """A user's subclass."""

    assert from_trl(configured("gkd")).algorithm == "gkd"
    assert from_trl(Mine(output_dir=str(tmp_path), **CPU)).algorithm == "sft"
    assert issubclass(GOLDConfig, trl.SFTConfig)
    message = r"from_trl takes GRPOConfig, .*IWOPDConfig or a mapping .*, got GOLDConfig. TRL's GOLD is not translated"
    with pytest.raises(TypeError, match=message):
        from_trl(GOLDConfig.__new__(GOLDConfig))

    class BCOConfig:
        """A configuration that TRL has removed."""

    with pytest.raises(TypeError, match=r"got BCOConfig. TRL's BCO is not translated: make_algorithm\('bco', ...\)"):
        from_trl(BCOConfig())


# ------------------------------------------------------------------ every setting has a place
@pytest.mark.parametrize("trainer", TRL)
def test_the_table_has_every_field_and_its_default(trl: Any, trainer: str) -> None:
    from transformers import TrainingArguments

    general = {f.name for f in dataclasses.fields(TrainingArguments)}
    fields = {f.name: f for f in dataclasses.fields(trl_class(trl, trainer))}
    rows = TRL[trainer]
    assert set(fields) - general <= set(rows) <= set(fields)
    for name, row in rows.items():
        field = fields[name]
        made = field.default_factory is not dataclasses.MISSING
        assert row.default == (field.default_factory() if made else field.default), name


@pytest.mark.parametrize("trainer", TRL)
def test_each_given_setting_is_in_one_list(trainer: Any) -> None:
    given = {name: row.default for name, row in TRL[trainer].items()} | {"learning_rate": 1e-5, "betaa": 0.1}
    found = from_trl(given, trainer=trainer)
    elsewhere.each_in_one_list(found, given)
    assert [row.name for row in found.refused if row.given][-1] == "betaa"
    assert re.search("Did you mean 'beta2?'", found.refused[-1].note) or trainer == "sft"


def test_a_configuration_lists_what_differs_from_its_defaults(configured: Any) -> None:
    given = {"epsilon_high": 0.28, "top_p": 0.9, "learning_rate": 1e-5, "mask_truncated_completions": True}
    found = from_trl(configured("grpo", **given))
    assert [row.name for row in found.translated if row.given] == ["epsilon_high"]
    assert [row.name for row in found.sampled] == ["top_p"]
    assert found.sampling.top_p == 0.9
    assert {"learning_rate", "mask_truncated_completions"} <= {row.name for row in found.outside}
    assert not {"bf16", "logging_steps", "adam_beta1", "generation_batch_size"} & {row.name for row in found.outside}
    assert not found.refused


# ------------------------------------------------------------------ what is refused
@pytest.mark.parametrize(("settings", "trainer", "name", "reason"), REFUSED)
def test_refused_settings_say_why(settings: dict[str, Any], trainer: Any, name: str, reason: str) -> None:
    found = from_trl(settings, trainer=trainer)
    assert [row.name for row in found.refused] == [name]
    with pytest.raises(ValueError, match=f"(?s){name}=.*({reason}).*without_refused=True"):
        found.make(nn.Linear(1, 1))
    if settings == {"epsilom": 0.1}:
        assert found.make(nn.Linear(1, 1), without_refused=True).algorithm.name == "dapo"


test_wrong_input = refused(
    lambda settings, trainer: from_trl(settings, trainer=trainer),
    ({"loss_type": ["dapo"]}, "grpo", ValueError, r"TRL has no loss_type \['dapo'\].*Did you mean 'dapo'"),
    ({"loss_type": []}, "dpo", ValueError, "TRL has no loss_type None"),
    ({}, "grop", ValueError, "unknown trainer 'grop'.*Did you mean 'grpo'"),
    ({}, "bco", ValueError, "unknown trainer 'bco'.*TRL's BCO is not translated: make_algorithm\\('bco', ...\\)"),
    (3, "grpo", TypeError, "takes GRPOConfig, .*or a mapping of settings, got int"),
)


def test_overrides_and_further_arguments_of_make_algorithm(model: nn.Module) -> None:
    found = from_trl({"use_vllm": True, "use_adaptive_entropy": True, "entropy_coef": 0.02, "entropy_target": 0.5})
    parts = make_algorithm(found.algorithm, model, **found.overrides)
    coefficient = parts.algorithm.entropy_coeff
    assert (float(coefficient.value), coefficient.target) == (pytest.approx(0.02), 0.5)
    # Each has its own coefficient and corrections.
    assert found.overrides["entropy_coeff"] is not found.overrides["entropy_coeff"]
    found = from_trl({"num_generations": 4, "temperature": 0.7, "top_k": 5, "use_vllm": True})
    assert found.make(model).loss.sampling.top_k == 0  # TRL scores without top-k
    more = {"group_key": "query", "loss_args": {"functional": True}, "objective_args": {"clip_low": 0.1}}
    parts = found.make(model, options=ScoreOptions(found.sampling, dtype=torch.float32), **more)
    assert (parts.loss.sampling.temperature, parts.loss.sampling.top_k) == (0.7, 5)
    assert (float(parts.loss.clip_low), float(parts.loss.clip_high)) == (pytest.approx(0.1), pytest.approx(0.2))
    assert len(parts.loss.corrections) == 1
    both = found.make(model, loss_args={"corrections": [ImportanceWeights(high=1.5)]}).loss.corrections
    assert [float(each.high) for each in both] == [3.0, 1.5]


def test_the_table_of_a_translation() -> None:
    found = from_trl({"beta": 0.1, "top_k": 5, "learning_rate": 1e-6, "router_aux_loss_coef": 0.1})
    text = str(found)
    assert "make_algorithm('dapo', actor, ...)" in text
    parts = "kl_loss       ", "corrected_k3(ratio_max=inf)", "sampled from Sampling(top_k=5)", "learning_rate = 1e-06"
    assert all(part in text for part in parts)
    refused = text[text.index("refused") :]
    assert "router_aux_loss_coef = 0.1  add the `aux_loss` of the model" in refused


@pytest.mark.parametrize(("name", "hint"), HINTS.items())
def test_a_foreign_name_gets_a_hint(name: str, hint: str) -> None:
    actor = nn.Linear(1, 1)
    with pytest.raises(TypeError, match=f"(?s)has no setting '{name}'.*{hint}"):
        make_algorithm("grpo", actor, **{name: 1})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=f"(?s)has no hyper-parameter '{name}'.*{name}' (is|belongs|has no)"):
        PolicyLoss(actor, "ppo", **{name: 1})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=f"(?s)has no hyper-parameter '{name}'"):
        make_algorithm("grpo", actor, reference="data", group_size=2, loss_args={name: 1})
