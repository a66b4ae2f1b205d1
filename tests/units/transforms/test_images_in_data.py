"""Images of a row in data of any layout reach the scorer, from transforms, losses, buffers, files and services."""

from functools import cache

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.data.llm import History

from image_models import IMAGE, image_model, image_processor, num_placeholders, own_log_probs, picture
from loopback import Loopback
from template_pairs import assistant, user
from torchrl_llm_kl import Advantage, PolicyLoss, from_conversations, load_batch, save_batch
from torchrl_llm_kl.datasets import DataError
from torchrl_llm_kl.diagnostics import diagnose
from torchrl_llm_kl.losses import KLToReference
from torchrl_llm_kl.rollouts import prompt_ids, read_images
from torchrl_llm_kl.transforms import AfterPrompt, Images, KLRewardTransform, RetrieveKL, RetrieveLogProb

FAMILY = "qwen2_5_vl"
PROMPT = [20, 21, 22] * 6


@cache
def model_of(family=FAMILY, seed=0):
    return image_model(family, seed=seed)


def row_of(image, answer, key="images", family=FAMILY):
    count = 0 if image is None else num_placeholders(model_of(family), image)[0]
    prompt = torch.tensor([1, 7, *[IMAGE] * count, 8, *PROMPT])
    full = torch.cat([prompt, torch.tensor(answer)])
    masks = TensorDict(all_assistant_mask=torch.arange(len(full)) >= len(prompt))
    row = TensorDict(tokens=TensorDict(full=full, prompt=prompt), masks=masks, advantage=torch.tensor(float(answer[0])))
    row["next"] = TensorDict(reward=torch.ones(1))
    return row if image is None else row.set(key, TensorDict(image))


def data_of(key="images", family=FAMILY):
    """A group of two answers, an image of another size, and a row without an image."""
    one, two = picture(family, 1), picture(family, 2, wide=True)
    rows = [(one, [10, 11]), (one, [12, 13, 14]), (two, [10, 11]), (None, [15, 16])]
    return lazy_stack([row_of(image, answer, key, family) for image, answer in rows])


def own(row, model, family=FAMILY, key="images"):
    """The log-probs of the answers from the model's own forward, 0 elsewhere."""
    record = dict(row[key]) if key in row.keys() else None  # noqa: SIM118
    found = own_log_probs(family, model, row["tokens", "full"], record)
    return torch.cat([torch.zeros(1), found]) * row["masks", "all_assistant_mask"]


def check(data, model, key="images", entry=("next", "log_probs", "full")):
    for row in data.unbind(0):
        assert torch.allclose(row[entry].flatten(), own(row, model, key=key), atol=1e-5)


def test_transforms_find_the_images(tmp_path):
    policy, reference, data = model_of(), model_of(seed=1), data_of()
    buffer = ReplayBuffer(storage=LazyStackStorage(10), batch_size=8)
    buffer.extend(data)
    save_batch(data, tmp_path / "batch.pt")
    stacked = lazy_stack([data[:2], data[2:]]).reshape(-1)
    for each in (data, buffer.sample(), load_batch(tmp_path / "batch.pt"), stacked):
        check(RetrieveLogProb(policy)(each.clone()), policy)
    findings = diagnose(RetrieveLogProb(policy)(data.clone()), policy=policy).findings
    assert "not_text" not in {each.cause for each in findings}
    out = RetrieveKL(policy, reference)(data.clone())
    check(out, policy)
    check(out, reference, entry=("next", "ref_log_probs", "full"))
    for row in out.unbind(0):
        kl = own(row, policy) - own(row, reference)
        assert torch.allclose(row["next", "kl_penalty"], kl, atol=1e-5)
    exact = RetrieveKL(policy, reference, estimator="exact")(data.clone())
    check(exact, reference, entry=("next", "ref_log_probs", "full"))
    charged = KLRewardTransform(reference, add_to_reward=False)(RetrieveLogProb(policy)(data.clone()))
    check(charged, reference, entry=("next", "ref_log_probs"))


