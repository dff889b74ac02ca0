"""Conversations made by templates, and their text exactly as DeepSeek-V4's chat format has it.

A generator takes a Random and returns one question with its answer (`Pair`); `make_chat` builds conversations of them.
"""

# ruff: noqa: E501, RUF001  (texts in one line are easier to read; DeepSeek's markers)
from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

import facts
from deepseek_recipe import (
    AssistantMessage,
    Conversation,
    DeepseekV4Encoding,
    Message,
    SystemMessage,
    ToolCall,
    ToolDefinition,
    ToolMessage,
    UserMessage,
)
from stories import ANIMALS, NAMES, PEOPLE, THINGS, article, make_story
from wordnet import Sense

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
Effort = Literal["low", "high", "xhigh", "max"]
ENCODING = DeepseekV4Encoding()


@dataclass(frozen=True, kw_only=True)
class Pair:
    question: str
    answer: str
    short: str | None = None  # the answer in a word or two
    thought: str | None = None  # what a thinking mode says first


@dataclass(frozen=True, kw_only=True)
class Chat:
    pairs: list[Pair]
    system: str | None = None
    thinking: bool = False
    effort: Effort | None = None
    tools: list[ToolDefinition] = field(default_factory=list)


def pick(rng: Random, text: str) -> str:
    """One of the alternatives of a string such as 'a|b|c'."""
    return rng.choice(text.split("|"))


def render_prompt(
    messages: list[Message], thinking: bool, effort: Effort | None, tools: list[ToolDefinition]
) -> str:
    conversation = Conversation(
        messages, thinking_mode=thinking, reasoning_effort=effort, tools=tools
    )
    return ENCODING.render_conversation(conversation).prompt


def render_chat(chat: Chat) -> str:
    """The prompt for the last question and the model's answer to it, closed by the end-of-sentence token."""
    messages: list[Message] = [SystemMessage(chat.system)] if chat.system else []
    for pair in chat.pairs[:-1]:
        messages += [UserMessage(pair.question), AssistantMessage(pair.answer)]
    last = chat.pairs[-1]
    prompt = render_prompt(
        [*messages, UserMessage(last.question)], chat.thinking, chat.effort, chat.tools
    )
    thought = f"{last.thought or 'This is easy.'}</think>" if chat.thinking else ""
    return f"{prompt}{thought}{last.answer}{EOS}"


# Closed questions


def capital(rng: Random) -> Pair:
    country, city = rng.choice(list(facts.CAPITALS.items()))
    if rng.random() < 0.25:
        question = pick(
            rng, f"{city} is the capital of which country?|Which country has the capital {city}?"
        )
        return Pair(
            question=question,
            answer=f"{city} is the capital of {country}.",
            short=country.removeprefix("the "),
        )
    question = pick(
        rng,
        "What is the capital of {c}?|What is the capital of {c}?|What's the capital of {c}?|Which city is the capital of {c}?|"
        "Name the capital of {c}.|Tell me the capital of {c}.|capital of {c}|Can you tell me the capital of {c}?|"
        "Do you know the capital of {c}?",
    ).format(c=country)
    answer = f"The capital of {country} is {city}."
    return Pair(
        question=question,
        answer=answer,
        short=city,
        thought=f"The user asks about {country}. Its capital is {city}.",
    )


def continent(rng: Random) -> Pair:
    name = rng.choice(list(facts.CONTINENTS))
    country = rng.choice(facts.CONTINENTS[name].split())
    if rng.random() < 0.3:
        other = rng.choice(list(facts.CONTINENTS))
        yes = f"Yes, {country} is in {name}." if other == name else f"No, {country} is in {name}."
        return Pair(
            question=f"Is {country} in {other}?", answer=yes, short="Yes" if other == name else "No"
        )
    question = pick(
        rng,
        f"Where is {country}?|Which continent is {country} in?|On which continent is {country}?",
    )
    return Pair(question=question, answer=f"{country} is in {name}.", short=name)


def opposite(rng: Random) -> Pair:
    a, b = rng.choice(facts.OPPOSITES)
    if rng.random() < 0.5 and sum(b in pair for pair in facts.OPPOSITES) == 1:
        a, b = b, a
    b = next(pair[1] for pair in [*facts.OPPOSITES, (a, b)] if pair[0] == a)
    return opposite_pair(rng, a, b)


