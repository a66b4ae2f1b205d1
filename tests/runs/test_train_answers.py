"""Batches that are sampled ahead of the training, and by a server: their weights, versions and log-probs."""

import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tensordict
import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torch.testing import assert_close

pytest.importorskip("omegaconf")
from fake_vllm import FakeVllm
from torchrl_llm_kl import LogProbScorer, Ragged, Sampling
from torchrl_llm_kl.rollouts import drop_stale
from torchrl_llm_kl.training import ConfigError, Run, chat_tokenizer, load_model, train
from torchrl_llm_kl.training._answers import Answers, age_figures
from torchrl_llm_kl.training._engine import (
    Engine,
    EngineError,
    EngineSampler,
    Generated,
    StartedEngine,
    save_merged,
)
from torchrl_llm_kl.training._models import load_policy
from torchrl_llm_kl.training._ranks import Ranks
from train_lab import build_lab, figures, go, settings, weights

SERVER = "sampler.engine=http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_lab(tmp_path_factory.mktemp("answers"))


@pytest.fixture(autouse=True)
def stacked() -> Any:
    with tensordict.set_list_to_stack(True):
        yield


# ------------------------------------------------------------------ the thread


class Counted:
    """Weights that are only a version."""

    def __init__(self) -> None:
        self.installed = 0

    def take(self, version: int) -> int:
        return version

    def install(self, taken: object | None, version: int) -> int:
        if taken is not None:
            assert taken == version
            self.installed = version
        return version

    def close(self) -> None:
        """Nothing waits."""


@pytest.mark.smoke
@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
def test_no_batch_is_older_than_the_limit(ahead: int) -> None:
    """A sampler that is always faster than the training: each batch has exactly the largest age, after the first ones."""
    own, begun, lock = Counted(), list[int](), threading.Lock()

    def sample() -> TensorDictBase:
        with lock:
            begun.append(own.installed)
        return TensorDict(number=torch.full((2, 1), len(begun) - 1), batch_size=[2])

    answers = Answers(sample, weights=own, ahead=ahead)
    versions, most = [], 0
    for step in range(8):
        batch = answers.take()
        assert batch["number"].flatten().tolist() == [step] * 2
        versions.append(int(batch["policy_version"][0]))
        assert begun[step] == versions[-1]
        # All batches that may begin have begun, and no other one.
        for _ in range(1000):
            if len(begun) > step + ahead:
                break
            threading.Event().wait(0.01)
        assert len(begun) == step + ahead + 1
        answers.updated()
        most = max(most, step - versions[-1])
    answers.close()
    assert most == ahead
    assert versions == [max(0, step - ahead) for step in range(8)]


@pytest.mark.smoke
def test_a_slow_sampler_gets_the_newest_weights() -> None:
    """The third batch begins after two updates, so its age is 0 although 2 is allowed."""
    own, gate, begun = Counted(), threading.Semaphore(0), threading.Semaphore(0)

    def sample() -> TensorDictBase:
        begun.release()
        gate.acquire()
        return TensorDict(version=torch.tensor([[own.installed]]), batch_size=[1])

    answers = Answers(sample, weights=own, ahead=2)
    gate.release()
    assert int(answers.take()["version"]) == 0
    for _ in range(2):
        begun.acquire()  # the second batch has begun, with the first weights
    answers.updated()
    answers.updated()
    gate.release(2)
    second, third = answers.take(), answers.take()
    assert (int(second["policy_version"]), int(third["policy_version"])) == (0, 2)
    assert int(third["version"]) == 2
    gate.release(10)
    answers.close()


@pytest.mark.smoke
def test_an_error_of_the_sampler_reaches_the_training() -> None:
    answers = Answers(lambda: 1 / 0, weights=Counted(), ahead=1)  # type: ignore[arg-type, return-value]
    with pytest.raises(ZeroDivisionError):
        answers.take()
    answers.close()


@pytest.mark.smoke
def test_old_rows_are_left_out() -> None:
    batch = TensorDict(policy_version=torch.tensor([[7], [4], [5]]), batch_size=[3])
    dropped = drop_stale(batch, 7, max_age=2)
    assert age_figures(dropped, 2) == {"age": pytest.approx(5 / 3), "age_max": 3, "too_old": 1}
    assert dropped["loss_mask"].flatten().tolist() == [True, False, True]
    assert dropped["left_out"].tolist() == [False, True, False]
    assert list(batch.keys()) == ["policy_version"]
    fresh = drop_stale(TensorDict(policy_version=torch.tensor([[7]]), batch_size=[1]), 7, max_age=0)
    assert age_figures(fresh, 0) == {"age": 0.0, "age_max": 0, "too_old": 0}
    assert "loss_mask" not in list(fresh.keys())
    assert age_figures(TensorDict(batch_size=[1]), 0) == {}


