"""Shows that drafting changes no token, and how many drafts the model accepts.

python examples/drafting.py [PATH]
"""

import sys

from finwhale import LLM, SamplingParams

PROMPTS = ["Once upon a time", "What is the capital of France?", "The whale"]
params = SamplingParams(temperature=0.8, seed=1, max_tokens=60)

texts = []
for draft_tokens in (0, 2):
    llm = LLM(*sys.argv[1:], draft_tokens=draft_tokens)
    results = llm.generate(PROMPTS, params)
    texts.append([result.outputs[0].text for result in results])
    if draft_tokens:
        metrics = llm.metrics()
        print(f"accepted drafts by position: {[f'{share:.0%}' for share in metrics.acceptance]}")
    del llm

print(texts[1][0])
print("drafting changed nothing" if texts[0] == texts[1] else "drafting changed an output")
