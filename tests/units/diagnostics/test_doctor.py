"""The doctor on plain columns and in a replay buffer: findings without a model, scoring, reports."""

import html
import json
import math
import warnings
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.data.llm import History

import seeded
import toy_rollouts
from seeded import LENGTH, Rollout, clean, make_model, make_tokenizer, sample, stale_by
from template_pairs import user
from torchrl_llm_kl import Doctor, Entropy, LogProbScorer, RetrieveLogProb, SamplerLogProbs, diagnose
from torchrl_llm_kl.diagnostics import DiagnosisWarning, read_columns
from torchrl_llm_kl.rollouts import drop_stale
from toy_models import with_lora

FULL = torch.arange(3, 63).reshape(6, 10)
approx = pytest.approx


def batch(**entries: Any) -> TensorDictBase:
    """Six answers of eight tokens, with entries under ``"next"``."""
    td = TensorDict(tokens=TensorDict(prompt=FULL[:, :2], full=FULL, batch_size=[6]), batch_size=[6])
    for name, value in entries.items():
        td["next", name, "full"] = value
    return td


def log_probs(seed: int = 0) -> torch.Tensor:
    return -3 * torch.rand(6, 10, generator=torch.Generator().manual_seed(seed)) - 0.1


def worst_of(td: TensorDictBase, **given: Any) -> Any:
    worst = diagnose(td, **given).worst
    assert worst is not None
    return worst


# ------------------------------------------------------------------ findings without a model
def put(places: Any, value: float) -> torch.Tensor:
    """The log-probs with another value at some places."""
    out = log_probs()
    out[places] = value
    return out


