"""Restricts outputs to a JSON schema and to a regular expression.

python examples/structured_output.py [PATH]
"""

import json
import sys

from finwhale import LLM, SamplingParams
from finwhale.chat.grammar import json_guide, regex_guide

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "mood": {"enum": ["happy", "sad", "angry"]},
    },
    "required": ["name", "age", "mood"],
    "additionalProperties": False,
}

llm = LLM(*sys.argv[1:])
question = [{"role": "user", "content": "Invent a person, as JSON."}]

params = SamplingParams(temperature=0, max_tokens=100, guide=json_guide(SCHEMA))
message = llm.chat(question, params)[0].outputs[0].message
assert message is not None
# Every token fits the schema, so this parses unless max_tokens cuts it off.
print(json.loads(message["content"]))

params = SamplingParams(
    temperature=0, max_tokens=20, guide=regex_guide("[0-9]{4}-[0-9]{2}-[0-9]{2}")
)
print(llm.generate("The letter was written on ", params)[0].outputs[0].text)
