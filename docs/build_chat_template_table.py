"""Write ``docs/chat_templates.md``: the assistant mask on the chat templates that TRL ships.

Run ``python docs/build_chat_template_table.py`` after changes to the masks and for a new version of TRL.
"""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
PAGE = DOCS / "chat_templates.md"

sys.path[:0] = [str(DOCS.parent / "tests"), str(DOCS.parent / "tests" / "masks")]
import template_pairs  # noqa: E402

HEAD = """# The assistant mask on real chat templates

TRL {version} ships the chat templates of many models and, for most, a second version with `{{% generation %}}` blocks. The
table compares two masks: that of `render_conversation` on a model's own, unmarked template, and that of the blocks.
Tokens are byte-level. Conversations: {conversations}.

A mask covers everything the model emits after the generation prompt, including the end-of-turn token. The marked
templates disagree on headers and white space; the column "only TRL marks" lists everything that TRL marks and this
library does not. It shows a thinking tag if the model's generation prompt ends with one, and `<EOS>` if a template
closes the whole conversation with a second end token, which belongs to no turn. The reverse occurs once, on
diffusion_gemma: its blocks end after the last character of the answer, and if that character takes several tokens (an
emoji), transformers masks only the first of them.

"Texts differ": TRL's version renders another text (it keeps the reasoning of earlier turns, for example), so the masks
cannot be compared. "Refused": the model's template does not accept such a conversation.

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
