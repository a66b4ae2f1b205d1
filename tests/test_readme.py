"""The README's example runs as it stands, with a tiny checkpoint in place of the hub's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import tensordict

from toy_rollouts import make_model, make_tokenizer

README = Path(__file__).parent.parent / "README.md"


def test_the_example_runs(tmp_path: Path, capsys: Any) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(example.strip().splitlines()) <= 20, "the README promises a short example"
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, seed=0)
    model.config.max_position_embeddings = 2048
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert '"Qwen/Qwen2.5-0.5B-Instruct"' in example
    example = example.replace('"Qwen/Qwen2.5-0.5B-Instruct"', repr(str(tmp_path)))
    before = tensordict.list_to_stack()
    try:
        exec(compile(example, "README.md", "exec"), {})
    finally:
        tensordict.set_list_to_stack(before).set()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("KL")]
    kl, clipped, tokens = (float(x) for x in re.findall(r"tensor\((.*?)\)", line))
    assert kl == 0.0, "policy and reference are the same checkpoint"
    assert clipped == 0.0, "nothing has moved since the answers were sampled"
    assert 8 <= tokens <= 8 * 64