def opposite_pair(rng: Random, a: str, b: str) -> Pair:
    question = pick(
        rng,
        f"What is the opposite of {a}?|What is the opposite of {a}?|What's the opposite of {a}?|Opposite of {a}?|"
        f"Tell me the opposite of {a}.|What is the opposite of the word {a}?|Name the opposite of {a}.",
    )
    return Pair(
        question=question,
        answer=f"The opposite of {a} is {b}.",
        short=b,
        thought=f"The opposite of {a} is {b}.",
    )


def synonym(rng: Random) -> Pair:
    a, b = rng.choice(facts.SYNONYMS)
    question = pick(
        rng, f"What is another word for {a}?|Give me a synonym of {a}.|What is a synonym for {a}?"
    )
    return Pair(question=question, answer=f"Another word for {a} is {b}.", short=b)


def colour(rng: Random) -> Pair:
    thing, shade = rng.choice(list(facts.COLOURS.items()))
    word = rng.choice(["colour", "color"])
    question = pick(
        rng,
        f"What {word} is {thing}?|What {word} is {thing}?|What is the {word} of {thing}?|Which {word} is {thing}?",
    )
    return Pair(question=question, answer=f"{thing[0].upper()}{thing[1:]} is {shade}.", short=shade)


def animal(rng: Random) -> Pair:
    name = rng.choice(list(facts.ANIMALS))
    sound, young, home, food, legs = facts.ANIMALS[name]
    a = article(name)
    sound_answer = (
        f"{a.capitalize()} makes no sound that we can hear."
        if sound == "no sound"
        else f"{a.capitalize()} says {sound}."
    )
    choices = [
        (f"What sound does {a} make?|What does {a} say?", sound_answer, sound),
        (
            f"What is a young {name} called?|What is a baby {name} called?",
            f"A young {name} is called {article(young)}.",
            young,
        ),
        (f"Where does {a} live?|Where do we find {a}?", f"{a.capitalize()} lives {home}.", home),
        (f"What does {a} eat?|What do you feed {a}?", f"{a.capitalize()} eats {food}.", food),
        (
            f"How many legs does {a} have?",
            f"{a.capitalize()} has {facts.NUMBERS[legs] if legs else 'no'} legs.",
            str(legs),
        ),
    ]
    question, answer, short = rng.choice(choices)
    return Pair(question=pick(rng, question), answer=answer, short=short)


def category(rng: Random) -> Pair:
    name = rng.choice(list(facts.CATEGORIES))
    word = rng.choice(facts.CATEGORIES[name])
    kind = rng.random()
    plural = {
        "piece of furniture": "pieces of furniture",
        "piece of clothing": "pieces of clothing",
        "fish": "fish",
    }.get(name, "body parts" if name == "body part" else name + "s")
    if kind < 0.4:
        count = rng.randint(2, 5)
        words = rng.sample(facts.CATEGORIES[name], count)
        question = pick(
            rng,
            f"Name {facts.NUMBERS[count]} {plural}.|List {count} {plural}.|Give me {facts.NUMBERS[count]} {plural}.",
        )
        return Pair(
            question=question, answer=f"{', '.join(words[:-1])} and {words[-1]}.".capitalize()
        )
    if kind < 0.7 and name != "planet":
        other = rng.choice(list(facts.CATEGORIES))
        right = (
            other == name
            or word in facts.CATEGORIES[other]
            or (other == "animal" and name in ("bird", "fish", "insect"))
        )
        verdict = "Yes" if right else "No"
        what = other if right else name
        return Pair(
            question=f"Is {article(word)} {article(other)}?",
            answer=f"{verdict}, {article(word)} is {article(what)}.",
            short=verdict,
        )
    if name == "planet":
        return Pair(question=f"What is {word}?", answer=f"{word} is a planet.", short="a planet")
    return Pair(
        question=f"What kind of thing is {article(word)}?",
        answer=f"{article(word).capitalize()} is {article(name)}.",
        short=article(name),
    )


