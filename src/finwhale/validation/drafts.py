"""Check of the draft head: how many drafts of each position the model accepts."""

from finwhale.llm import LLM
from finwhale.request import SamplingParams
from finwhale.validation.chat import ask
from finwhale.validation.expectations import Expectations
from finwhale.validation.report import Check

PROMPTS = (
    "Tell me a story about a rabbit.",
    "Tell me a story about a fox and a bear.",
    "What does a farmer do?",
    "What is a whale?",
)


def check_drafts(llm: LLM, expectations: Expectations) -> list[Check]:
    """Let the model write with drafts. Raises RequestError if a request fails."""
    before = llm.metrics()
    ask(llm, PROMPTS, SamplingParams(temperature=0, max_tokens=96))
    after = llm.metrics()
    checks = []
    for position, (proposed, accepted) in enumerate(
        zip(after.drafts_proposed, after.drafts_accepted, strict=True)
    ):
        proposed -= before.drafts_proposed[position]
        accepted -= before.drafts_accepted[position]
        if not proposed:
            continue
        name = f"accepted drafts, position {position + 1}"
        if position == 0:
            checks.append(expectations.first_draft.check(name, accepted / proposed))
        else:
            reason = "no reference value is known for later drafts"
            checks.append(Check(name, f"{accepted / proposed:.2f}", "any", "ok", reason))
    return checks
