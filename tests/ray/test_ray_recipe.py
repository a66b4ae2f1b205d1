"""torchrl's ``RayReplayBuffer`` and ``RayLLMCollector`` with the transforms, and the recipe's loops over them.

``tests/ray/test_ray_places.py`` has a ``RayLLMCollector`` with the Ray variants of all transforms.
"""

import copy
import warnings
from contextlib import ExitStack, closing, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import ray
import torch
from tensordict import TensorDict
from torch.testing import assert_close
from torchrl.collectors.llm import LLMCollector, RayLLMCollector
from torchrl.data import LazyStackStorage, RayReplayBuffer, ReplayBuffer, SamplerWithoutReplacement
from torchrl.objectives.llm import MCAdvantage
from torchrl.trainers.algorithms import GRPOTrainer

from closeness import assert_near
from group_rollouts import GROUP, ROWS, even_share, grpo_advantages, of_response, response, without_graph
from ray_parts import CPUS, plain_env, sampling_policy, scoring_env, scoring_model, task_env, text_policy
from torchrl_llm_kl import Advantage, PolicyLoss, RetrieveKL, RetrieveLogProb
from torchrl_llm_kl.losses import KLToReference
from torchrl_llm_kl.tasks import whole_groups
from toy_models import FORWARD
from toy_rollouts import flat, steps
from waits import until

TURNS = {"dialog_turns_per_batch": ROWS, "total_dialog_turns": 100 * ROWS}