FAR, MASS = log_probs() - 60, 0.7 + 0.2 * torch.rand(6, 10, generator=torch.Generator().manual_seed(1))
LOWER = log_probs() - 1
SHIFTED_UP = LOWER - MASS.log()
CACHED, STORED = (slice(3), slice(2, 6)), (slice(3), slice(4, 7))
SPREAD = 0.1 * torch.randn(6, 10, generator=torch.Generator().manual_seed(2))
FEW = log_probs()
FEW[1, 4] -= 2.5
FEW[4, 8] -= 1.9
PLACES = "sequence 1: 2; sequence 4: 6"
#: Log-probs of a certain model. They have exact zeros too, since float32 rounds the probability to 1 above a gap of 17.
GAPS = 30 * torch.rand(6, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
CERTAIN = (1 - (-GAPS).exp()).float().log()
#: Name -> log-probs of the trainer, log-probs of the sampler, a cause, and a part of its evidence.
FOUND: dict[str, tuple[torch.Tensor, torch.Tensor | None, str | None, dict[str, Any]]] = {
    "nothing": (log_probs(), log_probs(), None, {}),
    "a certain model": (CERTAIN, None, None, {}),
    **{
        f"shifted by {shift}": (log_probs(), log_probs().roll(shift, -1), "off_by_one", {"shift": shift})
        for shift in (1, -1, 2)
    },
    # torchrl stores the first zero of each answer for a token that it never scores. 9 of the other 45 tokens are zeros.
    "zeros of a cache": (log_probs(), put(CACHED, 0), "zeros", {"column": "sampler_log_prob", "share": approx(0.2)}),
    "zeros beside others": (put(STORED, 0), log_probs(), "zeros", {"column": "old_log_prob", "share": 9 / 48}),
    "zeros alone": (put(slice(3), 0), None, "zeros", {"share": 0.5}),
    # Rounding below the floor of an unknown precision is not a fault.
    "rounded near 0": (log_probs() - 9, (log_probs() - 9).bfloat16().float(), None, {}),
    "rounded": (FAR, FAR.bfloat16().float(), "low_precision", {"precision": "bfloat16"}),
    "a truncated sampler": (LOWER, SHIFTED_UP, "other_sampling", {"mean_ratio": approx(0.8, abs=0.1)}),
    "another model": (log_probs(), log_probs(7), "mismatch", {}),
    "two findings": (put((0, 3), math.nan), log_probs().roll(1, -1), "off_by_one", {"shift": 1}),
    # 2 of the 48 tokens differ, listed by place in the answer. A difference of all tokens lists no places.
    "few tokens": (log_probs(), FEW, "few_tokens", dict(tokens="2 of 48", answers="2 of 6", places=PLACES)),
    "all tokens": (LOWER, LOWER + SPREAD, "mismatch", {}),
    "probabilities": (
        log_probs(),
        log_probs().exp(),
        "positive_log_probs",
        {"column": "sampler_log_prob", "share": 1.0},
    ),
    "a wrong sign": (-log_probs(), log_probs(), "positive_log_probs", {"column": "old_log_prob", "share": 1.0}),
    **{
        f"{value}": (put((2, 5), value), None, "nan", {"column": "old_log_prob", "share": approx(1 / 48)})
        for value in (math.nan, math.inf)
    },
}


@pytest.mark.parametrize("name", FOUND)
def test_findings_without_a_model(name: str) -> None:
    stored, sampler, cause, evidence = FOUND[name]
    given = {} if sampler is None else {"sampler_log_probs": sampler}
    diagnosis = diagnose(batch(log_probs=stored, **given))
    causes = [each.cause for each in diagnosis.findings]
    assert (cause is None) == (diagnosis.worst is None) == (cause not in causes)
    assert diagnosis.exit_code == (1 if cause is not None else 4 if sampler is None else 0)
    if cause is not None:
        found = diagnosis.findings[causes.index(cause)]
        assert diagnosis.worst.cause == cause or name in ("zeros beside others", "two findings")
        assert name != "two findings" or "nan" in causes
        assert {key: found.evidence[key] for key in evidence} == evidence
        assert cause != "mismatch" or "policy=" in found.remedy
    if name == "nothing":
        assert causes == []
    if name == "all tokens":  # the candidates are named too, with less confidence
        assert causes == ["mismatch", "stale_weights", "low_precision"]
    confidences = [each.confidence for each in diagnosis.findings]
    assert confidences == sorted(confidences, reverse=True)


@pytest.mark.parametrize("place", [6, 20, 22])
def test_a_token_that_a_wrapper_left_out_is_not_reported_as_older_weights(place: int) -> None:
    """A sampled pad token is missing in the batch, so all tokens after it were drawn after other tokens."""
    model, rollout = clean("qwen2", 0)
    tokenizer = make_tokenizer()
    long = [i for i, answer in enumerate(rollout.answers) if len(answer) == LENGTH][:16]
    columns = (rollout.prompts, rollout.answers, rollout.log_probs)
    prompts, answers, stored = ([rows[i] for i in long] for rows in columns)
    pad = torch.tensor([tokenizer.pad_token_id])
    drawn = torch.cat([answers[3][:place], pad, answers[3][place:]])
    ids = torch.cat([prompts[3], drawn])
    with torch.no_grad():
        log_probs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    stored[3] = log_probs[-len(drawn) :][drawn != pad]
    td = Rollout(prompts, answers, stored, torch.zeros(16)).batch()
    found = diagnose(td, policy=model, tokenizer=tokenizer)
    assert "stale_weights" not in {each.cause for each in found.findings}, found
    assert found.worst.cause in ("few_tokens", "retokenised"), found  # as a longer part of an answer looks
    if place == 22:
        assert found.worst.cause == "few_tokens", found
        where = {"tokens": f"2 of {16 * LENGTH}", "answers": "1 of 16", "places": "sequence 3: 22, 23"}
        assert {key: found.worst.evidence[key] for key in where} == where


@pytest.mark.parametrize(("name", "stored"), [("policy", True), ("reference", False)])
def test_tokens_that_stand_for_images(name: str, stored: bool) -> None:
    model, token = make_model("gpt2", 0), int(FULL[1, 3])
    given: dict[str, Any] = {"policy": make_model("gpt2", 1), name: model}
    td = batch(log_probs=log_probs(), sampler_log_probs=log_probs(7)) if stored else batch()
    before = {each.cause for each in diagnose(td, **given).findings}
    assert "not_text" not in before
    model.config.image_token_id = token
    worst = worst_of(td, **given)
    assert (worst.cause, worst.severity) == ("not_text", "fault")
    assert all(part in worst.evidence["error"] for part in (f"token id {token} at sequence", "image_token_id"))
    assert "Store the images of each row" in worst.remedy
    assert worst_of(td, policy=LogProbScorer(model)).cause == "not_text"
    model.config.image_token_id = int(FULL.max()) + 1
    assert {each.cause for each in diagnose(td, **given).findings} == before


def test_entries_that_do_not_fit_the_tokens_and_an_empty_mask() -> None:
    td = batch()
    td["log_probs", "full"] = torch.nested.nested_tensor([torch.full((8 + (i == 2),), -1.0) for i in range(6)])
    worst = worst_of(td)
    assert worst.cause == "lengths"
    assert "Pass one value per token" in str(worst.evidence["error"])
    with pytest.raises(ValueError, match="must"):
        read_columns(td)
    td = batch()
    td["tokens", "prompt"] = FULL
    assert worst_of(td).cause == "empty_mask"


def test_notes_are_not_faults() -> None:
    """Most groups have equal rewards, and one prompt has twice as many answers."""
    full = torch.tensor([[1, 5], [1, 6], [2, 5], [2, 6], [3, 5], [3, 6], [3, 7], [3, 8]])
    td = TensorDict(tokens=TensorDict(prompt=full[:, :1], full=full, batch_size=[8]), batch_size=[8])
    td["next"] = TensorDict(reward=torch.tensor([0.0, 0, 1, 1, 0, 1, 0, 1]).unsqueeze(-1), batch_size=[8])
    diagnosis = diagnose(td)
    assert {each.cause for each in diagnosis.notes} == {"no_spread", "duplicated_prompts"}
    assert diagnosis.exit_code == 4  # nothing to compare


def test_the_report_names_the_checks_that_were_left_out() -> None:
    td = batch()
    td["next", "logps"] = log_probs()
    report = diagnose(td)
    assert (report.faults, report.exit_code, report.compared) == ((), 4, False)
    assert "sampler and policy were not compared" in str(report).splitlines()[0]
    assert any("('next', 'logps') may hold them" in each for each in report.left_out)
    assert [each.split(":")[0] for each in report.left_out] == [
        "sampler against policy",
        "whether the tokens are samples of the policy",
        "retokenisation, templates and end tokens",
        "the KL to the reference",
    ]
    td["next", "log_probs", "full"] = td["next", "sampler_log_probs", "full"] = log_probs()
    report = diagnose(td)
    assert (report.exit_code, report.compared, len(report.left_out)) == (0, True, 3)


def test_a_collapsed_policy_and_one_far_from_its_reference() -> None:
    td = batch(log_probs=log_probs(), sampler_log_probs=log_probs(), ref_log_probs=log_probs() - 12)
    td["next", "entropy"] = torch.full((6, 10), 6e-8)
    report = diagnose(td)
    assert {each.cause for each in report.faults} >= {"collapsed", "far_from_reference"}
    assert report.exit_code == 1
    td["next", "ref_log_probs", "full"] = log_probs() - 3  # another model may be as far by design
    td["next", "entropy"] = -log_probs()
    report = diagnose(td)
    assert [(each.cause, each in report.notes) for each in report.findings] == [("far_from_reference", True)]


def test_older_versions_are_no_fault_if_the_batch_says_so() -> None:
    """After the update inside an answer all log-probs differ, which looks as if the text was encoded again."""
    later = log_probs()
    later[:, 6:] -= 1.7
    td = batch(log_probs=log_probs(), sampler_log_probs=later)
    assert worst_of(td).cause == "retokenised"
    td["policy_version"] = torch.full((6, 10), 3)
    assert worst_of(td).cause == "retokenised"
    td["policy_version"][:, 6:] = 4
    report = diagnose(td)
    assert report.faults == ()
    assert [each.cause for each in report.notes] == ["stale_by_design"]
    assert report.notes[0].evidence["looks_like"] == "retokenised"


def test_answers_that_are_left_out_shift_lengths_and_rewards() -> None:
    lengths = [6 + i % 3 for i in range(10)] + [20 + i % 3 for i in range(10)]
    rows = []
    for i, length in enumerate(lengths):
        full = torch.arange(1, length + 1)
        row = TensorDict(tokens=TensorDict(full=full, prompt=full[:2]), left_out=torch.tensor(i >= 10))
        rows.append(row.set("next", TensorDict(reward=torch.tensor([float(i % 2)]))))
    (note,) = [each for each in diagnose(lazy_stack(rows)).notes if each.cause == "survivors"]
    assert note.evidence == {"left_out": 0.5, "length_left_out": approx(20.9), "length_that_stays": approx(6.9)}


def test_answers_that_are_left_out_by_age_are_compared_with_the_others() -> None:
    """Long answers take longest, so they are the oldest."""
    rows = []
    for i in range(20):
        full = torch.arange(1, 7 + i % 3 + 14 * (i >= 10))
        row = TensorDict(
            tokens=TensorDict(full=full, prompt=full[:2]), policy_version=torch.tensor([9 - 5 * (i >= 10)])
        )
        rows.append(row.set("next", TensorDict(reward=torch.tensor([float(i % 2)]))))
    dropped = drop_stale(lazy_stack(rows), 9, max_age=4)
    (note,) = [each for each in diagnose(dropped).notes if each.cause == "survivors"]
    assert note.evidence == {"left_out": 0.5, "length_left_out": approx(21.0), "length_that_stays": approx(6.9)}
    fresh = drop_stale(lazy_stack(rows), 9, max_age=5)
    assert not [each for each in diagnose(fresh).notes if each.cause == "survivors"]


def test_end_tokens_of_the_policy_count() -> None:
    tokenizer = make_tokenizer()
    model = make_model("qwen2", 0)
    td = batch()
    td["tokens", "full"][:, -1] = 7
    assert diagnose(td, tokenizer=tokenizer).measures["answers/truncated"] == 1.0
    model.generation_config.eos_token_id = [7, 9]
    assert diagnose(td, tokenizer=tokenizer, policy=model).measures["answers/truncated"] == 0.0


def test_a_copy_of_the_policy_is_a_valid_reference_before_the_first_step() -> None:
    model, rollout = clean("qwen2", 0)
    td = rollout.batch(slice(8))
    diagnosis = diagnose(td, policy=model, reference=make_model("qwen2", 0))
    assert ([each.cause for each in diagnosis.findings], diagnosis.exit_code) == (["zero_kl"], 0)
    # the same weights after a step: the reference moved along
    td["next", "log_probs", "full"] = td["log_probs", "full"]
    moved = stale_by(1)("qwen2", 0)[1]["policy"]
    assert "reference_is_policy" in {each.cause for each in diagnose(td, policy=moved, reference=moved).faults}


def test_the_base_model_of_adapters_is_a_valid_reference() -> None:
    _, rollout = clean("llama", 0)
    policy = with_lora(make_model("llama", 0))
    td = sample(policy, rollout.prompts[:8], 0, answers=1).batch()
    given: dict[str, Any] = {"policy": policy, "reference": LogProbScorer(policy, adapters=False)}
    assert diagnose(td, **given).faults == ()
    assert worst_of(td, policy=policy, reference=LogProbScorer(policy)).cause == "reference_is_policy"


def test_only_missing_columns_are_scored_and_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rollout = clean("gpt2", 0)
    td = rollout.batch(slice(16))
    td = RetrieveLogProb(model, extras=[Entropy(), SamplerLogProbs()])(td.set("next", td["next"]))
    monkeypatch.setitem(vars(model), "forward", None)
    diagnosis = diagnose(td, policy=model)
    assert (diagnosis.forwards, diagnosis.faults) == (0, ())
    assert abs(diagnosis.measures["surprisal/z"]) < 4
    assert diagnosis.measures["mismatch/rms"] < 1e-4
    model, rollout = clean("qwen3", 0)
    scorer = LogProbScorer(model)
    diagnosis = diagnose(rollout.batch(slice(8)), policy=scorer)
    before = scorer.forwards
    assert diagnosis.forwards == 0
    read_columns(rollout.batch(slice(8)), policy=scorer)
    assert scorer.forwards == 2 * before


def test_nested_rows_and_lazy_stacks_have_equal_measures() -> None:
    td, given = seeded.off_by_one("llama", 0)
    nested, lazy = diagnose(td, **given), diagnose(lazy_stack(list(td.exclude("next").unbind(0))), **given)
    assert [each.worst.cause for each in (nested, lazy)] == ["off_by_one"] * 2
    shared = {name for name in nested.measures if not name.startswith(("reward", "groups"))}
    assert {n: lazy.measures[n] for n in shared} == approx({n: nested.measures[n] for n in shared}, rel=1e-5)


def test_prompts_from_the_history() -> None:
    """If the tokenizer has no template that fits the prompt, the messages of the batch are rendered."""
    td, given = seeded.chat_template("qwen2", 3)
    texts = map(make_tokenizer().decode, td["tokens", "prompt"].unbind(0))
    chats = [[user(text.split("user\n")[1].split("<|im_end|>")[0])] for text in texts]
    td["history"] = TensorDict(prompt=History.from_chats(chats), batch_size=td.batch_size)
    bare = make_tokenizer.__wrapped__()
    bare.chat_template = None
    worst = worst_of(td, tokenizer=bare, **given)
    assert (worst.cause, worst.evidence["sampler_s_prompt"]) == ("chat_template", "Zephyr")


def test_a_policy_after_its_step_does_not_name_the_cause() -> None:
    """The trainer's log-probs come from before its steps and show top-p. The current policy cannot show it."""
    model, rollout = clean("llama", 0)
    cut = sample(model, rollout.prompts[::8], 0, top_p=0.9).batch()
    old = sample(model, rollout.prompts[::8], 0, top_p=0.9, raw=True).batch()
    cut["next", "log_probs", "full"] = old["log_probs", "full"]
    assert worst_of(cut, policy=model).cause == "top_p"
    moved = stale_by(10)("llama", 0)[1]["policy"]
    after = diagnose(cut, policy=moved)
    assert after.worst.cause == "other_sampling"
    assert after.measures["drift/mean_abs"] > 0.1


def test_reports_as_text_json_html_and_in_a_terminal() -> None:
    td, given = seeded.retokenised("llama", 0)
    diagnosis = diagnose(td, tokenizer=make_tokenizer(), **given)
    text = str(diagnosis)
    assert text.splitlines()[0].startswith(f"{int(diagnosis.measures['mask/tokens'])} tokens of 96 sequences: 1 fault")
    assert all(part in text for part in ("Pass all of the sampler's token ids", "mismatch:"))
    data = json.loads(json.dumps(diagnosis.to_dict(), allow_nan=False))
    assert data["findings"][0]["cause"] == "retokenised"
    assert data["measures"]["mask/sequences"] == 96
    assert html.unescape(diagnosis._repr_html_()) == f"<pre>{text}</pre>"
    rich = pytest.importorskip("rich.console")
    console = rich.Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(diagnosis)
    assert "token ids" in console.export_text()


@pytest.mark.parametrize("pad_output", [False, True])
def test_the_doctor_in_a_chat_env(pad_output: bool) -> None:
    """Two turns of two conversations. The wrapper's log-probs are the model's at temperature 1."""
    tokenizer = toy_rollouts.make_tokenizer()
    model = toy_rollouts.make_model(tokenizer, seed=0)
    policy = toy_rollouts.make_policy(model, tokenizer, pad_output=pad_output)
    seen: list[Any] = []
    doctor = Doctor(policy=policy, tokenizer=tokenizer, scope="turn", log=seen.append)
    data = toy_rollouts.collect(tokenizer, policy, doctor, turns=2)
    whole = diagnose(data, policy=policy, scope="turn")
    assert [each.measures["mask/sequences"] for each in (*seen, whole)] == [2, 2, 4]
    assert whole.measures["mask/tokens"] == sum(each.measures["mask/tokens"] for each in seen)
    assert whole.measures["mismatch/rms"] < 1e-4
    assert whole.faults == ()


SHIFTED = {"log_probs": log_probs(), "sampler_log_probs": log_probs().roll(1, -1)}


def test_every_third_batch_is_diagnosed_and_an_empty_one_is_not() -> None:
    seen: list[Any] = []
    doctor, td = Doctor(every=3, log=seen.append), batch(log_probs=log_probs(), sampler_log_probs=log_probs())
    for _ in range(7):
        assert doctor(td) is td
    assert (doctor.batches, len(seen)) == (7, 3)
    assert doctor.last is seen[-1]
    doctor = Doctor(policy=make_model("gpt2", 0))
    doctor(td[:0])
    assert doctor.last is None
    assert (list(doctor.parameters()), doctor.state_dict()) == ([], {})  # models are no part of the transform


@pytest.mark.parametrize("invert", [False, True])
def test_the_doctor_in_a_replay_buffer(invert: bool) -> None:
    doctor = Doctor()
    buffer = ReplayBuffer(storage=LazyStackStorage(6), batch_size=6)
    buffer.append_transform(doctor, invert=invert)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DiagnosisWarning)
        buffer.extend(batch(**SHIFTED))
        assert (doctor.last is not None) == invert
        buffer.sample()
    assert doctor.last.worst is not None
    assert doctor.batches == 1


def test_a_warning_comes_once_per_cause_and_a_log_line_each_time(caplog: pytest.LogCaptureFixture) -> None:
    doctor, td = Doctor(), batch(**SHIFTED)
    with pytest.warns(DiagnosisWarning, match=r"shifted against the tokens \(confidence 0.99"):
        doctor(td)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        doctor(td)
    with pytest.raises(RuntimeError, match="Move them by -1"):
        Doctor(on_fault="raise")(td)
    doctor = Doctor(on_fault="log")
    for _ in range(2):
        doctor(td)
    assert sum("shifted" in record.message for record in caplog.records) == 2


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="every must be at least 1"):
        Doctor(every=0)
    with pytest.raises(ValueError, match="on_fault must be one of"):
        Doctor(on_fault="stop")
    with pytest.raises(ValueError, match="temperature must be a finite number"):
        diagnose(batch(), temperature=0.0)
    for data in (batch(), read_columns(batch())):
        with pytest.raises(TypeError, match=r"there is no argument 'temprature'.*temperature"):
            diagnose(data, temprature=0.7)
