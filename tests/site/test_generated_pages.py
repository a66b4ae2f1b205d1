"""Pages that scripts write are up to date, and their tables are right."""

import dataclasses
import math
import re
import sys
from typing import Any, get_args

import pytest
import torch
import yaml
from tensordict import TensorDict

import torchrl_llm_kl
from project import PROJECT, script
from torchrl_llm_kl import advantages, algorithms, estimators, losses
from torchrl_llm_kl._foreign import FOREIGN, foreign_hint
from torchrl_llm_kl.algorithms import ALGORITHMS, Algorithm, AlgorithmOverrides, make_algorithm
from torchrl_llm_kl.datasets import Encoder, Skip
from torchrl_llm_kl.diagnostics import METRICS, describe_metric
from torchrl_llm_kl.losses._metrics import common_metrics
from torchrl_llm_kl.losses._objective import dummy_inputs
from torchrl_llm_kl.losses._parts import TermPart
from torchrl_llm_kl.losses.corrections import Divergence, correction_metrics
from torchrl_llm_kl.tasks import reward_metrics
from torchrl_llm_kl.training import example_config, read_config
from torchrl_llm_kl.training._train import WRITTEN

build = script("docs/build_pages.py")


def page(name: str) -> str:
    return (PROJECT / "docs" / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(set(build.TABLES) - {"chat_templates", "doctor"}))
def test_a_page_is_up_to_date(name: str) -> None:
    assert page(f"{name}.md") == build.render(name), f"run `python docs/build_pages.py {name}`"


def test_the_places_of_contributing_are_true() -> None:
    text = build.CONTRIBUTING.read_text(encoding="utf-8")
    assert build.with_lines(text) == text, "run `python docs/build_pages.py architecture`"
    assert text.count(".py:") > 10
    with pytest.raises(ValueError, match=r"defines no ScoreRequest\.nowhere"):
        build.with_lines("`ScoreRequest.nowhere` (`scoring/_request.py:1`)")


def test_a_page_without_a_place_for_its_table() -> None:
    with pytest.raises(ValueError, match="no place for the table 'estimators'"):
        build.render("estimators", "# KL estimators\n")


def test_the_table_of_schulmans_article() -> None:
    """J. Schulman, "Approximating KL Divergence": bias and standard deviation over the true KL, 0.005 and 0.5.

    Half a unit of the last printed digit; the published bias of k2 is sampled (the integral is 0.0025).
    """
    measure = build.gaussian_bias_and_std
    table = {(0.1, "k1"): (0.0, 20.0), (0.1, "k2"): (0.002, 1.42), (0.1, "k3"): (0.0, 1.42)}
    table |= {(1.0, "k1"): (0.0, 2.0), (1.0, "k2"): (0.25, 1.73), (1.0, "k3"): (0.0, 1.7)}
    for (shift, name), want in table.items():
        bias, std = measure(name, shift)
        assert bias == pytest.approx(want[0], abs=6e-4), (name, shift)
        assert std == pytest.approx(want[1], abs=5.1e-3), (name, shift)
    for shift in (0.1, 0.5, 1.0):  # E d**2 / 2 = (m**2 + m**4 / 4) / 2, so the bias over the true KL is m**2 / 4
        assert measure("k2", shift)[0] == pytest.approx(shift**2 / 4, abs=1e-9)


def test_every_row_of_the_estimators_has_every_column() -> None:
    lines = estimators.estimator_table().splitlines()
    assert {line.count("|") for line in lines} == {10}
    assert [row.split("`")[1] for row in lines[2:]] == list(estimators.available_estimators())


@pytest.mark.parametrize(("exponent", "k"), [(2.0, 1), (1.1, 64)])
def test_captured_mass_and_forward_kl_by_hand(exponent: float, k: int) -> None:
    """Compared with sums over Python floats."""
    p = [rank**-exponent for rank in range(1, build.VOCAB + 1)]
    q = [rank ** (-0.9 * exponent) * math.exp(0.7 * math.sin(1.7 * rank)) for rank in range(1, build.VOCAB + 1)]
    p, q = ([x / total for x in values] for values in (p, q) for total in [math.fsum(values)])
    rest, other = math.fsum(p[k:]), math.fsum(q[k:])
    want = math.fsum(a * math.log(a / b) for a, b in zip(p[:k], q[:k], strict=True)) + rest * math.log(rest / other)
    value, gradient, captured = build.measure(exponent, k, 0.0)
    assert captured == pytest.approx(1 - rest, rel=1e-12)
    assert value == pytest.approx(want, rel=1e-9)
    assert float(gradient[0]) == pytest.approx(q[0] - p[0], rel=1e-9)  # a listed token
    shared = q[-1] - rest * q[-1] / other  # the others keep their proportions
    assert float(gradient[-1]) == pytest.approx(shared, rel=1e-9)