def test_another_key():
    policy, data = model_of(), data_of("pictures")
    with pytest.raises(ValueError, match=r"sequence 0, position 2 .* pixels are missing"):
        RetrieveLogProb(policy)(data.clone())
    check(RetrieveLogProb(policy, extras=[Images("pictures")])(data.clone()), policy, "pictures")
    out = RetrieveKL(policy, model_of(seed=1), extras=[Images("pictures")])(data.clone())
    check(out, model_of(seed=1), "pictures", ("next", "ref_log_probs", "full"))
    loss = PolicyLoss(policy, "sft")
    with pytest.raises(ValueError, match="pixels are missing"):
        loss(data)
    loss.set_keys(images="pictures")
    assert torch.isfinite(loss(data)["loss_objective"])


def test_dense_data_and_dicts():
    """Images of one size in dense tensors, and dicts as non-tensor data, for several batch shapes."""
    policy, images = model_of(), [picture(FAMILY, 1), picture(FAMILY, 2)]
    rows = [row_of(image, [10, 11]) for image in images]
    dense = torch.stack(rows)
    check(RetrieveLogProb(policy)(dense.clone()), policy)
    assert [x["image_grid_thw"].shape for x in read_images(dense.reshape(2, 1), "images")] == [(1, 3)] * 2
    alone = [row.exclude("images").set("images", NonTensorData(image)) for row, image in zip(rows, images, strict=True)]
    found = RetrieveLogProb(policy)(lazy_stack(alone))
    for row, image, expected in zip(found.unbind(0), images, rows, strict=True):
        assert torch.equal(read_images(row[None], "images")[0]["pixel_values"], image["pixel_values"])
        assert torch.allclose(row["next", "log_probs", "full"], own(expected, policy), atol=1e-5)
    assert read_images(dense.exclude("images"), "images") is None
    inside = TensorDict(next=dense.select("images"), batch_size=[2])
    assert len(read_images(inside, "images")) == len(read_images(inside["next"], ("next", "images"))) == 2


def test_prompts_with_other_pixels_are_other_prompts():
    """Also for groups, whose answers must belong to one image."""
    one, two = picture(FAMILY, 1), picture(FAMILY, 2)
    rows = [row_of(image, [10 + i]) for i, image in enumerate((one, one, two, two))]
    assert prompt_ids(lazy_stack(rows)).tolist() in ([0, 0, 1, 1], [1, 1, 0, 0])
    advantage = Advantage("grpo", group_size=2)
    assert torch.isfinite(torch.cat([x["advantage"] for x in advantage(lazy_stack(rows)).unbind(0)])).all()
    with pytest.raises(ValueError, match="would compare sequences 0 and 1"):
        advantage(lazy_stack([rows[0], rows[2], rows[1], rows[3]]))


def test_a_loss_trains_the_encoder():
    """Value and gradient of SFT with a KL to a reference equal those of the models' own forwards."""
    policy, reference, data = model_of(), model_of(seed=1), data_of()
    loss = PolicyLoss(policy, "sft", terms=[KLToReference(0.5, "k2")], reference=reference)
    out = loss(data)
    count = int(torch.cat([row["masks", "all_assistant_mask"] for row in data.unbind(0)]).sum())
    log_prob, ref = (torch.cat([own(row, model) for row in data.unbind(0)]) for model in (policy, reference))
    total = (-log_prob + 0.25 * (log_prob - ref.detach()) ** 2).sum() / count
    found = out["loss_objective"] + out["loss_kl_to_ref"]
    assert torch.allclose(found, total, rtol=1e-4)
    weight = policy.model.visual.patch_embed.proj.weight
    (a,), (b,) = (torch.autograd.grad(each, [weight]) for each in (found, total))
    assert torch.allclose(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max()))
    assert b.abs().max() > 0