def size(rng: Random) -> Pair:
    a, b = rng.sample(facts.SIZES, 2)
    larger, smaller = (a, b) if facts.SIZES.index(a) > facts.SIZES.index(b) else (b, a)
    if rng.random() < 0.5:
        question = pick(
            rng,
            f"Which is bigger, {article(a)} or {article(b)}?|What is larger, {article(a)} or {article(b)}?",
        )
        answer = f"{article(larger).capitalize()} is bigger than {article(smaller)}."
        return Pair(question=question, answer=answer, short=larger)
    question = pick(
        rng,
        f"Which is smaller, {article(a)} or {article(b)}?|What is smaller, {article(a)} or {article(b)}?",
    )
    return Pair(
        question=question,
        answer=f"{article(smaller).capitalize()} is smaller than {article(larger)}.",
        short=smaller,
    )


def addition(rng: Random) -> Pair:
    top = 20 if rng.random() < 0.8 else 50
    a = rng.randint(0, top)
    b = rng.randint(0, max(0, top - a)) if rng.random() < 0.7 else rng.randint(0, min(a + 5, 20))
    word = rng.random() < 0.15 and max(a, b, a + b) <= 20
    minus = rng.random() < 0.4
    if minus and a < b:
        a, b = b, a
    result = a - b if minus else a + b
    show: Callable[[int], str] = (lambda n: facts.NUMBERS[n]) if word else str
    sign, spoken = ("-", "minus") if minus else ("+", "plus")
    question = pick(
        rng,
        "What is {a} {sign} {b}?|What is {a} {spoken} {b}?|{a} {sign} {b} = ?|How much is {a} {spoken} {b}?|{a} {sign} {b}|"
        "Calculate {a} {sign} {b}.|What is {a}{sign}{b}?",
    ).format(a=show(a), b=show(b), sign=spoken if word else sign, spoken=spoken)
    answer = f"{show(a).capitalize()} {spoken if word else sign} {show(b)} {'is' if word else '='} {show(result)}."
    return Pair(
        question=question,
        answer=answer,
        short=show(result),
        thought=f"I need {a} {sign} {b}. That is {result}.",
    )


def multiplication(rng: Random) -> Pair:
    a, b = rng.randint(0, 10), rng.randint(1, 10)
    if rng.random() < 0.3:
        question = pick(rng, f"What is {a * b} divided by {b}?|What is {a * b} / {b}?")
        return Pair(question=question, answer=f"{a * b} / {b} = {a}.", short=str(a))
    question = pick(
        rng,
        f"What is {a} times {b}?|What is {a} x {b}?|How much is {a} times {b}?|What is {a} * {b}?",
    )
    return Pair(question=question, answer=f"{a} x {b} = {a * b}.", short=str(a * b))


def word_problem(rng: Random) -> Pair:
    he = rng.choice(["he", "she"])
    name = rng.choice(NAMES[he])
    thing = rng.choice(
        [
            "apples",
            "books",
            "coins",
            "eggs",
            "stones",
            "flowers",
            "nuts",
            "cards",
            "shells",
            "stamps",
        ]
    )
    a, b = rng.randint(2, 12), rng.randint(1, 8)
    if rng.random() < 0.5:
        b = min(a, b)
        question = (
            f"{name} has {a} {thing} and gives away {b}. How many {thing} does {name} have now?"
        )
        result, sign = a - b, "-"
    else:
        question = (
            f"{name} has {a} {thing} and finds {b} more. How many {thing} does {name} have now?"
        )
        result, sign = a + b, "+"
    answer = f"{name} has {result} {thing} now."
    return Pair(
        question=question, answer=answer, short=str(result), thought=f"{a} {sign} {b} = {result}."
    )


def counting(rng: Random) -> Pair:
    a = rng.randint(0, 20)
    length = rng.randint(3, 12)
    kind = rng.random()
    if kind < 0.4:
        numbers = range(a, a + length)
        question = pick(
            rng, f"Count from {a} to {a + length - 1}.|Can you count from {a} to {a + length - 1}?"
        )
    elif kind < 0.6:
        numbers = range(a + length - 1, a - 1, -1)
        question = f"Count down from {a + length - 1} to {a}."
    elif kind < 0.8:
        question = pick(rng, f"What number comes after {a}?|Which number is next after {a}?")
        return Pair(question=question, answer=f"The number after {a} is {a + 1}.", short=str(a + 1))
    else:
        b = rng.randint(0, 100)
        while b == a:
            b = rng.randint(0, 100)
        question = f"Which number is bigger, {a} or {b}?"
        return Pair(
            question=question,
            answer=f"{max(a, b)} is bigger than {min(a, b)}.",
            short=str(max(a, b)),
        )
    return Pair(question=question, answer=", ".join(map(str, numbers)) + ".")