def test_the_bias_falls_with_k() -> None:
    for exponent in build.TEACHERS.values():
        rows = [line.strip("| ").split(" | ") for line in build.bias_table(exponent).splitlines()[2:]]
        columns = torch.tensor([[float(cell) for cell in row[1:]] for row in rows]).T
        assert (columns[:4].diff() >= 0).all()  # captured mass and values
        assert (columns[4:].diff() <= 0).all()  # gradients
        assert columns[:, -1].tolist() == [1] * 4 + [0] * (len(columns) - 4)


def test_other_libraries_settings_have_names_that_exist_or_say_what_to_do() -> None:
    """A lower-case path must be an argument of make_algorithm, or a setting of a part."""
    accepted = {*AlgorithmOverrides.__annotations__, *make_algorithm.__annotations__}
    accepted |= {f"objective_args.{name}" for name in losses.ObjectiveArgs.__annotations__}
    accepted |= {f"advantage_args.{name}" for name in advantages.AdvantageArgs.__annotations__}
    paths = {path for row in FOREIGN for path in row.here.split()}
    assert {path for path in paths if re.fullmatch("[a-z_.]+", path)} - accepted == set()
    assert not [row.name for row in FOREIGN if row.place in ("outside", "refused") and not row.note]
    assert not [row.name for row in FOREIGN if row.place in ("override", "sampling") and not row.here]
    assert foreign_hint("n").startswith(" verl's 'n' is 'group_size'")
    assert foreign_hint("nothing_at_all") == ""


def test_names_of_trinitys_table_exist() -> None:
    """Checks each name of this package, with its attributes."""
    table = page("differences.md").partition("## Trinity-RFT's classes and methods")[2]
    rows = [row.split(" | ") for row in table.splitlines() if row.startswith("| `")]
    layers = [torchrl_llm_kl, advantages, algorithms, estimators, losses]
    others = {"ReplayBuffer", "torchrl_llm_kl", "none", *dir(Algorithm), *Algorithm.__dataclass_fields__}
    found = [pair for _, here, *_ in rows for pair in re.findall(r"`([A-Za-z_]+)(?:\.([a-z_]+))?(?=[`(])", here)]
    ours = [(name, attribute) for name, attribute in found if name not in others]
    for name, attribute in ours:
        owner = next(getattr(layer, name) for layer in layers if hasattr(layer, name))
        assert attribute in {"", *dir(owner), *getattr(owner, "__dataclass_fields__", ())}, (name, attribute)
    named = {name for row in rows for name in re.findall("`([^`]+)`", row[0])}
    assert {"KLFn.apply_kl_penalty_to_reward", "KLFn.calculate_kl_loss", "KLFn.update_kl_coef"} <= named
    assert "PolicyLossFn.select_keys" in named
    assert len(rows) > 25
    checked = {"KLComputation", "KLToReference", "EntropyBonus", "ObjectiveSpec", "informative_groups"}
    assert checked <= {name for name, _ in ours}


# Settings that report more than the defaults do.
SETTINGS: dict[str, dict[str, Any]] = {
    "ppo": {"enable_sequence_masking": True},
    "cispo": {"enable_mask_clip": True},
    "rec": {"clip_mode": "two-side"},
    "dpo": {"weighting": "probability"},
    "mix_chord": {"mu": losses.FixedKLCoefficient(0.5)},
}
CORRECTIONS = [
    losses.ImportanceWeights(mode="truncate"),
    losses.ImportanceWeights(mode="mask", low=0.5, high=5.0),
    *(losses.RejectionMask(name, high=0.5) for name in get_args(Divergence)),
    losses.OffPolicySequenceMask(delta=0.1),
    losses.StalenessMask(2),
    losses.TotalVariationMask(delta=0.1),
    losses.TopEntropyMask(),
]


