"""Number of renderings of a template per conversation; fewer renderings change no mask."""

from __future__ import annotations

import jinja2
import pytest

import template_pairs
from template_pairs import assistant, user
from torchrl_llm_kl.masks import EmptyAssistantMaskError, TurnNotFoundError, render_conversation
from torchrl_llm_kl.masks._template import instrument
from toy_tokenizer import CHATML, build_tokenizer

END = "<|im_end|>"
LOOP = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

TYPICAL = {
    "chatml": CHATML,
    "llama-3": "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' "
    "+ message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = '<|begin_of_text|>' + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    # no generation prompt at all
    "mistral": "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}",
    "gemma": "{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "{{ '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
    "phi-3": "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
    "default set": "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
    + CHATML,
    "thinking prompt": LOOP + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
    "marked": "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}" + PROMPT,
}


def talk(turns: int) -> list[dict]:
    return [m for k in range(turns) for m in (user(f"Question {k}?"), assistant(f"Answer {k}."))]


@pytest.fixture
def renderings(monkeypatch):
    """A list that grows by one with each rendering of a template."""
    made: list[object] = []
    render = jinja2.Template.render
    monkeypatch.setattr(
        jinja2.Template, "render", lambda *args, **kwargs: made.append(args[0]) or render(*args, **kwargs)
    )
    return made


@pytest.mark.parametrize("turns", [1, 2, 3, 4])
@pytest.mark.parametrize("template", TYPICAL)
def test_two_renderings_whatever_the_number_of_turns(renderings, template, turns):
    tokenizer = build_tokenizer(TYPICAL[template])
    render_conversation(tokenizer, talk(turns))  # its borders are confirmed once
    renderings.clear()
    rendered = render_conversation(tokenizer, talk(turns))
    assert len(rendered.assistant_spans) == turns
    assert len(renderings) == 2


@pytest.mark.parametrize("template", sorted(set(TYPICAL) - {"mistral", "thinking prompt"}))
def test_two_renderings_with_a_generation_prompt(renderings, template):
    tokenizer = build_tokenizer(TYPICAL[template])
    render_conversation(tokenizer, talk(3), add_generation_prompt=True)
    renderings.clear()
    render_conversation(tokenizer, talk(3), add_generation_prompt=True)
    assert len(renderings) == 2


@pytest.mark.parametrize("template", ["mistral", "thinking prompt"])
def test_a_third_rendering_shows_what_the_generation_prompt_adds(renderings, template):
    tokenizer = build_tokenizer(TYPICAL[template])
    render_conversation(tokenizer, talk(3), add_generation_prompt=True)
    renderings.clear()
    render_conversation(tokenizer, talk(3), add_generation_prompt=True)
    assert len(renderings) == 3


@pytest.mark.parametrize("template", TYPICAL)
@pytest.mark.parametrize("prompt", [False, True])
def test_one_rendering_without_an_assistant_turn(renderings, template, prompt):
    render_conversation(build_tokenizer(TYPICAL[template]), [user("x")], add_generation_prompt=prompt)
    assert len(renderings) == 1


def test_one_rendering_without_a_mask(renderings):
    tokenizer = build_tokenizer()
    whole = render_conversation(tokenizer, talk(2), assistant_mask=False)
    assert len(renderings) == 1
    assert (whole.assistant_spans, whole.located_by, whole.assistant_mask.any().item()) == ((), "not asked", False)
    assert whole.token_ids.equal(render_conversation(tokenizer, talk(2)).token_ids)


def test_without_a_mask_no_turn_can_be_missing():
    tokenizer = build_tokenizer("{{ messages | length }}{% for m in messages %}{{ m | length }}{% endfor %}")
    with pytest.raises((EmptyAssistantMaskError, TurnNotFoundError)):  # which, depends on transformers' release
        render_conversation(tokenizer, talk(1))
    assert render_conversation(tokenizer, talk(1), assistant_mask=False).text == "222"


# TRL's templates that need more than two renderings for four plain turns, and why.
MORE = {
    # the loop ends the last turn differently before a generation prompt: one rendering for each
    **dict.fromkeys(("gptoss", "gptoss_training"), 3),
    # the text after the loop depends on the last message: the prompt of each turn is rendered, with marks and without
    **dict.fromkeys(("deepseek_r1_distill", "deepseek_r1_distill_training", "deepseekv3", "deepseekv3_training"), 18),
    **dict.fromkeys(("diffusion_gemma", "diffusion_gemma_training", "phi3_training", "phi3_5_training"), 18),
    **dict.fromkeys(("gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5"), 18),
    # no generation prompt, and content in parts: each header is found by rendering the turn with other content
    **dict.fromkeys(("llava_next", "llava_next_training"), 10),
}


def test_renderings_of_the_templates_that_trl_ships(renderings):
    pytest.importorskip("trl", reason="its templates are counted")
    counts = {}
    for template in template_pairs.all_templates():
        messages = talk(4)
        if template.removesuffix("_training") == "llava_next":
            messages = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
        tokenizer = build_tokenizer(template_pairs.read(template), eos_token="<EOS>", bos_token="<BOS>")
        render_conversation(tokenizer, messages)
        renderings.clear()
        render_conversation(tokenizer, messages)
        counts[template] = len(renderings)
    assert {template: count for template, count in counts.items() if count != 2} == MORE


# ---- a generation prompt that varies between turns -----------------------------------------------------------------------

NO_THINKING = (
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if CONDITION %}<think></think>{% endif %}{% endif %}"
)
# Each prompts for the first answer with an empty thinking block, and for the second without.
VARYING = {
    "namespace": "{% set ns = namespace(last='') %}"
    + LOOP.replace("{% endfor %}", "{% set ns.last = m.content %}{% endfor %}")
    + NO_THINKING.replace("CONDITION", "'/off' in ns.last"),
    "namespace in a macro": "{% set ns = namespace(last='') %}{% macro note(m) %}{% set ns.last = m.content %}{% endmacro %}"
    + LOOP.replace("{% endfor %}", "{{ note(m) }}{% endfor %}")
    + NO_THINKING.replace("CONDITION", "'/off' in ns.last"),
    "last message": LOOP + NO_THINKING.replace("CONDITION", "'/off' in messages[-1].content"),
    "by way of a variable": "{% set said = messages | map(attribute='content') | list %}{% set last = said[-1] %}"
    + LOOP
    + NO_THINKING.replace("CONDITION", "'/off' in last"),
    "inside of the loop": LOOP.replace(
        "{% endfor %}",
        "{% if loop.last %}" + NO_THINKING.replace("CONDITION", "'/off' in m.content") + "{% endif %}{% endfor %}",
    ),
}


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("template", VARYING)
def test_each_turn_has_the_header_of_its_own_generation_prompt(template, prompt):
    messages = [user("a /off"), assistant("<think></think>yes"), user("b"), assistant("<think></think>no")]
    rendered = render_conversation(build_tokenizer(VARYING[template]), messages, add_generation_prompt=prompt)
    assert [rendered.text[a:b] for a, b in rendered.assistant_spans] == ["yes" + END, "<think></think>no" + END]


AFTER_THE_LOOP = {
    "": True,
    PROMPT: True,
    "{% if add_generation_prompt and enable_thinking %}<think>{% endif %}": True,
    "{% set header = '<a>' %}{% if add_generation_prompt %}{{ header }}{% else %}{{ eos_token }}{% endif %}": True,
    "{% if add_generation_prompt %}{{ messages | length }}{% endif %}": False,
    "{% if add_generation_prompt %}{{ roles }}{% endif %}": False,
    "{% if add_generation_prompt %}{{ head() }}{% endif %}": False,
    "{% generation %}{{ eos_token }}{% endgeneration %}": False,
    "{% for m in messages if m.role == 'x' %}{% endfor %}": True,
}


@pytest.mark.parametrize("after", AFTER_THE_LOOP)
def test_dependence_of_the_generation_prompt_on_the_messages(after):
    before = "{% set first = messages[0] %}{% set roles = first.role %}{% macro head() %}{{ roles }}{% endmacro %}"
    read = instrument(before + LOOP + after)
    assert read.prompt_is_fixed == AFTER_THE_LOOP[after]
    assert not (read.prompt_is_fixed and read.loop_reads_flag)
    assert not instrument("{% if messages %}" + LOOP + after + "{% endif %}").prompt_is_fixed


@pytest.mark.parametrize(
    "loop",
    [
        LOOP.replace("{% endfor %}", "{% if loop.last and add_generation_prompt %}!{% endif %}{% endfor %}"),
        "{% set asked = add_generation_prompt %}" + LOOP.replace("{% endfor %}", "{{ asked }}{% endfor %}"),
    ],
)
def test_a_loop_that_reads_the_generation_prompt_flag(loop):
    assert instrument(loop + PROMPT).loop_reads_flag


# ---- the border of header and content ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "content", "expected"),
    [
        ("{{ m.role }}: {{ m.content | upper }}\n", "assistant", "ASSISTANT"),
        ("{{ m.role }}: {{ m.content }}\n", "assistant", "assistant"),
        ("{{ m.role }} {{ m.content }}\n", "assistant", "assistant"),
        (" {{ m.content }}</s>", "yes", " yes</s>"),
        (" {{ m.content }}</s>", "[INST]", " [INST]</s>"),
        ("<answer>{{ m.content }}</s>", "<answer>", "<answer></s>"),
        ("<answer>{{ m.content }}</s>", "answer", "answer</s>"),
    ],
)
def test_without_a_generation_prompt_the_header_is_the_text_before_any_content(template, content, expected):
    template = "{% for m in messages %}{% if m.role == 'user' %}[INST]{% else %}" + template + "{% endif %}{% endfor %}"
    rendered = render_conversation(build_tokenizer(template), [user("x"), assistant(content)])
    assert [rendered.text[a:b] for a, b in rendered.assistant_spans] == [expected]


@pytest.mark.parametrize("closes", ["", "{% else %}{{ eos_token }}"])
def test_an_end_token_that_only_the_prompt_adds_belongs_to_no_answer(closes):
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ eos_token }}assistant: " + closes + "{% endif %}"
    )
    messages = [user("x"), assistant("yes")]
    rendered = render_conversation(build_tokenizer(template), messages, add_generation_prompt=True)
    assert [rendered.text[a:b] for a, b in rendered.assistant_spans] == ["yes" + END * bool(closes)]