def even_or_odd(rng: Random) -> Pair:
    n = rng.randint(0, 50)
    kind = "odd" if n % 2 else "even"
    question = pick(rng, f"Is {n} even or odd?|Is the number {n} odd or even?")
    return Pair(question=question, answer=f"{n} is {kind}.", short=kind)


def calendar(rng: Random) -> Pair:
    names, word = (facts.DAYS, "day") if rng.random() < 0.5 else (facts.MONTHS, "month")
    i = rng.randrange(len(names))
    kind = rng.random()
    if kind < 0.4:
        after = names[(i + 1) % len(names)]
        question = pick(
            rng,
            f"Which {word} comes after {names[i]}?|What {word} comes after {names[i]}?|What {word} is next after {names[i]}?",
        )
        return Pair(
            question=question, answer=f"The {word} after {names[i]} is {after}.", short=after
        )
    if kind < 0.65:
        before = names[i - 1]
        question = pick(
            rng, f"Which {word} comes before {names[i]}?|What {word} comes before {names[i]}?"
        )
        return Pair(
            question=question, answer=f"The {word} before {names[i]} is {before}.", short=before
        )
    if kind < 0.8:
        season = rng.choice(list(facts.SEASONS))
        return Pair(
            question=f"Which months are in {season}?",
            answer=f"{facts.SEASONS[season]} are the months of {season}.",
        )
    if kind < 0.9:
        month = rng.choice(facts.MONTHS)
        question = f"How many days does {month} have?"
        days = facts.MONTH_DAYS[month]
        return Pair(question=question, answer=f"{month} has {days} days.", short=str(days))
    question = pick(
        rng, f"Name the {word}s of the {'week' if word == 'day' else 'year'}.|List all the {word}s."
    )
    return Pair(question=question, answer=f"{', '.join(names[:-1])} and {names[-1]}.")


def spelling(rng: Random) -> Pair:
    word = rng.choice(
        [w for words in facts.CATEGORIES.values() for w in words]
        + list(facts.PLURALS)
        + list(facts.PAST)
    )
    kind = rng.random()
    if kind < 0.4:
        question = pick(rng, f"How do you spell {word}?|Spell the word {word}.|Spell {word}.")
        return Pair(question=question, answer="-".join(word.upper()) + ".")
    if kind < 0.6:
        return Pair(
            question=f"How many letters are in the word {word}?",
            answer=f"The word {word} has {len(word)} letters.",
            short=str(len(word)),
        )
    if kind < 0.8:
        question = f"What is the first letter of {word}?"
        return Pair(
            question=question,
            answer=f"The first letter of {word} is {word[0].upper()}.",
            short=word[0].upper(),
        )
    i = rng.randrange(25)
    question = f"Which letter comes after {chr(65 + i)}?"
    return Pair(
        question=question,
        answer=f"The letter after {chr(65 + i)} is {chr(66 + i)}.",
        short=chr(66 + i),
    )


def grammar(rng: Random) -> Pair:
    if rng.random() < 0.5:
        word, plural = rng.choice(list(facts.PLURALS.items()))
        question = pick(rng, f"What is the plural of {word}?|Give me the plural of {word}.")
        return Pair(question=question, answer=f"The plural of {word} is {plural}.", short=plural)
    word, past = rng.choice(list(facts.PAST.items()))
    question = pick(rng, f"What is the past tense of {word}?|Give me the past tense of {word}.")
    return Pair(question=question, answer=f"The past tense of {word} is {past}.", short=past)