# ------------------------------------------------------------------ runs ahead


def log_probs(model: nn.Module, batch: TensorDictBase) -> torch.Tensor:
    """The model's log-probs of the answers' tokens, ``[N]``."""
    mask = batch["masks", "all_attention_mask"]
    rows = Ragged.from_list([ids[own] for ids, own in zip(batch["tokens", "full"], mask, strict=True)])
    return LogProbScorer(model).score(rows).values[answered(batch)[mask]]


def answered(batch: TensorDictBase) -> torch.Tensor:
    mask = batch["masks", "all_attention_mask"].clone()
    mask[:, : batch["tokens", "prompt"].shape[-1]] = False
    return mask


def prepared(run: Run) -> tuple[dict[str, float], TensorDictBase]:
    """The figures of a step, and its prepared batch."""
    kept: list[TensorDictBase] = []
    prepare = run.parts.prepare
    object.__setattr__(run.parts, "prepare", lambda batch: kept.append(prepare(batch)) or kept[0])
    row = run.take_step()
    object.__setattr__(run.parts, "prepare", prepare)
    return row, kept[0]


@pytest.mark.parametrize("adapters", [False, True])
def test_rows_have_the_log_probs_and_the_version_of_the_weights_that_sampled(
    lab: Path, tmp_path: Path, adapters: bool
) -> None:
    changes = ["lora.r=4"] if adapters else []
    run = Run(settings(lab, tmp_path, "algorithm.max_staleness=2", *changes), say=lambda line: None)
    versions = {0: load_policy(run.config)}
    versions[0].load_state_dict(run.policy.state_dict())
    seen = set()
    for step in range(4):
        row, batch = prepared(run)
        versions[step + 1] = load_policy(run.config)
        versions[step + 1].load_state_dict(run.policy.state_dict())
        version = int(batch["policy_version"][0])
        seen.add(step - version)
        assert row["age_max"] == step - version <= 2
        theirs = batch["next", "sampler_log_probs", "full"][answered(batch)]
        assert_close(theirs, log_probs(versions[version], batch), atol=2e-5, rtol=0)
        own = batch["next", "log_probs", "full"][answered(batch)]
        assert_close(own, log_probs(versions[step], batch), atol=2e-5, rtol=0)
        kl = (theirs - log_probs(versions[0], batch)).sum().item() / len(batch)
        assert row["kl"] == pytest.approx(kl, abs=1e-4), "of the weights that sampled"
        if version != step:
            assert (own - theirs).abs().max() > 1e-3
    run.close()
    assert seen & {1, 2}


def test_old_log_probs_of_the_weights_that_sampled(lab: Path, tmp_path: Path) -> None:
    """Beside the same numbers as the sampler's, since both compute them in this process."""
    once = ["algorithm.epochs=1", "algorithm.minibatches=1"]  # later updates on a batch also move the policy
    changes = ["algorithm.max_staleness=2", "algorithm.exact_old=true", *once]
    run = Run(settings(lab, tmp_path, *changes), say=lambda line: None)
    ages = []
    for _ in range(4):
        row, batch = prepared(run)
        ages.append(row["age_max"])
        own, theirs = (batch["next", f"{name}_log_probs", "full"][answered(batch)] for name in ("behavior", "sampler"))
        assert_close(own, theirs, atol=2e-5, rtol=0)
        assert abs(row["mismatch_k3"]) < 1e-6
        assert (row["staleness_k3"] > 1e-6) == (ages[-1] > 0)
        assert row["weight_max"] == pytest.approx(1, abs=1e-3), "no numerical mismatch to correct"
    run.close()
    assert max(ages) > 0
    assert run.parts.loss.tensor_keys.old_log_prob == ("next", "behavior_log_probs", "full")


def test_rows_that_are_too_old_need_no_held_weights(lab: Path, tmp_path: Path) -> None:
    """They are left out of the loss, so their log-probs do not matter."""
    changes = ["algorithm.max_staleness=1", "algorithm.exact_old=true"]
    run = Run(settings(lab, tmp_path, *changes), say=lambda line: None)
    for _ in range(3):
        run.take_step()
    take = run.answers.take

    def late() -> TensorDictBase:
        batch = take()
        batch["policy_version"] = torch.where(torch.arange(len(batch)).reshape(-1, 1) < 4, 0, batch["policy_version"])
        return batch

    run.answers.take = late  # type: ignore[method-assign]
    assert run.take_step()["too_old"] == 4
    run.close()


