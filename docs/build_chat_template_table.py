"""Writes ``docs/chat_templates.md``: what the assistant mask does on the chat templates that TRL ships.

Run ``python docs/build_chat_template_table.py`` after a change to the masks or to the TRL version.
"""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
PAGE = DOCS / "chat_templates.md"

sys.path[:0] = [str(DOCS.parent / "tests"), str(DOCS.parent / "tests" / "masks")]
import template_pairs  # noqa: E402

HEAD = """# The assistant mask on real chat templates

TRL {version} ships many models' own chat templates and, for most, a second one with `{{% generation %}}` blocks. The
table compares the mask that `render_conversation` finds on a model's own template, without any marks, with those
marks, on byte-level tokens. Conversations: {conversations}.

A mask holds what the model emits after the generation prompt, end-of-turn token included. The pairs do not agree among
themselves on headers and on white space, so these are listed: "only TRL marks" is everything TRL marks and this
library does not. A thinking tag appears there where the model's generation prompt ends with it; `<EOS>` appears where
a template closes the whole conversation with a second end token, which belongs to no turn. The reverse occurs once, on
diffusion_gemma: its marks end behind the last character of the answer, and where that takes several tokens (an emoji),
transformers counts only the first of them.

"Texts differ" means that TRL's second template renders another text (it keeps the reasoning of earlier turns, say), so
the masks can't be compared; "refused", that the model's template does not take such a conversation.

Built by `docs/build_chat_template_table.py`.

| template | agrees on | only TRL marks | texts differ | refused |
|---|---|---|---|---|
"""


def build() -> str:
    """The page as text."""
    rows = []
    for template in template_pairs.pairs():
        outcomes = {kind: template_pairs.compare(template, kind) for kind in template_pairs.CONVERSATIONS}

        def kinds(status: str, outcomes: dict[str, template_pairs.Outcome] = outcomes) -> str:
            return ", ".join(kind for kind, outcome in outcomes.items() if outcome.status == status) or "-"

        only_trl = sorted({text for outcome in outcomes.values() for text in outcome.only_trl})
        shown = ", ".join(f"`{text!r}`".replace("|", "\\|") for text in only_trl) or "-"
        rows.append(f"| {template} | {kinds('agrees')} | {shown} | {kinds('texts differ')} | {kinds('refused')} |\n")
    head = HEAD.format(version=template_pairs.version(), conversations=", ".join(template_pairs.CONVERSATIONS))
    return head + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(build(), encoding="utf-8")