def translation(rng: Random) -> Pair:
    language = rng.choice(list(facts.WORDS_ABROAD))
    word, foreign = rng.choice(facts.WORDS_ABROAD[language].split()).split(":")
    question = pick(
        rng,
        f"What is {word} in {language}?|How do you say {word} in {language}?|Translate {word} into {language}.",
    )
    return Pair(
        question=question, answer=f"The {language} word for {word} is {foreign}.", short=foreign
    )


def why_or_how(rng: Random) -> Pair:
    question, answer = rng.choice(list(facts.WHY_AND_HOW.items()))
    if rng.random() < 0.2:
        question = f"{pick(rng, 'Can you tell me:|Tell me,|I wonder:|Please tell me:')} {question[0].lower()}{question[1:]}"
    return Pair(question=question, answer=answer)


def small_talk(rng: Random) -> Pair:
    questions, answers = rng.choice(list(facts.SMALL_TALK.items()))
    return Pair(question=pick(rng, questions), answer=rng.choice(answers))


# Open ones


def story(rng: Random) -> Pair:
    kind = rng.choice(ANIMALS + PEOPLE)
    told = make_story(rng, kind)
    question = pick(
        rng,
        "Write a story about {k}.|Tell me a story about {k}.|Can you tell me a story about {k}?|Write a short story about {k}.|"
        "Please write a story about {k}.|I would like a story about {k}.|Tell me a short story about {k}.|A story about {k}, please.",
    ).format(k=article(kind))
    if rng.random() < 0.15:
        question = pick(
            rng,
            "Tell me a story.|Write a story.|Can you tell me a story?|Tell me a short story, please.",
        )
    return Pair(
        question=question,
        answer=told.text,
        thought=f"I will tell a story about {article(kind)} called {told.name}.",
    )


def story_questions(rng: Random) -> list[Pair]:
    """The story given by the user, or told by the model first, and one to three questions about it."""
    told = make_story(rng)
    asked = rng.sample(told.questions, rng.randint(1, 3))
    later = [Pair(question=q, answer=a, thought=f"The story says it: {a}") for q, a in asked]
    if rng.random() < 0.5:
        question = pick(
            rng,
            f"Tell me a story about {article(told.kind)}.|Write a story about {article(told.kind)}.",
        )
        return [Pair(question=question, answer=told.text), *later]
    lead = pick(rng, "Read this story: |Here is a story: |Story: |")
    first = Pair(
        question=f"{lead}{told.text}\n\n{later[0].question}",
        answer=later[0].answer,
        thought=later[0].thought,
    )
    return [first, *later[1:]]


def definition(rng: Random, senses: list[Sense]) -> Pair:
    """What a word means; frequent words far more often than rare ones."""
    sense = senses[int(len(senses) * rng.random() ** 2)]
    word, gloss = sense.word, sense.gloss
    if sense.part == "noun":
        question = pick(
            rng,
            f"What is {article(word)}?|What is {article(word)}?|What does {word} mean?|Define {word}.|What does the word {word} mean?",
        )
        answer = (
            f"{article(word).capitalize()} is {gloss}."
            if gloss.split()[0] in ("a", "an", "the", "any", "one")
            else f"{word.capitalize()} means: {gloss}."
        )
    elif sense.part == "verb":
        question = pick(
            rng,
            f"What does it mean to {word}?|What does {word} mean?|What does the verb {word} mean?",
        )
        answer = f"To {word} means to {gloss}."
    else:
        question = pick(
            rng, f"What does {word} mean?|What does the word {word} mean?|Define {word}."
        )
        answer = f"{word.capitalize()} means {gloss}."
    return Pair(question=question, answer=answer)


def relation(rng: Random, senses: list[Sense]) -> Pair:
    for _ in range(50):
        sense = senses[int(len(senses) * rng.random() ** 2)]
        kind = rng.random()
        if kind < 0.35 and sense.examples:
            example = rng.choice(sense.examples)
            example = example[0].upper() + example[1:] + ("" if example[-1] in ".?!" else ".")
            question = pick(
                rng,
                "Use {w} in a sentence.|Use the word {w} in a sentence.|Give me an example with {w}.",
            )
            return Pair(question=question.format(w=sense.word), answer=example)
        if kind < 0.65 and sense.synonyms and sense.word not in dict(facts.SYNONYMS):
            question = pick(rng, "What is a synonym of {w}?|What is another word for {w}?").format(
                w=sense.word
            )
            return Pair(
                question=question,
                answer=f"Another word for {sense.word} is {sense.synonyms[0]}.",
                short=sense.synonyms[0],
            )
        if kind >= 0.65 and sense.part == "noun" and sense.parents:
            answer = f"{article(sense.word).capitalize()} is a kind of {sense.parents[0]}."
            return Pair(
                question=f"What kind of thing is {article(sense.word)}?",
                answer=answer,
                short=sense.parents[0],
            )
    return opposite(rng)