@pytest.mark.parametrize(
    "changes",
    [["algorithm.exact_old=true"], ["algorithm.exact_old=true", "algorithm.max_staleness=1", "algorithm.name=opmd"]],
)
def test_exact_old_log_probs_without_an_effect_are_refused(lab: Path, tmp_path: Path, changes: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.exact_old needs algorithm\.max_staleness above 0"):
        Run(settings(lab, tmp_path, *changes), say=lambda line: None)


def test_a_run_ahead_ends_resumes_and_uses_each_prompt_once(lab: Path, tmp_path: Path) -> None:
    result, _ = go(lab, tmp_path, "algorithm.max_staleness=1", "evaluation.every=0", "run.steps=3")
    again, said = go(lab, tmp_path, "algorithm.max_staleness=1", "evaluation.every=0", "run.steps=5")
    assert (result.outcome, again.outcome, again.step) == ("finished", "finished", 5)
    assert "resuming after step 3 of 5" in said[0]
    assert [row["step"] for row in again.rows] == [0, 1, 2, 3, 4]
    assert all(row["age_max"] <= 1 and row["wait_seconds"] >= 0 for row in again.rows)
    assert max(row["age"] for row in again.rows) == 1
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("answers")]


@pytest.mark.parametrize(
    ("changes", "high"), [([], 2.0), (["sampler.max_weight=1.5"], 1.5), (["sampler.max_weight=null"], None)]
)
def test_the_weight_of_a_token_is_bounded(lab: Path, tmp_path: Path, changes: list[str], high: float | None) -> None:
    run = Run(settings(lab, tmp_path, "algorithm.max_staleness=1", *changes), say=lambda line: None)
    corrections = run.parts.loss.get_submodule("corrections")
    assert [float(each.hyper["high"]) for each in corrections] == ([] if high is None else [high])
    run.close()


def test_without_staleness_nothing_changes(lab: Path, tmp_path: Path) -> None:
    short = ["run.steps=2", "evaluation.every=0", "optimizer.warmup_steps=0"]
    one, two = (
        go(lab, tmp_path / name, *changes)[0]
        for name, changes in (("a", short), ("b", [*short, "algorithm.max_staleness=0"]))
    )
    assert figures(one.folder / "metrics.jsonl") == figures(two.folder / "metrics.jsonl")
    assert not any("age" in row or "sampler_gap" in row for row in one.rows)


# ------------------------------------------------------------------ a server


@pytest.fixture
def server(lab: Path, monkeypatch: pytest.MonkeyPatch) -> FakeVllm:
    found = FakeVllm(lab / "model")
    monkeypatch.setattr(urllib.request, "urlopen", found)
    return found


@pytest.mark.parametrize("changes", [[], ["lora.r=4", "optimizer.lr=0.03"]], ids=["whole", "adapters"])
def test_a_server_gets_the_weights_after_each_step(
    lab: Path, tmp_path: Path, server: FakeVllm, changes: list[str]
) -> None:
    result, said = go(lab, tmp_path, SERVER, *changes)
    assert [line for line in said if "warning" in line] == []
    assert all(row["sampler_gap"] < 1e-5 and row["age_max"] == 0 for row in result.rows)
    assert server.paths.count("/collective_rpc") == 5, "before the first step, and after each"
    final, start = weights(tmp_path / "final"), weights(lab / "model")
    moved = 0.0
    for name, values in server._model.state_dict().items():
        if name in final:
            assert_close(values, final[name], atol=1e-6, rtol=0)
            moved = max(moved, (values - start[name]).abs().max().item())
    assert moved > 1e-3
    assert all("weight_mean" in " ".join(row) for row in result.rows), "the mismatch is corrected"


def test_a_server_with_old_weights_is_named(lab: Path, tmp_path: Path, server: FakeVllm, monkeypatch: Any) -> None:
    monkeypatch.setattr(server, "_rpc", lambda **_: {"results": [None]})
    result, said = go(lab, tmp_path, SERVER, "optimizer.lr=0.03", "optimizer.warmup_steps=0", kl={"place": "none"})
    warned = [line for line in said if "warning: the sampler's log-probs are" in line]
    assert warned
    assert result.rows[0]["sampler_gap"] < 1e-5
    assert result.rows[-1]["sampler_gap"] > 0.05