def test_a_service_gets_each_image():
    policy, data, loop = model_of(), data_of(), Loopback()
    out = RetrieveLogProb(loop.serve(policy))(data.clone())
    check(out, policy)
    loss = PolicyLoss(policy, "sft", terms=[KLToReference(0.5, "k2")], reference=loop.serve(model_of(seed=1)))
    here = PolicyLoss(policy, "sft", terms=[KLToReference(0.5, "k2")], reference=model_of(seed=1))
    assert torch.allclose(loss(data)["loss_kl_to_ref"], here(data)["loss_kl_to_ref"], rtol=1e-4)


def conversation(first, second):
    one, two = ({"type": "image", "image": image} for image in (first, second))
    text = {"type": "text", "text": "what is"}
    return [user([one, text]), assistant("red cat"), user([text, two]), assistant("blue car")]


def colours():
    image = pytest.importorskip("PIL.Image")
    return [image.new("RGB", (8, 8), colour) for colour in ((220, 20, 20), (20, 30, 220))]


@pytest.mark.filterwarnings("ignore:Image tokens attend")
@pytest.mark.parametrize("family", [FAMILY, "gemma3"])
def test_conversations_become_data_through_a_processor(family):
    processor, model = image_processor(family), model_of(family)
    data = from_conversations([conversation(*colours()), [user("what is"), assistant("yes")]], processor)
    row, last = data[0], from_conversations([conversation(*colours())], processor, turns="last")[0]
    decode = processor.tokenizer.decode
    ids, mask = row["tokens", "full"], row["masks", "all_assistant_mask"]
    how = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    whole = processor.apply_chat_template([conversation(*colours())], **how)
    assert torch.equal(ids, whole["input_ids"][0])
    assert torch.equal(row["images", "pixel_values"], whole["pixel_values"])
    assert decode(ids[mask]) == "red cat <end> blue car <end>"
    assert decode(ids[len(row["tokens", "prompt"]) :]).startswith("red cat <end> <user>")
    assert decode(last["tokens", "full"][len(last["tokens", "prompt"]) :]) == "blue car <end>"
    assert torch.equal(last["masks", "all_assistant_mask"], mask)
    out = RetrieveLogProb(model)(data)
    for each in out.unbind(0):
        scored = each["log_probs", "full"] != 0
        assert torch.allclose(each["log_probs", "full"][scored], own(each, model, family)[scored], atol=1e-5)
    with pytest.raises(DataError, match="has 2 images: pass the model's processor"):
        from_conversations([conversation(*colours())], processor.tokenizer, chat_template=processor.chat_template)


def test_a_history_is_rendered_with_its_images():
    """A transform with a processor renders images. A tokenizer and a context function refuse them."""
    processor, model = image_processor(FAMILY), model_of()
    chats = [conversation(*colours())[:2], conversation(*colours()[::-1])[:2]]
    contents = [NonTensorStack(*(NonTensorData(message["content"]) for message in chat)) for chat in chats]
    history = [History(role=["user", "assistant"], content=content, batch_size=(2,)) for content in contents]
    data = lazy_stack([TensorDict(history=TensorDict(full=each)) for each in history])
    out = RetrieveLogProb(model, tokenizer=processor)(data.clone())
    expected = RetrieveLogProb(model)(from_conversations(chats, processor))
    for a, b in zip(out.unbind(0), expected.unbind(0), strict=True):
        assert torch.equal(a["log_probs", "full"], b["log_probs", "full"])
    assert not torch.equal(out[0]["log_probs", "full"], out[1]["log_probs", "full"])
    template = {"chat_template": processor.chat_template}
    with pytest.raises(ValueError, match="sequence 0 has 1 images: pass the model's processor"):
        RetrieveLogProb(model, tokenizer=processor.tokenizer, tokenizer_kwargs=template)(data.clone())
    context = RetrieveLogProb(model, tokenizer=processor, extras=[AfterPrompt(lambda history: history)])
    with pytest.raises(ValueError, match="sequence 0: a context function takes only text"):
        context(data.clone())