def test_reported_and_described_metrics_are_the_same() -> None:
    zeros, names = torch.zeros(1, 2), losses.available_objectives()
    mask = zeros == 0
    parts = [TermPart(losses.get_objective(name), **hyper) for name in names for hyper in ({}, SETTINGS.get(name, {}))]
    terms = [term for part in parts for term in part(dummy_inputs())]
    terms += losses.KLToSampler(0.1, "exact")(dummy_inputs())
    terms += losses.value_error(losses.ValueInputs(zeros, mask, zeros, zeros))
    found = {name for term in terms for name in term.metrics}
    found |= {name for correction in CORRECTIONS for name in correction(dummy_inputs())[1]}
    names_of_data = ("old_log_prob", "sampler_log_prob", "behavior_log_prob", "age", "ref_log_prob", "entropy")
    data = dict.fromkeys(names_of_data, zeros)
    found |= {*correction_metrics(zeros, mask), *losses.mismatch_metrics(zeros, zeros, mask)}
    found |= set(common_metrics(losses.LossInputs(zeros, mask, **data)))
    found |= set(reward_metrics(TensorDict(next={"reward_failures": torch.zeros(1, 1)}, batch_size=[1])))
    assert {name for name in found if describe_metric(name) is None} == set()
    assert {known for known in METRICS if "<" not in known} - found == set()
    # a second correction of one kind has a number at the end
    assert describe_metric("weight_max_2") is METRICS["weight_max"]
    assert describe_metric("seq_mean_k3_seq_masked_fraction") is METRICS["<divergence>_seq_masked_fraction"]
    assert describe_metric("token_k4_masked_fraction") is None


def papers() -> str:
    return page("papers.md")


def test_every_paper_that_the_code_names_is_listed() -> None:
    """The builder reads docstrings; this searches the text of the files. Each paper names its authors."""
    places = ("losses/**/*.py", "advantages/*.py", "algorithms/presets.csv")
    files = [file for place in places for file in PROJECT.glob(f"torchrl_llm_kl/{place}")]
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    named = set(re.findall(r"arXiv (\d{4}\.\d{5})", text))
    rows = re.findall(r"^\| \[(\d{4}\.\d{5})\]\(\S+\) \| (.*?) \| (.*?) \|$", papers(), re.MULTILINE)
    assert len(named) > 50
    assert named - {number for number, _, _ in rows} == set()
    assert [row for row in rows if not re.match(r"[A-Z]", row[1]) or "`" not in row[2]] == []


def test_every_value_with_a_source_is_there_beside_its_paper() -> None:
    below = {part.partition("\n")[0]: part.split("\n## ")[0] for part in page("algorithms.md").split("\n### ")}
    for name, algorithm in ALGORITHMS.items():
        assert all(re.search(rf"`{field}=[^`]+`", below[name]) for field in algorithm.sources), name
    for name, expected in (("dapo", "clip_high=0.28`.*2503.14476"), ("dpo", "beta=0.1`.*2305.18290")):
        assert re.search(expected, below[name]), name
    assert re.search("omega=1.0`.*2505.10978", below["gigpo"])


def test_the_page_of_runs_names_what_exists_and_its_least_configuration_is_enough() -> None:
    """Configuration keys in the text, such as `kl.place`, and everything that a run writes."""
    pytest.importorskip("omegaconf")
    text = page("train.md")
    assert text.count("\n| `") > 60
    known = set(re.findall(r"^\| `([a-z_]+\.[a-z_]+)` \|", text, flags=re.MULTILINE))
    sections = "|".join({key.split(".")[0] for key in known})
    named = set(re.findall(rf"`((?:{sections})\.[a-z_]+)[:`=]", text))
    assert len(named) > 15
    assert named <= known
    assert [name for name in WRITTEN if f"`{name}" not in text] == []
    (least,) = re.findall(r"A minimal configuration:\n\n```yaml\n(.*?)```", text, flags=re.DOTALL)
    least, example = (read_config(yaml.safe_load(text)).model.name for text in (least, example_config()))
    assert least == example


def test_all_arguments_and_reasons_of_the_page_of_data_are_named() -> None:
    text = page("data.md")
    fields = {field.name for field in dataclasses.fields(Encoder) if field.init} - {"layout", "tokenizer"}
    reasons = get_args(eval(Skip.__annotations__["reason"], vars(sys.modules[Skip.__module__])))
    assert len(reasons) == 7
    named = [f"`{field}" for field in sorted(fields)] + [f"`{reason}`" for reason in reasons]
    assert [name for name in named if name not in text] == []