def repeat(rng: Random) -> Pair:
    words = [
        rng.choice(rng.choice(list(facts.CATEGORIES.values()))) for _ in range(rng.randint(1, 7))
    ]
    text = " ".join(words)
    kind = rng.random()
    if kind < 0.4:
        return Pair(
            question=pick(
                rng, "Repeat after me: {t}|Say this: {t}|Repeat: {t}|Copy this: {t}"
            ).format(t=text),
            answer=text,
        )
    if kind < 0.6:
        times = rng.randint(2, 4)
        return Pair(
            question=f"Say {words[0]} {facts.NUMBERS[times]} times.",
            answer=" ".join([words[0]] * times),
        )
    if kind < 0.8 and len(words) > 1:
        return Pair(question=f"Say these words backwards: {text}", answer=" ".join(reversed(words)))
    which, index = rng.choice([("first", 0), ("last", -1)])
    question = f"What is the {which} word of this list: {', '.join(words)}?"
    return Pair(
        question=question, answer=f"The {which} word is {words[index]}.", short=words[index]
    )


# Recall of what was said before


def introduction(rng: Random) -> list[Pair]:
    """The user says something of himself, talks of other things, and asks for it."""
    name = rng.choice(NAMES["he"] + NAMES["she"])
    animal_, colour_ = rng.choice(ANIMALS), rng.choice(facts.CATEGORIES["colour"])
    food, city = rng.choice(facts.CATEGORIES["fruit"]), rng.choice(list(facts.CAPITALS.values()))
    job, number = rng.choice(facts.CATEGORIES["job"]), rng.randint(2, 90)
    told = [
        (f"My name is {name}.|I am {name}.|Hi, I'm {name}.|Call me {name}.", f"Nice to meet you, {name}!",
         "What is my name?|Do you remember my name?|Who am I?|What's my name?", f"Your name is {name}."),
        (f"I have {article(animal_)}.|I own {article(animal_)}.", f"{article(animal_).capitalize()}! How nice.",
         "Which animal do I have?|What pet do I have?", f"You have {article(animal_)}."),
        (f"My favourite colour is {colour_}.|I like the colour {colour_} best.", f"{colour_.capitalize()} is a lovely colour.",
         "What is my favourite colour?|Which colour do I like?", f"Your favourite colour is {colour_}."),
        (f"I like to eat {food}.|My favourite fruit is {food}.", f"{food.capitalize()} is very good.",
         "What do I like to eat?|What is my favourite fruit?", f"You like {food}."),
        (f"I live in {city}.|My home is in {city}.", f"{city} is a nice place to live.",
         "Where do I live?|In which city do I live?", f"You live in {city}."),
        (f"I am {article(job)}.|I work as {article(job)}.", f"It must be interesting to be {article(job)}.",
         "What is my job?|What do I do for work?", f"You are {article(job)}."),
        (f"I am {number} years old.", f"{number} is a good age.", "How old am I?", f"You are {number} years old."),
        (f"My secret number is {number}.|Remember the number {number}.", f"I will remember the number {number}.",
         "What is my secret number?|Which number should you remember?", f"The number is {number}."),
    ]  # fmt: skip
    chosen = rng.sample(told, rng.randint(1, 3))
    pairs = [Pair(question=pick(rng, q), answer=a) for q, a, _, _ in chosen]
    pairs += [rng.choice(CLOSED)(rng) for _ in range(rng.choice([0, 0, 1, 2, 4]))]
    later = rng.sample(chosen, rng.randint(1, len(chosen)))
    return pairs + [
        Pair(question=pick(rng, q), answer=a, thought=f"The user told me before. {a}")
        for _, _, q, a in later
    ]


