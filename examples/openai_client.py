"""Streams an answer from `finwhale serve` with OpenAI's client.

finwhale serve &
python examples/openai_client.py [URL] [API_KEY]
"""

import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
key = sys.argv[2] if len(sys.argv) > 2 else "none"

client = OpenAI(base_url=f"{url}/v1", api_key=key)
model = client.models.list().data[0].id
print(f"{model}:")

stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "What is the capital of France?"}],
    temperature=0,
    max_tokens=50,
    stream=True,
    # DeepSeek's own field: whether the model thinks before it answers.
    extra_body={"thinking": {"type": "disabled"}},
)
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
print()
