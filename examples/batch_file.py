"""Answers a file of requests, as `finwhale run-batch` and OpenAI's batches do.

python examples/batch_file.py [PATH]
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

QUESTIONS = {
    "france": "What is the capital of France?",
    "italy": "What is the capital of Italy?",
    "whale": "What is a whale?",
}

with tempfile.TemporaryDirectory() as folder:
    source, output = Path(folder, "in.jsonl"), Path(folder, "out.jsonl")
    with source.open("w") as file:
        for custom_id, question in QUESTIONS.items():
            message = {"role": "user", "content": question}
            body = {"model": "m", "messages": [message], "temperature": 0, "max_tokens": 40}
            line = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions"}
            file.write(json.dumps({**line, "body": body}) + "\n")

    command = [sys.executable, "-m", "finwhale", "run-batch", str(source), str(output)]
    checkpoint = ["--model", sys.argv[1]] if len(sys.argv) > 1 else []
    # Stopped and run again, the same command continues: each line gets one result.
    names = ["--served-model-name", "m", "--no-thinking"]
    subprocess.run([*command, *checkpoint, *names], check=True)

    # Results are in the order in which they finish, so look them up by custom_id.
    results = {one["custom_id"]: one for one in map(json.loads, output.open())}

for custom_id, question in QUESTIONS.items():
    answer = results[custom_id]["response"]["body"]["choices"][0]["message"]["content"]
    print(f"{question} {answer}")