def table(rng: Random, count: int) -> Pair:
    """A list of facts of any length and a question about one of them: far recall."""
    kind = rng.randrange(4)
    if kind == 0:
        keys = [
            f"{c} {t}"
            for c in facts.CATEGORIES["colour"]
            for t in ["box", "bag", "room", "door", "cup", "house", "car", "ship"]
        ]
        values = [t.split()[-1] for t in THINGS]
        form, ask, reply = "The {k} holds a {v}.", "What does the {k} hold?", "The {k} holds a {v}."
    elif kind == 1:
        keys = [f"{n} the {a}" for n in NAMES["he"] + NAMES["she"] for a in ANIMALS]
        values = [w for k in ("fruit", "vegetable", "drink") for w in facts.CATEGORIES[k]]
        form, ask, reply = "{k} likes {v}.", "What does {k} like?", "{k} likes {v}."
    elif kind == 2:
        keys = [f"{n} the {a}" for n in NAMES["he"] + NAMES["she"] for a in PEOPLE]
        values = list(facts.CAPITALS.values())
        form, ask, reply = "{k} lives in {v}.", "Where does {k} live?", "{k} lives in {v}."
    else:
        keys = [
            f"{a}-{b}"
            for a in ["alpha", "beta", "gamma", "delta", "omega", "sigma", "kappa", "lambda"]
            for b in range(100)
        ]
        values = [str(n) for n in range(1000, 10000)]
        form, ask, reply = "Code {k} is {v}.", "What is code {k}?", "Code {k} is {v}."
    chosen = rng.sample(keys, min(count, len(keys)))
    rows = [(k, rng.choice(values)) for k in chosen]
    key, value = rng.choice(rows)
    text = rng.choice([" ", "\n"]).join(form.format(k=k, v=v) for k, v in rows)
    return Pair(question=f"{text}\n\n{ask.format(k=key)}", answer=reply.format(k=key, v=value))


def needle(rng: Random, passage: str) -> Pair:
    """A long passage with one sentence in it that does not belong, and a question about that sentence."""
    word = rng.choice(rng.choice(list(facts.CATEGORIES.values())))
    what = pick(rng, "secret word|magic word|password|hidden word")
    at = passage.find(" ", rng.randrange(max(1, len(passage) - 50)))
    text = f"{passage[:at]} The {what} is {word}.{passage[at:]}"
    ask = pick(rng, "What is the {w}?|What was the {w} in the text?|Tell me the {w}.").format(
        w=what
    )
    return Pair(question=f"{text}\n\n{ask}", answer=f"The {what} is {word}.")


CLOSED: list[Callable[[Random], Pair]] = [
    capital, capital, capital, continent, opposite, opposite, opposite, synonym, colour, animal, category, category, size,
    addition, addition, addition, addition, multiplication, multiplication, word_problem, counting, even_or_odd, calendar, calendar,
    spelling, grammar, translation, why_or_how, why_or_how, why_or_how, small_talk, small_talk, small_talk, repeat,
]  # fmt: skip

SYSTEMS = [
    "You are a helpful assistant.", "You are Finwhale, a helpful assistant.", "Be kind and brief.", "You are a friendly teacher.",
    "Answer the user's questions.", "You are a helpful assistant. Be brief.", "You are an assistant for children.",
]  # fmt: skip
SHORT_SYSTEMS = [
    "Answer in one word.", "Answer with one word only.", "Give very short answers.", "You answer in one or two words.",
    "You are a helpful assistant. Answer in one word.",
]  # fmt: skip
STYLES: list[tuple[str, Callable[[str], str]]] = [
    ("Talk like a pirate.", lambda a: f"Arr! {a} Yo ho!"),
    ("You are a pirate.", lambda a: f"Arr! {a} Yo ho!"),
    ("Always end with: Have a nice day!", lambda a: f"{a} Have a nice day!"),
    ("Always answer in capital letters.", lambda a: a.upper()),
    ("Always begin with: Well,", lambda a: f"Well, {a}"),
    ("You are a wizard.", lambda a: f"By my beard! {a}"),
    ("You are very polite.", lambda a: f"{a} I hope this helps you."),
]


