"""Answers that the tests of the page give in place of the model."""

import json
from typing import Any

from playwright.sync_api import Page, Route

RICH = r"""## A heart

The **heart** beats *slowly*, see [a page](https://example.org) and `code`: $r = \frac{60}{t}$.

```python
def rate(seconds: float) -> float:
    return 60 / seconds  # each beat
```

| quantity | value |
|---|---:|
| mass | 70 |

$$\int_0^\infty e^{-x^2}\,dx = \frac{\sqrt{\pi}}{2}$$
"""
# Each is an attempt to become HTML, a link that runs a script, or a request to another host.
HOSTILE = r"""<script>window.broken = 1</script>

<img src=x onerror="window.broken = 2"> <svg onload="window.broken = 3"></svg>

[click](javascript:window.broken=4) [click](&#106;avascript:window.broken=5)
<javascript:window.broken=6>

![picture](https://example.org/pixel.png) ![picture](javascript:window.broken=7)

[data](data:text/html,<script>window.broken=8</script> "a\" onclick=\"window.broken=9")

```"><script>window.broken = 10</script>
</code></pre><script>window.broken = 11</script>
```

$\href{javascript:window.broken=12}{x}$ $\text{<img src=x onerror=window.broken=13>}$
$\style{background:url(https://example.org)}{x}$

<math><mtext><table><mglyph><style><img src=x onerror="window.broken=14">

| <iframe src="javascript:window.broken=15"> | `<b onclick=window.broken=16>` |
|---|---|
| <form action="https://example.org"><input autofocus onfocus=window.broken=17> | x |
"""


def chunks(
    text: str, calls: list[dict[str, Any]] | None = None, size: int = 40, finish: str = "stop"
) -> str:
    """A streamed answer of the chat endpoint."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": text[i : i + size]} for i in range(0, len(text), size)]
    if calls:
        deltas.append({"tool_calls": calls})
    made: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": one}]} for one in deltas]
    made.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    usage = {"prompt_tokens": 1203, "completion_tokens": 212}
    made.append(
        {"choices": [], "usage": usage | {"prompt_tokens_details": {"cached_tokens": 1024}}}
    )
    return "".join(f"data: {json.dumps(one)}\n\n" for one in made) + "data: [DONE]\n\n"


class Model:
    """Answers the page's requests with given streams, the last one again and again."""

    def __init__(self, page: Page, *answers: str) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._answers = list(answers)
        page.route("**/v1/chat/completions", self._answer)

    def _answer(self, route: Route) -> None:
        self.bodies.append(route.request.post_data_json)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        route.fulfill(status=200, content_type="text/event-stream", body=answer)
