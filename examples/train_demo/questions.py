"""What evaluate.py asks: closed questions with a word that a right answer contains, and prompts for samples."""

# ruff: noqa: E501  (texts in one line are easier to read)
from __future__ import annotations

_CAPITALS = (
    "France:Paris Germany:Berlin Italy:Rome Spain:Madrid Japan:Tokyo China:Beijing Russia:Moscow Egypt:Cairo Canada:Ottawa "
    "Norway:Oslo Greece:Athens Peru:Lima Kenya:Nairobi Australia:Canberra Poland:Warsaw Cuba:Havana"
)
_SUMS = "2+3 7+5 9+9 1+0 12+6 13+7 4+8 10+10 8-3 15-6 20-1 17-9 6-6 11-4 18-12 14+5"
_OPPOSITES = (
    "hot:cold big:small up:down day:night old:young rich:poor happy:sad fast:slow black:white open:closed wet:dry early:late "
    "love:hate win:lose north:south light:dark"
)
_OTHERS = [
    ("What day comes after Monday?", "Tuesday"), ("Which month comes after April?", "May"),
    ("What colour is the sky?", "blue"), ("What colour is snow?", "white"), ("What does a cow say?", "moo"),
    ("What is a baby dog called?", "puppy"), ("How many legs does a spider have?", "eight"),
    ("What is the plural of mouse?", "mice"), ("What is the past tense of go?", "went"),
    ("Who wrote Hamlet?", "Shakespeare"), ("How many days are in a week?", "seven"), ("Where is Brazil?", "South America"),
    ("What is water in French?", "eau"), ("Which is bigger, a mouse or a horse?", "A horse is bigger"),
    ("What is 6 times 7?", "42"), ("Is 7 even or odd?", "odd"),
]  # fmt: skip

CLOSED: list[tuple[str, str]] = [
    *(
        (f"What is the capital of {c}?", a)
        for c, a in (pair.split(":") for pair in _CAPITALS.split())
    ),
    *(
        (f"What is {s.replace('+', ' + ').replace('-', ' - ')}?", f"= {eval(s)}.")
        for s in _SUMS.split()
    ),
    *(
        (f"What is the opposite of {w}?", f"is {a}.")
        for w, a in (pair.split(":") for pair in _OPPOSITES.split())
    ),
    *_OTHERS,
]
CHATS = [
    "Hello!", "Who are you?", "Write a story about a dog.", "Tell me a story about a whale.", "Why is the sky blue?",
    "What is an anchor?", "What is a telescope?", "Use the word garden in a sentence.", "Name three fruits.",
    "How do I make tea?", "Tell me a joke.", "Count from 3 to 9.", "Repeat after me: red apple blue sky",
    "What is the meaning of life?", "Write a poem about the sea.", "Can you help me with my homework?",
]  # fmt: skip
CONTINUATIONS = [
    "Once upon a time, there was a",
    "Call me Ishmael. Some years ago",
    "HAMLET\nTo be, or not to be",
    "In the beginning God",
]