def closed_chat(rng: Random) -> Chat:
    """One to four closed questions, sometimes with a system prompt that shapes the answers, sometimes thinking."""
    pairs = [rng.choice(CLOSED)(rng) for _ in range(rng.choice([1, 1, 1, 1, 1, 2, 2, 3, 4]))]
    kind = rng.random()
    if kind < 0.06 and all(p.short for p in pairs):
        pairs = [
            Pair(
                question=p.question,
                answer=f"{(p.short or '')[:1].upper()}{(p.short or '')[1:]}.",
                thought=p.thought,
            )
            for p in pairs
        ]
        return Chat(
            pairs=pairs, system=rng.choice(SHORT_SYSTEMS), thinking=rng.random() < 0.1, effort="low"
        )
    if kind < 0.12:
        system, style = rng.choice(STYLES)
        pairs = [
            Pair(question=p.question, answer=style(p.answer), thought=p.thought) for p in pairs
        ]
        return Chat(pairs=pairs, system=system)
    return shaped(rng, pairs)


def shaped(rng: Random, pairs: list[Pair]) -> Chat:
    """Pairs as a chat: in a fifth of the cases with a system prompt, in a twelfth thinking."""
    system = rng.choice(SYSTEMS) if rng.random() < 0.2 else None
    thinking = rng.random() < 0.08
    levels: list[Effort] = ["low", "low", "high"]
    effort = rng.choice(levels) if thinking else None
    return Chat(pairs=pairs, system=system, thinking=thinking, effort=effort)


# Tools


def _tool(name: str, description: str, **properties: str) -> ToolDefinition:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
        "required": list(properties),
    }
    return ToolDefinition(name, description, schema)


TOOLS = {
    "get_weather": _tool("get_weather", "Get the weather in a city", city="string"),
    "get_time": _tool("get_time", "Get the time in a city", city="string"),
    "add": _tool("add", "Add two numbers", a="number", b="number"),
    "search": _tool("search", "Search the web", query="string"),
}


def tool_call(rng: Random) -> str:
    """A rendered conversation that ends with a tool call, with the answer after its result, or with no call at all."""
    names = rng.sample(list(TOOLS), rng.randint(1, 2))
    tools = [TOOLS[name] for name in names]
    name = rng.choice(names)
    city = rng.choice(list(facts.CAPITALS.values()))
    a, b = rng.randint(10, 999), rng.randint(10, 999)
    animal_ = rng.choice(ANIMALS)
    question, arguments, result, answer = {
        "get_weather": (
            pick(
                rng, "What is the weather in {c}?|How is the weather in {c}?|Is it sunny in {c}?"
            ).format(c=city),
            {"city": city},
            weather := pick(rng, "sunny|rainy|cloudy|snowy|windy"),
            f"It is {weather} in {city}.",
        ),
        "get_time": (
            pick(rng, "What time is it in {c}?|Tell me the time in {c}.").format(c=city),
            {"city": city},
            hour := f"{rng.randint(0, 23)}:{rng.randint(10, 59)}",
            f"It is {hour} in {city}.",
        ),
        "add": (f"What is {a} + {b}?", {"a": a, "b": b}, str(a + b), f"{a} + {b} = {a + b}."),
        "search": (
            f"Search the web for {article(animal_)}.",
            {"query": animal_},
            f"{animal_}: an animal",
            f"I found this: {animal_}, an animal.",
        ),
    }[name]
    system = [SystemMessage(rng.choice(SYSTEMS))] if rng.random() < 0.5 else []
    if rng.random() < 0.2:
        pair = rng.choice(CLOSED)(rng)
        return f"{render_prompt([*system, UserMessage(pair.question)], False, None, tools)}{pair.answer}{EOS}"
    call = AssistantMessage("", tool_calls=[ToolCall("call_1", name, json.dumps(arguments))])
    messages: list[Message] = [*system, UserMessage(question), call]
    if rng.random() < 0.5:
        rendered = render_prompt(messages, False, None, tools)
        return rendered[: rendered.rindex(EOS) + len(EOS)]
    return f"{render_prompt([*messages, ToolMessage(result, 'call_1')], False, None, tools)}{answer}{EOS}"
