# %% [markdown]
# # Your own task
#
# Questions, a function that rewards an answer, an algorithm: the smallest complete run. Nothing is downloaded; the cells also work with your own checkpoint.

# %%
import copy

import tensordict
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torchrl.collectors.llm import LLMCollector
from torchrl.modules.llm import TransformersWrapper
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from torchrl_llm_kl import PIKLCoefficient, Sampling, make_algorithm
from torchrl_llm_kl.tasks import make_env

tensordict.set_list_to_stack(True).set()
_ = torch.manual_seed(0)

# %% [markdown]
# ## The data
#
# A row is a dict with `question`; every other column reaches the reward function as `metadata`. A path of a JSONL or Parquet file, or a Hugging Face `Dataset`, works too.

# %%
words = ["how many", "a number", "pick one", "which", "a digit"]
rows = [{"question": f"{word}?", "above": 6} for word in words]
rows[:3]

# %% [markdown]
# ## The reward
#
# A function of question, answer and metadata. Several functions are logged under their names: here one checks that the answer is a digit above the row's bound, and one rewards brevity a little.


# %%
def right(question, answer, metadata):
    return float(answer[:1].isdigit() and int(answer[0]) > metadata["above"])


def brief(question, answer, metadata):
    return 1.0 / (1 + len(answer))


reward = {"right": right, "brief": (0.2, brief)}

# %% [markdown]
# ## A model
#
# In your script: `AutoModelForCausalLM.from_pretrained(...)` and its tokenizer. Here it is a tiny model with a token for each letter that has learned to answer with a digit.

# %%
special = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
alphabet = [*"0123456789? ", "\n", *"abcdefghijklmnopqrstuvwxyz"]
characters = Tokenizer(models.WordLevel({text: i for i, text in enumerate(special + alphabet)}, unk_token="?"))
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
    num_key_value_heads=4,
    eos_token_id=tokenizer.eos_token_id,
    pad_token_id=tokenizer.pad_token_id,
)
model = Qwen2ForCausalLM(config).eval()

lines = [
    tokenizer.apply_chat_template(
        [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": digit}], tokenize=False
    )
    for row in rows
    for digit in "0123456789"
]
text = tokenizer(lines, return_tensors="pt", padding=True, add_special_tokens=False)
labels = text.input_ids.masked_fill(text.attention_mask == 0, -100)
warm_up = torch.optim.Adam(model.parameters(), lr=3e-3)
for _ in range(30):
    model(**text, labels=labels).loss.backward()
    warm_up.step()
    warm_up.zero_grad()

reference = copy.deepcopy(model).requires_grad_(False)

# %% [markdown]
# ## The run
#
# Five questions, sixteen answers to each, at every step. The KL to the reference is subtracted from the reward, with a coefficient that grows while the KL is above 0.8 nats per answer. Thirty steps show the start of this adaptation.

# %%
GROUP, PROMPTS, STEPS = 16, 5, 30
coefficient = PIKLCoefficient(init=0.02, target=0.8)
grpo = make_algorithm(
    "grpo",
    model,
    reference=reference,
    gen_model="from_collector",
    group_key="group",
    kl_loss="none",
    kl_reward="k1",
    kl_reward_coeff=coefficient,
)
generate = Sampling().generate_kwargs(max_new_tokens=3)
policy = TransformersWrapper(model, tokenizer=tokenizer, input_mode="text", pad_output=True, generate_kwargs=generate)
env = make_env(rows, reward, tokenizer, group_size=GROUP, num_prompts=PROMPTS, kl_transform=grpo.kl_transform)
collector = LLMCollector(
    env, policy=policy, dialog_turns_per_batch=GROUP * PROMPTS, total_dialog_turns=GROUP * PROMPTS * STEPS
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
history = []
for batch in collector:
    batch = grpo.prepare(batch.reshape(-1))
    for minibatch in grpo.minibatches(batch, 2):
        grpo.loss(minibatch).total_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    kl = batch["next", "kl_penalty"].sum(-1).mean()
    coefficient.update(kl, n=len(batch))
    history.append((batch["next", "rewards", "right"].mean().item(), kl.item(), coefficient().item()))
print(f"right {history[0][0]:.0%} -> {history[-1][0]:.0%}, KL {history[-1][1]:.1f} nats per answer")

# %%
import matplotlib.pyplot as plt

figure, panels = plt.subplots(1, 3, figsize=(10, 2.6))
for panel, title, values in zip(
    panels, ("right answers", "KL, nats per answer", "coefficient"), zip(*history), strict=True
):
    panel.plot(values)
    panel.set(title=title, xlabel="step")
panels[1].axhline(0.8, color="grey", lw=0.8, ls="--")
figure.tight_layout()
plt.show()

# %% [markdown]
# ## Some answers

# %%
for question, answer, score in list(
    zip(batch["query"], batch["text", "response"], batch["next", "rewards", "right"], strict=True)
)[::8]:
    print(repr(str(question)), "->", repr(answer), "right" if float(score) else "wrong")