def test_a_server_and_turns_and_a_sampler_ahead(lab: Path, tmp_path: Path, server: FakeVllm) -> None:
    (tmp_path / "mine.py").write_text(
        "def again(messages, metadata):\n    return 'Sure?' if len(messages) < 4 else None\n"
    )
    turns = ["turns.max=3", f"turns.reply={tmp_path / 'mine.py'}:again", "algorithm.max_staleness=1"]
    result, _ = go(lab, tmp_path / "out", SERVER, *turns)
    assert result.outcome == "finished"
    assert all(row["turns"] == 2 for row in result.rows)
    assert result.rows[0]["sampler_gap"] < 1e-5


def test_log_probs_of_another_distribution_are_named_at_the_first_step(
    lab: Path, tmp_path: Path, server: FakeVllm
) -> None:
    """The stand-in returns log-probs of temperature 1, as vLLM does by default."""
    result, said = go(lab, tmp_path, SERVER, "sampler.temperature=0.5", "evaluation.every=0")
    assert len([line for line in said if "warning: the sampler's log-probs are" in line]) == 1
    assert result.rows[0]["sampler_gap"] > 0.2


def test_evaluations_of_a_run_ahead_do_not_ask_the_server(lab: Path, tmp_path: Path, server: FakeVllm) -> None:
    """It may have older weights, or get new ones in the middle."""
    run = Run(settings(lab, tmp_path, SERVER, "algorithm.max_staleness=1", "evaluation.greedy=false"), say=print)
    before = len(server.paths)
    run.evaluate()
    assert len(server.paths) == before
    run.close()


def test_a_server_that_does_not_answer_moves_no_files(lab: Path, tmp_path: Path) -> None:
    go(lab, tmp_path, "run.steps=1", "optimizer.warmup_steps=0", "evaluation.every=0")
    with pytest.raises(EngineError, match="does not answer"):
        go(lab, tmp_path, "sampler.engine=http://127.0.0.1:9", fresh=True)
    with pytest.raises(ConfigError, match=r"sampler\.command names no-such-program"):
        go(lab, tmp_path, "sampler.engine=vllm", "sampler.command='no-such-program {model}'", fresh=True)
    assert not (tmp_path / "earlier-1").exists()


@pytest.mark.smoke
def test_kept_ids_of_ranks_are_a_list_of_their_own_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their number may equal the number of tokens."""
    shares = []
    for width, kept in ((3, [4, 5, 6]), (5, [7, 8, 9, 1])):
        full = torch.arange(1, width + 1).unsqueeze(0)
        share = TensorDict({("tokens", "full"): full, ("tokens", "prompt"): full[:, : width - 2]}, batch_size=[1])
        share["kept", "ids"] = torch.tensor([kept])
        shares.append(share)
    monkeypatch.setattr(Ranks, "gather", lambda self, own: [share.clone() for share in shares])
    rows = Ranks().gather_rows(shares[0])
    assert rows["kept", "ids"].tolist() == [[4, 5, 6, 0], [7, 8, 9, 1]]
    assert rows["tokens", "full"].tolist() == [[0, 0, 1, 2, 3], [1, 2, 3, 4, 5]]
    assert rows["tokens", "prompt"].tolist() == [[0, 0, 1], [1, 2, 3]]


def test_seeds_of_the_server_are_those_of_the_answers(lab: Path, tmp_path: Path, server: FakeVllm) -> None:
    """Each answer has a seed of its own, which a repeated run has again. The other settings are those of the run."""
    asked: list[int] = []
    drawn = {"temperature": 0.7, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "max_tokens": 6, "n": 1}
    plain = server._generate

    def generate(token_ids: list[int], sampling_params: dict[str, Any]) -> dict[str, Any]:
        asked.append(sampling_params["seed"])
        assert drawn.items() <= sampling_params.items()
        return plain(token_ids, sampling_params)

    server._generate = generate  # type: ignore[method-assign]
    for name in ("a", "b"):
        changes = [f"sampler.{key}={drawn[key]}" for key in ("temperature", "top_k", "top_p", "min_p")]
        go(lab, tmp_path / name, SERVER, *changes, "run.steps=2", "optimizer.warmup_steps=0", "evaluation.every=0")
    assert len(asked) == 32
    assert sorted(asked[:16]) == sorted(asked[16:])
    assert len(set(asked)) == 16


def test_several_servers_share_the_prompts_and_get_the_weights(
    lab: Path, tmp_path: Path, server: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers to a prompt come from one server."""
    asked: list[tuple[str, str, Any]] = []
    post = Engine.post

    def record(self: Engine, url: str, path: str, **body: Any) -> Any:
        asked.append((url, path, body.get("token_ids")))
        return post(self, "http://127.0.0.1:8000", path, **body)

    monkeypatch.setattr(Engine, "post", record)
    servers = ["http://one:1", "http://two:2"]
    addresses = f"sampler.engine={' '.join(servers)}"
    go(lab, tmp_path, addresses, "run.steps=2", "optimizer.warmup_steps=0", "evaluation.every=0")
    for url in servers:
        paths = [path for where, path, _ in asked if where == url]
        assert paths.count("/collective_rpc") == 3
        assert paths.count("/inference/v1/generate") == 8
    homes = {tuple(ids): {url for url, _, own in asked if own == ids} for _, _, ids in asked if ids is not None}
    assert all(len(urls) == 1 for urls in homes.values())


