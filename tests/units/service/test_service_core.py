"""The engine of a replica: pushed weights, and requests that fail."""

from __future__ import annotations

import contextlib
import re
import warnings
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torch.testing import assert_close

from byte_texts import small_tokenizer
from closeness import assert_near, needs_equal_rows
from load import job_of
from remote_models import model
from torchrl_llm_kl import LogProbScorer, Ragged, Sampling
from torchrl_llm_kl.scoring import ByteTeacher, ScoreOptions, ScoreRequest, fingerprint_of
from torchrl_llm_kl.service import EngineLost, GangEngine
from torchrl_llm_kl.service._core import ScoringCore
from torchrl_llm_kl.service._messages import Job, state_dict_of
from torchrl_llm_kl.service.engines._engine import TransformersEngine, engine_of
from torchrl_llm_kl.service.engines._gang import split
from toy_models import tiny_model

NAME = "lm_head.weight"


def test_weights_in_every_form():
    inner, wrapper, core = model(seed=3), nn.Module(), ScoringCore(TransformersEngine(model()))
    wrapper.model, wrapper.input_mode = inner, "tokens"
    expected = inner.state_dict()
    forms = [inner, wrapper, TensorDict.from_module(wrapper), wrapper.state_dict(), expected]
    for version, weights in enumerate(forms, start=1):
        core.update_weights({name: torch.zeros_like(value) for name, value in expected.items()}, version)
        core.update_weights(core.engine.own_weights(state_dict_of(weights)), version)
        found = core.engine.model.state_dict()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    with pytest.raises(TypeError, match="weights must be a module, a TensorDict or a mapping"):
        state_dict_of([1])


def test_a_teacher_with_another_tokenizer():
    """Requests hold the student's tokens. Two requests share a call, and pushed weights are the teacher's."""
    inner, tokenizers = (
        tiny_model(vocab_size=10),
        (small_tokenizer("a", "b", "ab", "ba"), small_tokenizer("a", "b", "aa")),
    )
    teacher = ByteTeacher(inner, *tokenizers)
    core, rows = ScoringCore(engine_of(teacher, tokens_per_batch=64)), [[0, 1, 0, 2], [1, 0, 0]]
    for _ in range(2):
        want = teacher.make_scorer().evaluate(rows, top_k=2)
        jobs = [Job(ScoreRequest.of([row]), ScoreOptions(top_k=2), None, "c") for row in rows]
        columns = [each["columns"] for each in core.score(jobs)]
        for name in ("log_prob", "top_log_probs", "tail_log_prob"):
            got = torch.cat([torch.tensor(each[name]) for each in columns])
            assert_near(got, want.per_token[name].values[[1, 2, 3, 5, 6]], terms=64, size=10.0)
        core.update_weights(core.engine.own_weights(tiny_model(vocab_size=10, seed=5).state_dict()), 1)
    (refused,) = core.score([Job(ScoreRequest.of(rows), ScoreOptions(entropy=True), None, "c")])
    assert "is not supported by a teacher with another tokenizer" in str(refused)
    with pytest.raises(ValueError, match="keep_versions= is for models"):
        engine_of(teacher, keep_versions=2)


def test_requests_that_name_a_version_for_each_token():
    """Pushes of some weights, and a request that joins others in one batch."""
    core, rows = ScoringCore(TransformersEngine(model(), keep_versions=2)), [[3, 4, 5, 6], [7, 8]]
    head = model(seed=1).lm_head.weight
    start = ScoreRequest.of(rows, versions=torch.zeros(6, dtype=torch.long))
    (first,) = core.score([Job(start, ScoreOptions(), None, "c")])
    assert_near(torch.tensor(first["columns"]["log_prob"]), LogProbScorer(model()).score(rows).values[[1, 2, 3, 5]])
    core.update_weights({NAME: head}, 3)
    core.update_weights(core.engine.own_weights(state_dict_of(model(seed=2))), 4)
    versions = torch.tensor([4, 3, 4, -1, 3, 3])
    third = model()
    with torch.no_grad():
        third.lm_head.weight.copy_(head)
    scores = {v: LogProbScorer(m).score(rows).values for v, m in ((3, third), (4, model(seed=2)), (-1, model(seed=2)))}
    want = torch.stack([scores[v][i] for i, v in enumerate(versions.tolist())])
    request = ScoreRequest.of(rows, versions=versions)
    jobs = [Job(each, ScoreOptions(), None, "c") for each in (request, ScoreRequest.of(rows), request)]
    replies = core.score(jobs)
    for reply, expected in zip(replies, (want, scores[4], want), strict=True):
        assert_near(torch.tensor(reply["columns"]["log_prob"]), expected[[1, 2, 3, 5]])
    of_first = ScoreRequest.of(rows, versions=torch.tensor([0, 4]))
    lost = core.score([Job(of_first, ScoreOptions(), None, "c")])[0]
    assert "version 0 of the weights is not held, only [3, 4]" in str(lost)
    (refused,) = ScoringCore(TransformersEngine(model())).score(jobs[:1])
    assert "versions=... is not supported by this scorer" in str(refused)