@contextmanager
def ray_buffer(**settings):
    settings = {"storage": partial(LazyStackStorage, 64), "batch_size": ROWS // 2, "remote_config": CPUS, **settings}
    with closing(RayReplayBuffer(**settings)) as buffer:
        yield buffer


@contextmanager
def ray_collector(env, policy=sampling_policy, **settings):
    if "replay_buffer" in settings:
        settings["replay_buffer"] = settings["replay_buffer"].client()  # the buffer itself cannot be sent to an actor
    collector = RayLLMCollector(env, policy_factory=policy, remote_config=CPUS, **{**TURNS, **settings})
    try:
        yield collector
    finally:
        ray.kill(collector._collector)


def retrieve_kl(**settings):
    return RetrieveKL(scoring_model(0), scoring_model(1), **settings)


def by_tokens(data):
    return {str(step["tokens", "full"].tolist()): step for step in steps(data)}


KEYS = [("next", name, "full") for name in ("log_probs", "ref_log_probs", "again")]
KEYS += [("next", "kl_penalty"), ("next", "reward"), "advantage"]


def test_replay_buffer_on_extend_and_on_sample():
    """The buffer's actor writes the entries of a local buffer. A transform without ``invert`` scores each sample."""
    torch.manual_seed(0)
    data = flat(plain_env().rollout(1, sampling_policy()))
    again = RetrieveLogProb(scoring_model(1), log_probs_full_key=("again", "full"))
    local = ReplayBuffer(storage=LazyStackStorage(64), batch_size=ROWS // 2)
    with ray_buffer() as remote:
        for buffer in (local, remote):
            buffer.append_transform(Advantage("grpo", group_size=GROUP), invert=True)
            buffer.append_transform(retrieve_kl(coeff=0.2), invert=True)  # runs first
            buffer.append_transform(again)
            buffer.extend(data.clone())
        expected, found = by_tokens(local[:]), by_tokens(remote[:])
        assert set(found) == set(expected)
        for sample in (found, by_tokens(remote.sample()), by_tokens(remote.sample())):
            for tokens, row in sample.items():
                for key in KEYS:
                    assert torch.count_nonzero(expected[tokens][key])
                    assert_near(row[key], expected[tokens][key], **FORWARD)


@contextmanager
def local_collector(env, **settings):
    collector = LLMCollector(env(), policy_factory=sampling_policy, **TURNS, **settings)
    yield collector
    collector.shutdown()


def local_buffer(sampler):
    return nullcontext(ReplayBuffer(storage=LazyStackStorage(64), sampler=sampler(), batch_size=ROWS // 2))


@pytest.mark.parametrize("where", ["here", pytest.param("in actors", marks=pytest.mark.slow)])
def test_collector_scores_its_own_policy_and_fills_the_buffer(where):
    """``"from_collector"`` before and after new weights: log-probs are those of the weights that sampled."""
    make_buffer, make_collector = (local_buffer, local_collector) if where == "here" else (ray_buffer, ray_collector)
    reference, weights = scoring_model(1).model, copy.deepcopy(scoring_model(0).model)
    with make_buffer(sampler=SamplerWithoutReplacement) as buffer:
        buffer.append_transform(Advantage("grpo", group_size=GROUP), invert=True)
        with make_collector(scoring_env, replay_buffer=buffer, track_policy_version=True) as collector:
            for version in range(2):
                assert collector.next() is None
                batch = buffer[:]
                assert len(batch) == ROWS
                check_scores(batch, weights, reference)
                assert {int(x) for x in batch["next", "policy_version"].flatten()} == {version}
                rewards = [float(even_share(step)) for step in steps(batch)]
                found = torch.tensor([float(step["advantage"]) for step in steps(batch)])
                assert_close(found, torch.tensor(grpo_advantages(rewards)), atol=1e-4, rtol=0)
                with torch.no_grad():
                    for parameter in weights.parameters():
                        parameter.mul_(1.1)
                push(collector, weights)  # which also counts the version
                buffer.empty(empty_write_count=False)


def check_scores(batch, policy, reference):
    for key, model in ((("next", "log_probs", "full"), policy), (("next", "ref_log_probs", "full"), reference)):
        for step, want in zip(steps(batch), without_graph(model, batch), strict=True):
            assert_close(of_response(step, step[key]).float(), want.float(), atol=1e-5, rtol=0)


def push(collector, model):
    """Pushes weights to the collector's policy. ``TransformersWrapper`` keeps its model under ``"model"``."""
    collector.update_policy_weights_(TensorDict(model=TensorDict.from_module(model).detach().clone()))


@pytest.mark.slow
def test_a_task_in_a_collectors_actor():
    """An env of ``make_env``: prompts in their order, rewards of functions, log-probs of the collector's own policy."""
    with ray_collector(task_env, text_policy, total_dialog_turns=3 * ROWS) as collector:
        batches = [batch.reshape(-1) for batch in iter(collector.next, None)]
        assert next(iter(collector)) is None  # torchrl's loop goes on after the last batch
    numbers = [int(row["metadata"]["number"]) for batch in batches for row in steps(batch)]
    assert numbers == [number for number in (0, 1, 2, 3, 0, 1) for _ in range(GROUP)]
    for batch in batches:
        check_scores(batch, scoring_model(0).model, scoring_model(1).model)
        for row in steps(batch):
            answer = row["text", "response"].removesuffix("<|im_end|>")
            assert row["next", "reward"].item() == 0.5 * len(answer) + row["metadata"]["number"]
            assert row["next", "reward_failures"].item() == 0
    with ray_collector(partial(task_env, 2), text_policy, total_dialog_turns=4 * ROWS) as collector:
        groups = list(whole_groups(iter(collector.next, None), GROUP))  # of two turns each
    assert [int(group["group"][0]) for group in groups] == [0, 1, 2, 3]
    for group in groups:
        assert group["step"].flatten().tolist() == [0, 1] * GROUP
        assert group["next", "done"].flatten().tolist() == [False, True] * GROUP
        check_scores(group, scoring_model(0).model, scoring_model(1).model)


@pytest.mark.slow
def test_asynchronous_loop():
    """Two collectors fill a buffer, which waits for whole groups. A learner takes samples and sometimes pushes weights."""
    model = copy.deepcopy(scoring_model(0).model)
    loss = PolicyLoss(model, "ppo", terms=[KLToReference(1e-3)])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with ExitStack() as open_until_the_end:
        begin = open_until_the_end.enter_context
        buffer = begin(ray_buffer(transform_factory=partial(MCAdvantage, grpo_size=GROUP)))
        buffer.insert_transform(0, retrieve_kl(add_to_reward=False), invert=True)  # of whole groups
        settings = {"replay_buffer": buffer, "track_policy_version": True, "dialog_turns_per_batch": 1}
        collectors = [begin(ray_collector(partial(plain_env, 1), **settings)) for _ in range(2)]
        for collector in collectors:
            collector.start()
        until(lambda: buffer.write_count >= 2 * GROUP, seconds=300.0)
        shares = []
        for step in range(1, 41):
            batch = buffer.sample(ROWS)
            assert_close(batch["advantage"].isfinite().all(), torch.tensor(True))
            out = loss(batch)
            out.mean(reduce=True).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            shares.append(float(torch.stack([even_share(row) for row in steps(batch)]).mean()))
            if step % 5 == 0:
                for collector in collectors:
                    push(collector, model)
                writes = buffer.write_count + GROUP
                until(lambda writes=writes: buffer.write_count >= writes, seconds=300.0)
        assert all(collector.is_running() for collector in collectors)
        assert int(buffer[:]["next", "policy_version"].max()) > 1
    assert sum(shares[-8:]) > sum(shares[:8]), shares


@pytest.mark.slow
def test_grpo_trainer_over_ray():
    """``GRPOTrainer`` with torchrl's Ray parts: the collector fills the buffer, the weights follow each batch."""
    model, before, seen = copy.deepcopy(scoring_model(0).model), [], []
    with ray_buffer(sampler=SamplerWithoutReplacement) as buffer:
        buffer.append_transform(Advantage("grpo", group_size=GROUP), invert=True)
        with ray_collector(scoring_env, replay_buffer=buffer, total_dialog_turns=3 * ROWS) as collector:
            sender = SimpleNamespace(update_weights=lambda: push(collector, model))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                trainer = GRPOTrainer(
                    collector=collector,
                    total_frames=3 * ROWS,
                    loss_module=PolicyLoss(model, "ppo", terms=[KLToReference(0.1)]),
                    optimizer=torch.optim.SGD(model.parameters(), lr=1e-2),
                    replay_buffer=buffer,
                    weight_sync_sender=sender,
                    empty_replay_buffer_on_weight_update=True,
                    progress_bar=False,
                )
            trainer.register_op("pre_epoch", lambda batch: (before.append(copy.deepcopy(model)), batch)[1])
            note = lambda batch: (seen.append((before[-1], batch.clone())), batch)[1]  # noqa: E731
            trainer.register_op("process_optim_batch", note)
            trainer.train()
    assert len(seen) == 3 * 2
    for policy, batch in seen:
        check_scores(batch, policy, scoring_model(1).model)
        assert all(len(response(row)) for row in steps(batch))
