# %% [markdown]
# # A first look
#
# Score, penalise, train and inspect with a model so small that each cell takes a second. Nothing is downloaded.

# %%
import copy

import tensordict
import torch
from tensordict import TensorDict
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torchrl.data.llm import History
from torchrl.modules.llm import TransformersWrapper
from torchrl.modules.llm.policies import ChatHistory
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from torchrl_llm_kl import RetrieveKL, Sampling, diagnose, inspect_tokens, make_algorithm

tensordict.set_list_to_stack(True).set()  # torchrl's LLM parts store strings this way
_ = torch.manual_seed(0)

# %% [markdown]
# ## A model and its reference
#
# The tokenizer has one token for each letter, so that an answer can be read token by token. A few supervised steps teach the model what text looks like; a copy of the result is the reference.

# %%
letters = [chr(code) for code in range(32, 127)] + ["\n"]
special = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
characters = Tokenizer(models.WordLevel({text: i for i, text in enumerate(special + letters)}, unk_token="?"))
characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
characters.decoder = decoders.Fuse()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=characters,
    pad_token=special[0],
    eos_token=special[2],
    extra_special_tokens=[special[1]],
    padding_side="left",
)
tokenizer.chat_template = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

config = Qwen2Config(
    vocab_size=len(tokenizer),
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    eos_token_id=tokenizer.eos_token_id,
    pad_token_id=tokenizer.pad_token_id,
)
model = Qwen2ForCausalLM(config).eval()

questions = ["Say something.", "And now?"]
replies = ["the cat sat on a mat", "we go out to sea", "it is a good idea", "no one saw the moon", "all is quiet now"]
lines = [
    tokenizer.apply_chat_template(
        [{"role": "user", "content": question}, {"role": "assistant", "content": reply}], tokenize=False
    )
    for question in questions
    for reply in replies
]
text = tokenizer(lines, return_tensors="pt", padding=True, add_special_tokens=False)
labels = text.input_ids.masked_fill(text.attention_mask == 0, -100)
warm_up = torch.optim.Adam(model.parameters(), lr=3e-3)
for _ in range(40):
    model(**text, labels=labels).loss.backward()
    warm_up.step()
    warm_up.zero_grad()

reference = copy.deepcopy(model).requires_grad_(False)

# %% [markdown]
# ## Sample
#
# Sixteen answers to each of two questions, at temperature 1 from the whole distribution, which is the scored one.

# %%
generate = Sampling().generate_kwargs(max_new_tokens=20)
policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs=generate, pad_output=False)
chats = [[{"role": "user", "content": question}] for question in questions for _ in range(16)]


def sample():
    prompts = ChatHistory(prompt=History.from_chats(chats), batch_size=[len(chats)])
    batch = policy(TensorDict(history=prompts, batch_size=[len(chats)]))
    answers = batch["text", "response"]
    vowels = torch.tensor([[sum(c in "aeiou" for c in answer) / max(len(answer), 1)] for answer in answers])
    batch["next"] = TensorDict(reward=vowels, batch_size=[len(chats)])
    return batch


batch = sample()
print(repr(batch["text", "response"][0]), "reward", round(float(batch["next", "reward"][0]), 3))

# %% [markdown]
# The reward is the share of vowels in an answer.
#
# ## Score
#
# `RetrieveKL` writes the log-prob of each sampled token under both models, and their difference. Both have the same weights, so the KL is 0.

# %%
scored = RetrieveKL(model, reference, add_to_reward=False)(batch.clone())
for key in ("log_probs", "ref_log_probs"):
    print(f"{key:14}", [f"{x:.2f}" for x in scored[0]["next", key, "full"][-16:].tolist()])
print(f"{'kl_penalty':14}", max(float(row["next", "kl_penalty"].abs().max()) for row in scored.unbind(0)))

# %% [markdown]
# ## Look
#
# Before the update, check the batch: do these tokens come from the scored distribution?

# %%
print(diagnose(scored, policy=model, reference=reference, tokenizer=tokenizer))

# %% [markdown]
# Now a batch with a fault: the sampler draws from the three most probable tokens, and the scorer does not know it.

# %%
whole = dict(policy.generate_kwargs)
policy.generate_kwargs["top_k"] = 3
finding = diagnose(sample(), policy=model, tokenizer=tokenizer).worst
print(finding.cause, "-", finding.remedy)
policy.generate_kwargs = whole

# %% [markdown]
# ## Train
#
# An algorithm is a preset of objective, advantage and KL placement. Here the KL is subtracted from the reward, with a small coefficient.

# %%
grpo = make_algorithm(
    "grpo", model, reference=reference, group_size=16, kl_loss="none", kl_reward="k1", kl_reward_coeff=0.002
)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
rewards, kls = [], []
for _ in range(30):
    batch = grpo.prepare(sample())
    out = grpo.loss(batch)
    out.total_loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    rows = batch.unbind(0)
    kls.append(float(sum(row["next", "kl_penalty"].sum() for row in rows)) / len(rows))
    rewards.append(float(sum(row["next", "reward"].sum() for row in rows)) / len(rows) + 0.002 * kls[-1])
print(f"share of vowels {rewards[0]:.2f} -> {rewards[-1]:.2f}, KL {kls[0]:.2f} -> {kls[-1]:.2f} nats per answer")

# %%
import matplotlib.pyplot as plt

figure, axes = plt.subplots(1, 2, figsize=(8, 2.6))
axes[0].plot(rewards)
axes[0].set(title="share of vowels", xlabel="step")
axes[1].plot(kls)
axes[1].set(title="KL to the reference, nats per answer", xlabel="step")
figure.tight_layout()
plt.show()

# %% [markdown]
# With such a small coefficient the model ends with only vowels, some 60 nats per answer from the start: a penalty prevents this drift. A `PIKLCoefficient` instead of the number holds the KL at a target.
#
# The worst tokens of the last batch, as an excerpt; `inspect_tokens(batch, tokenizer, "rollouts.html")` writes the whole page.

# %%
inspect_tokens(batch, tokenizer, None, policy=model, reference=reference)