def test_weights_that_do_not_fit_change_nothing():
    engine = TransformersEngine(model())
    before = {name: value.clone() for name, value in engine.model.state_dict().items()}
    good = {name: value + 1 for name, value in before.items()}
    for message, bad in {
        "holds values that are not finite": {NAME: good[NAME].clone().fill_(torch.inf)},
        "the model has shape": {NAME: torch.zeros(2)},
        "no weight 'nowhere'": {"nowhere": torch.zeros(1)},
    }.items():
        with pytest.raises((ValueError, KeyError), match=message):
            engine.update_weights({**good, **bad})
    assert all(torch.equal(engine.model.state_dict()[key], value) for key, value in before.items())


def test_one_tensor_with_two_values_is_refused():
    """The weights of an untied policy do not fit a model with tied embeddings. The name that comes last would win."""
    tied, policy = tiny_model(tie_word_embeddings=True).double(), model(1).state_dict()
    engine = TransformersEngine(tied)
    with pytest.raises(ValueError, match=r"embed_tokens.weight and lm_head.weight are one tensor of the model"):
        engine.update_weights(policy)
    engine.update_weights({**policy, NAME: policy["model.embed_tokens.weight"].clone()})
    assert torch.equal(tied.lm_head.weight, policy["model.embed_tokens.weight"])


def test_weights_that_are_copied_in_part_end_the_engine():
    """Scores of a mixture of two versions would be wrong under either one."""
    engine, copies = TransformersEngine(model()), []
    weights = {name: value.clone() for name, value in model(1).state_dict().items()}

    class Full:
        def copy_(self, value):
            raise RuntimeError("no room")

    first, second, *_ = weights
    for bad, error in ((first, RuntimeError), (second, EngineLost)):
        own = {**engine.model.state_dict(keep_vars=True), bad: Full()}
        engine._module = lambda own=own: SimpleNamespace(state_dict=lambda keep_vars: own)
        with pytest.raises(error, match="no room") as caught:
            engine.update_weights(weights, checked=True)
        copies.append(type(caught.value))
    assert copies == [RuntimeError, EngineLost]


@pytest.mark.parametrize(
    ("dtype", "largest"),
    [(torch.float32, 1e300), (torch.float16, 1e5), (torch.float16, -7e4), (torch.bfloat16, 3.4e38)],
    ids=str,
)
def test_numbers_of_another_kind_and_those_that_overflow_in_the_cast_are_refused(dtype, largest):
    engine = TransformersEngine(model().to(dtype))
    before = engine.model.state_dict()[NAME].clone()
    real, beyond = torch.ones(before.shape), before.double()
    beyond[3, 2] = largest
    bad = {f"the model has {dtype}, got {kind}": real.to(kind) for kind in (torch.int8, torch.bool, torch.complex64)}
    bad[f"not finite, or beyond the range of the model's {dtype}"] = beyond
    for message, weight in bad.items():
        with pytest.raises(ValueError, match=message):
            engine.update_weights({NAME: weight})
    assert torch.equal(engine.model.state_dict()[NAME], before)
    beyond[3, 2] = torch.finfo(dtype).max
    engine.update_weights({NAME: beyond})
    for good in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        engine.update_weights({NAME: 2 * real.to(good)})
        assert torch.equal(engine.model.state_dict()[NAME], torch.full_like(before, 2))