@pytest.mark.smoke
def test_records_of_a_server_are_placed_at_their_tokens(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts of different lengths and answers of one and two tokens: kept ids and experts by hand."""
    tokenizer = chat_tokenizer(str(lab / "model"))
    prompts = [len(tokenizer(text).input_ids) for text in ("ab", "abcd")]
    made = iter(
        Generated(torch.tensor(ids), torch.zeros(len(ids)), kept, torch.arange((n + len(ids) - 1) * 2).view(-1, 1, 2))
        for n, ids, kept in zip(prompts, ([5], [6, 7]), ([[5, 9]], [[6], [7, 8, 9]]), strict=True)
    )
    engine = Engine("http://127.0.0.1:8000")
    monkeypatch.setattr(engine, "generate", lambda prompt, settings, group: next(made))
    sampler = EngineSampler(engine, tokenizer, max_new_tokens=2, sampling=Sampling(top_k=3))
    sampler._threads = ThreadPoolExecutor(1)
    step = TensorDict({("text", "prompt"): ["ab", "abcd"], "group": torch.tensor([[0], [1]])}, batch_size=[2])
    out = sampler(step)
    assert out["kept", "counts"].tolist() == [[0, 0, 0, 0, 2, 0], [0, 0, 0, 0, 1, 3]]
    assert out["kept", "ids"].tolist() == [[5, 9, 0, 0], [6, 7, 8, 9]]
    first, second = out["routed_experts"][:, :, 0].tolist()
    assert first == [[0, 0], [0, 0], [0, 1], [2, 3], [2, 3], [0, 0]]
    assert second == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [8, 9]]


@pytest.mark.smoke
def test_errors_of_a_server(lab: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"did not answer: .*Is the server running"):
        Engine("http://127.0.0.1:9").post("http://127.0.0.1:9", "/health")
    with pytest.raises(ConfigError, match=r"sampler\.engine is vlm: expected transformers, vllm, or the address"):
        settings(lab, tmp_path, "sampler.engine=vlm")
    with pytest.raises(ConfigError, match=r"sampler\.command is no-such-program \{model\}: .*Install vLLM"):
        StartedEngine("no-such-program {model}", tmp_path, tmp_path / "log")
    with pytest.raises(EngineError, match=r"(?s)the server did not start.*bad option"):
        StartedEngine("""python -c "raise SystemExit('bad option')" """, tmp_path, tmp_path / "log")


@pytest.mark.smoke
def test_merged_adapters_give_the_same_log_probs(lab: Path, tmp_path: Path) -> None:
    """The trained model keeps its weights to the last bit."""
    policy = load_policy(settings(lab, tmp_path, "lora.r=4"))
    with torch.no_grad():
        for name, values in policy.named_parameters():
            if "lora_B" in name:
                values.normal_(std=0.05, generator=torch.Generator().manual_seed(1))
    before = {name: values.clone() for name, values in policy.state_dict().items()}
    save_merged(policy, chat_tokenizer(str(lab / "model")), tmp_path / "merged")
    assert all(torch.equal(values, before[name]) for name, values in policy.state_dict().items())
    merged, rows = load_model(str(tmp_path / "merged"), device="cpu"), [torch.arange(1, 20), torch.arange(30, 40)]
    ours, plain = (LogProbScorer(model).score(rows).values for model in (policy, merged))
    assert_close(plain, ours, atol=2e-5, rtol=0)
    start = LogProbScorer(load_model(str(lab / "model"), device="cpu")).score(rows).values
    assert (plain - start).abs().max() > 1e-3


def test_greedy_evaluations_of_a_run_ahead_use_the_trained_weights(lab: Path, tmp_path: Path, server: FakeVllm) -> None:
    result = train(settings(lab, tmp_path, SERVER, "algorithm.max_staleness=1"), say=lambda line: None)
    assert [row["step"] for row in result.evaluations] == [0, 2, 4]