def test_whole_numbers_keep_their_values():
    made = model()
    made.register_buffer("count", torch.tensor([1, 2], dtype=torch.int8))
    engine = TransformersEngine(made)
    engine.update_weights({"count": torch.tensor([3, -128])})
    assert made.count.tolist() == [3, -128]
    with pytest.raises(ValueError, match=r"count holds values .* beyond the range of the model's torch.int8"):
        engine.update_weights({"count": torch.tensor([3, 128])})
    with pytest.raises(ValueError, match=r"the model has torch.int8, got torch.float32"):
        engine.update_weights({"count": torch.tensor([3.0, 1.0])})


def test_peft_names_of_adapters():
    """Names as ``save_pretrained`` writes them, without the adapter's name, also of DoRA and of trained modules."""
    peft, adapter = pytest.importorskip("peft"), "ref"
    kinds = {"r": 4, "init_lora_weights": False, "use_dora": True}
    where = {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head"]}

    def made(seed):
        torch.manual_seed(seed)
        return peft.get_peft_model(model(), peft.LoraConfig(**kinds, **where), adapter_name=adapter)

    engine, other = TransformersEngine(made(0)), made(1)
    short = peft.get_peft_model_state_dict(other, adapter_name=adapter, save_embedding_layers=False)
    assert not any(adapter in name for name in short)
    engine.update_weights(short)
    expected = {name: value for name, value in other.state_dict().items() if adapter in name}
    found = engine.model.state_dict()
    assert len(expected) == len(short) > 6
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    norm = "base_model.model.model.norm.weight"
    engine.update_weights({**short, norm: found[norm]})
    with pytest.raises(KeyError, match=r"no weight 'lora_A.weight'"):
        engine.update_weights({"lora_A.weight": torch.zeros(1)})


def request(*tokens, **given):
    return job_of([tokens], **given)


def scores(engine, rows, **options):
    """Log-probs of an engine."""
    return engine.run(ScoreRequest.of(rows), ScoreOptions().but(**options)).log_prob.values


def test_a_request_that_fails_does_not_fail_its_batch():
    made = model()
    made.get_input_embeddings().weight.data[13] = torch.nan
    core, good = ScoringCore(TransformersEngine(made)), [request(1, 2, 3 + i) for i in range(3)]
    bad = {
        r"log-prob is nan at sequence 0, position 1 \(token 13\)": request(1, 13, 3),
        "has no PEFT adapters to switch off": request(4, 5, adapters="nobody"),
        "record_routing=True is not supported by this scorer: score the .* LogProbScorer": request(
            4, record_routing=True
        ),
        "return_kept=True is not supported": request(4, 5, return_kept=True, sampling=Sampling(top_k=3)),
        "grad=True is not supported": request(4, 5, grad=True),
        "ref_routing=... is not supported": request(4, 5, records={"ref_routing": torch.zeros(2, 1, 1).char()}),
        "has no router of Mixtral": request(4, 5, records={"routing": torch.zeros(2, 1, 1).char()}),
    }
    for message, one in bad.items():
        first, refused, *others = core.score([good[0], one, *good[1:]])
        assert isinstance(refused, ValueError)
        assert re.search(message, str(refused)), refused
        for found, asked in zip([first, *others], good, strict=True):
            alone = core.score([asked])[0]["columns"]["log_prob"]
            assert_close(found["columns"]["log_prob"], alone, atol=1e-6, rtol=1e-6)


def test_many_temperatures_share_one_scorer():
    engine, rng = TransformersEngine(model()), torch.Generator().manual_seed(0)
    row = torch.randint(97, (20,), generator=rng)
    turns = [Ragged.from_list([row[:12]]), Ragged.from_list([row])]
    for i in range(20):
        temperature = 0.2 + 0.15 * i
        found = [scores(engine, turn, temperature=temperature, remember=True) for turn in turns]
        if i % 7 == 0:
            plain = LogProbScorer(model(), temperature=temperature)
            assert_near(found, [plain.score(turn, remember=True).values for turn in turns], terms=100, size=32)
    (scorer,) = engine._scorers.values()
    assert len(scorer.memory) == 2, "keys and values are cached once"
    assert all(len(segment.log_probs) <= 4 for segment in scorer.memory._by_use)


def test_scorers_of_other_settings_are_few_and_share_the_memory():
    row = Ragged.from_list([torch.arange(40) % 97])
    probe = TransformersEngine(model())
    scores(probe, row, remember=True)
    (one,) = (scorer.memory.num_bytes for scorer in probe._scorers.values())
    engine = TransformersEngine(model(), memory=2 * one)
    kinds = [{"dtype": each} for each in (None, torch.bfloat16, torch.float16, torch.float64)]
    kinds += [{"deterministic": True}]
    for i in range(12):
        tokens = Ragged.from_list([(torch.arange(30) + 40 * (i % 3)) % 97])
        options = {"temperature": 1.0 + 0.1 * (i % 5), **(kinds[0] if i % 2 else kinds[i % 5])}
        with contextlib.suppress(ValueError), warnings.catch_warnings():  # a type that autocast lacks on a CPU
            warnings.simplefilter("ignore")
            found = scores(engine, tokens, remember=True, **options)
            expected = LogProbScorer(model(), **options).score(tokens).values
            if i % 2:
                assert_near(found, expected, dtype=torch.float32)
            else:
                assert_close(found, expected, atol=0.1, rtol=0.0)
        assert len(engine._scorers) <= 4
        assert sum(scorer.memory.num_bytes for scorer in engine._scorers.values()) <= 2 * one


def test_weights_are_read_once_after_each_update():
    class Counted(TransformersEngine):
        reads = 0

        def fingerprint(self):
            self.reads += 1
            return super().fingerprint()

    core = ScoringCore(Counted(model()))
    for _ in range(2):
        assert core.read_fingerprint() == (0, fingerprint_of(model()))
    assert core.engine.reads == 1
    core.update_weights(model(seed=1).state_dict(), 0)  # under the same number
    assert core.read_fingerprint() == (0, fingerprint_of(model(seed=1)))
    engine = object.__new__(GangEngine)
    with pytest.raises(TypeError, match="a gang of ranks reports no fingerprint of its weights"):
        engine.fingerprint()


def test_sequences_are_split_by_tokens():
    rows = Ragged.from_list([torch.full((n,), n) for n in (3, 3, 1, 1, 2, 2)])
    one, other = split(ScoreRequest.of(rows), 2)
    assert (one.tokens.lengths.tolist(), other.tokens.lengths.tolist()) == ([3, 3], [1, 1, 2, 2])
    assert [*one.tokens.values, *other.tokens.values] == rows.values.tolist()
    assert [*one.mask, *other.mask] == (rows.positions > 0).tolist()
    alone = split(ScoreRequest.of([[7, 8]]), 3)
    assert [None if share is None else share.tokens.values.tolist() for share in alone] == [None, [7, 8], None]


def test_a_lost_engine_is_no_answer():
    """It ends the replica instead, without scoring the requests of the batch one by one."""
    engine, calls = TransformersEngine(model()), []

    def lose(*args):
        calls.append(args)
        raise EngineLost("gone")

    engine.run = lose
    with pytest.raises(EngineLost, match="gone"):
        ScoringCore(engine).score([request(1, 2)] * 2)
    assert len(calls) == 1


def test_arguments_of_a_gang_are_checked():
    for options, message in (
        ({"ranks": 0}, "ranks must be at least 1, got 0"),
        ({"ranks": 2, "shard": "fsdp1"}, "shard must be one of 'fsdp2', 'tp', 'none', got 'fsdp1'"),
    ):
        with pytest.raises(ValueError, match=message):
            GangEngine(model, **options)


@needs_equal_rows
def test_deterministic_requests_have_the_same_bits_in_any_batch():
    """Wide enough that products of different numbers of rows are summed in different orders."""
    wide = tiny_model(hidden_size=128, intermediate_size=256, max_position_embeddings=256)
    rows = [torch.randint(30, (n,), generator=torch.Generator().manual_seed(n)) for n in (150, 20, 90)]
    sent = [job_of([row], deterministic=True) for row in rows]
    local = LogProbScorer(wide, deterministic=True)
    for row, found in zip(rows, ScoringCore(TransformersEngine(wide)).score(sent), strict=True):
        assert torch.equal(torch.from_numpy(found["columns"]["log_prob"]), local.score([row]).values[1:])
