"""Small stories from a template grammar, each with questions whose answers are in the story."""

# ruff: noqa: E501  (texts in one line are easier to read)
from __future__ import annotations

from dataclasses import dataclass
from random import Random

NAMES = {
    "he": [
        "Tom",
        "Max",
        "Ben",
        "Leo",
        "Sam",
        "Jack",
        "Finn",
        "Hugo",
        "Otto",
        "Felix",
        "Oscar",
        "Paul",
        "Karl",
        "Nils",
        "Amir",
        "Ravi",
        "Kofi",
        "Juan",
        "Pip",
        "Rusty",
    ],
    "she": [
        "Lily",
        "Anna",
        "Mia",
        "Emma",
        "Nora",
        "Rosa",
        "Clara",
        "Ida",
        "Maya",
        "Zoe",
        "Lena",
        "Ruth",
        "Alma",
        "Vera",
        "Sara",
        "Aisha",
        "Mei",
        "Luna",
        "Daisy",
        "Hazel",
    ],
}
ANIMALS = [
    "dog",
    "cat",
    "mouse",
    "rabbit",
    "fox",
    "bear",
    "owl",
    "frog",
    "duck",
    "horse",
    "lamb",
    "pig",
    "goat",
    "hen",
    "wolf",
    "lion",
    "elephant",
    "monkey",
    "whale",
    "turtle",
    "hedgehog",
    "squirrel",
    "sparrow",
    "crow",
    "bee",
    "ant",
    "beetle",
    "otter",
    "penguin",
    "donkey",
]
PEOPLE = [
    "boy",
    "girl",
    "farmer",
    "baker",
    "sailor",
    "king",
    "queen",
    "fisherman",
    "teacher",
    "painter",
    "doctor",
    "shepherd",
    "robot",
    "knight",
    "princess",
    "wizard",
]
FEMALE = {"girl", "queen", "princess", "hen"}
MALE = {"boy", "king", "knight", "wizard", "fisherman"}
TRAITS = [
    "little",
    "brave",
    "curious",
    "kind",
    "shy",
    "clever",
    "lazy",
    "old",
    "young",
    "cheerful",
    "quiet",
    "hungry",
    "lonely",
    "careful",
    "proud",
    "gentle",
    "busy",
]
PLACES = [
    "in a small village",
    "in a deep forest",
    "in a green valley",
    "in a house by the sea",
    "on an old farm",
    "in a town on a hill",
    "in a quiet garden",
    "in a castle in the mountains",
    "on an island in the sea",
    "in a cottage near the river",
]
GOALS = [
    "the forest",
    "the river",
    "the market",
    "the old bridge",
    "the lake",
    "the top of the hill",
    "the beach",
    "the garden",
    "the old mill",
]
THINGS = [
    "red ball",
    "golden key",
    "blue kite",
    "silver ring",
    "wooden boat",
    "warm hat",
    "shiny stone",
    "little bell",
    "green book",
    "lost map",
    "paper star",
    "small drum",
    "glass bottle",
    "old clock",
    "yellow umbrella",
    "white feather",
]
FOODS = [
    "bread",
    "honey",
    "apples",
    "cheese",
    "soup",
    "berries",
    "cake",
    "nuts",
    "pears",
    "porridge",
    "carrots",
    "milk",
]
WEATHERS = [
    ("sunny", "The sun was shining"), ("rainy", "It was raining"), ("windy", "A strong wind was blowing"),
    ("snowy", "Snow was falling"), ("foggy", "Fog lay over the fields"), ("warm", "The air was warm"),
]  # fmt: skip
FEELINGS = ["happy", "proud", "glad", "very happy", "full of joy"]
MORALS = [
    "And from that day on, they were the best of friends.",
    "They lived happily ever after.",
    "That night, {name} slept very well.",
    "{name} never forgot that day.",
    "And {he} learned that it is good to share.",
    "Since then, {he} has always been kind to strangers.",
    "And {he} learned that even the small can be strong.",
    "From then on, {name} was never lonely again.",
    "And everyone in the village told the story for years.",
]


@dataclass(frozen=True, kw_only=True)
class Story:
    kind: str  # "dog"
    name: str
    text: str
    questions: list[tuple[str, str]]


def article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def make_story(rng: Random, kind: str | None = None) -> Story:
    """A story of five to nine sentences about one character, with a friend and a plot."""
    kind = kind or rng.choice(ANIMALS + PEOPLE)
    he = "she" if kind in FEMALE else "he" if kind in MALE else rng.choice(["he", "she"])
    other = rng.choice([a for a in ANIMALS + PEOPLE if a != kind])
    friend_he = "she" if other in FEMALE else "he" if other in MALE else rng.choice(["he", "she"])
    name = rng.choice(NAMES[he])
    place, goal, thing, food = (
        rng.choice(PLACES),
        rng.choice(GOALS),
        rng.choice(THINGS),
        rng.choice(FOODS),
    )
    weather, sky = rng.choice(WEATHERS)
    words = {
        "kind": kind, "a_kind": article(kind), "name": name, "he": he, "He": he.capitalize(),
        "his": "his" if he == "he" else "her", "him": "him" if he == "he" else "her",
        "other": other, "an_other": article(other), "fhe": friend_he, "FHe": friend_he.capitalize(),
        "friend": rng.choice([n for n in NAMES[friend_he] if n != name]), "trait": rng.choice(TRAITS),
        "fhis": "his" if friend_he == "he" else "her", "fhim": "him" if friend_he == "he" else "her",
        "place": place, "goal": goal, "thing": thing, "a_thing": article(thing), "food": food, "sky": sky,
        "feeling": rng.choice(FEELINGS), "moral": "", "weather": weather,
    }  # fmt: skip
    words["a_trait"] = article(words["trait"])
    opening = rng.choice(OPENINGS)
    plot, questions = rng.choice(PLOTS)
    lines = [
        opening,
        rng.choice(DAYS_OUT),
        *(rng.choice(step.split("|")) for step in plot),
        rng.choice(MORALS),
    ]
    text = " ".join(line.format(**words) for line in lines)
    text = text[0].upper() + text[1:]
    asked = [(q.format(**words), a.format(**words)) for q, a in [*COMMON_QUESTIONS, *questions]]
    return Story(kind=kind, name=name, text=text, questions=asked)


OPENINGS = [
    "Once upon a time, there was {a_trait} {kind} named {name}. {He} lived {place}.",
    "Once there was {a_trait} {kind} called {name}, who lived {place}.",
    "Once, {place}, there lived {a_trait} {kind}. {His_name}",
    "There once was {a_kind} named {name}. {name} was {trait} and lived {place}.",
    "Long ago, {place}, there lived {a_trait} {kind} named {name}.",
    "{name} was {a_trait} {kind} who lived {place}.",
]
OPENINGS = [o.replace("{His_name}", "Everyone called {him} {name}.") for o in OPENINGS]
DAYS_OUT = [
    "One day, {name} went to {goal}. {sky}.",
    "One morning, {he} walked to {goal}. {sky}.",
    "{sky} when {name} set out for {goal} one day.",
    "One day {he} wanted to see {goal}, so {he} packed some {food} and left.",
    "Every day {he} went to {goal}, but this day was different. {sky}.",
]
COMMON_QUESTIONS = [
    ("What was the name of the {kind}?", "The name of the {kind} was {name}."),
    ("Where did {name} live?", "{name} lived {place}."),
    ("Where did {name} go?", "{name} went to {goal}."),
    ("Who was {name}?", "{name} was {a_trait} {kind}."),
    ("What was {name} like?", "{name} was {trait}."),
]
PLOTS: list[tuple[list[str], list[tuple[str, str]]]] = [
    (
        [
            "There {he} found {a_thing} in the grass.|On the way {he} found {a_thing} under a tree.",
            '"Who could have lost this?" {he} asked.|{He} looked around, but there was no one.',
            "{name} asked everyone in the village, and at last {he} met {an_other} named {friend}, who was crying.|"
            "Then {an_other} named {friend} came along. {FHe} looked very sad.",
            '"I have lost my {thing}," said {friend}.',
            'So {name} gave it back. "Thank you!" said {friend}, and {fhe} was {feeling}.|'
            "{name} smiled and gave the {thing} to {friend}. {FHe} was {feeling}.",
            "To say thank you, {friend} shared some {food} with {him}.|They sat down and ate {food} together.",
        ],
        [
            ("What did {name} find?", "{name} found {a_thing}."),
            ("Who had lost the {thing}?", "{friend} the {other} had lost the {thing}."),
            ("What did they eat?", "They ate {food}."),
        ],
    ),
    (
        [
            'On the way {he} heard a small voice. "Help!" it called.|Suddenly {he} heard someone call for help.',
            "It was {an_other} named {friend}, who had fallen into a deep hole.|"
            "{name} saw {an_other} named {friend}, stuck in the mud.",
            '"Do not worry," said {name}. "I will help you."|{name} was afraid, but {he} did not run away.',
            "{He} took a long branch and pulled with all {his} strength.|"
            "{He} found a rope, tied it to a tree, and pulled and pulled.",
            'At last {friend} was free. "You saved me!" {fhe} said.|Soon {friend} was safe again.',
            "The next day {friend} brought {him} a basket of {food}.|{friend} gave {him} {a_thing} as a present.",
        ],
        [
            ("Who needed help?", "{friend} the {other} needed help."),
            ("Who saved {friend}?", "{name} saved {friend}."),
            ("Was {name} kind?", "Yes, {name} was kind and helped {friend}."),
        ],
    ),
    (
        [
            "But soon the sky grew dark, and {he} lost the way.|But {he} walked too far and got lost.",
            '"Which way is home?" {he} thought. {He} was cold and afraid.|{He} sat down under a tree and began to cry.',
            "Then {an_other} named {friend} came by.|Just then {he} met {an_other} named {friend}.",
            '"I know the way," said {friend}. "Follow me."|"Come with me," said {friend}. "I will show you the way."',
            "They walked together through the night and sang songs.|They walked for a long time and talked about many things.",
            "When they came home, {name} was {feeling}. {He} gave {friend} some {food}.|"
            "At last {name} saw the lights of {his} home, and {he} was {feeling}.",
        ],
        [
            ("Who showed {name} the way?", "{friend} the {other} showed {name} the way."),
            ("Why was {name} afraid?", "{name} was afraid because {he} was lost."),
        ],
    ),
    (
        [
            "{He} wanted to bake a cake with {food}, but {he} had no flour.|{He} wanted to make a big pot of soup with {food}.",
            "So {he} went to {his} neighbour, {an_other} named {friend}.|So {he} asked {friend}, {an_other}, for help.",
            '"I will help you if I may have a piece," said {friend}.|"Let us do it together," said {friend}.',
            "They worked all afternoon, and soon it smelled wonderful.|They mixed and stirred until the evening.",
            "Then they invited everyone they knew.|They shared it with all their neighbours.",
            '"This is the best I have ever had!" said an old man.|There was enough for everyone, and they were {feeling}.',
        ],
        [
            ("Who helped {name}?", "{friend} the {other} helped {name}."),
            ("What was it made with?", "It was made with {food}."),
        ],
    ),
    (
        [
            "There {he} met {an_other} named {friend}, who laughed at {him}.|"
            "There {he} saw {friend}, a very proud {other}.",
            '"You are so slow," said {friend}. "I can run faster than the wind."|"No one is as fast as I am," said {friend}.',
            '"Then let us race to the big tree," said {name}.|So they agreed to race to the old bridge.',
            "{friend} ran ahead, but soon {fhe} stopped to eat some {food} and fell asleep.|"
            "{friend} was so sure to win that {fhe} lay down in the shade and slept.",
            "{name} did not stop. Step by step {he} went on.|{name} was slow, but {he} never gave up.",
            'When {friend} woke up, {name} had already won. "Well done," said {friend}.|'
            "{name} came first, and everyone cheered.",
        ],
        [
            ("Who won the race?", "{name} won the race."),
            ("Why did {friend} lose?", "{friend} lost because {fhe} fell asleep."),
        ],
    ),
    (
        [
            "There {he} saw {an_other} named {friend}, who sat all alone.|Near the path sat {an_other} named {friend}.",
            '"Why are you so sad?" asked {name}.|"What is wrong?" asked {name}.',
            '"No one wants to play with me," said {friend}.|"I have no friends here," said {friend} in a low voice.',
            '"Then I will play with you," said {name}.|"You can be my friend," said {name}.',
            "They played with {a_thing} until the sun went down.|They ate {food} and played all day long.",
            "When it was time to go home, both of them were {feeling}.|In the evening they promised to meet again.",
        ],
        [
            ("Why was {friend} sad?", "{friend} was sad because {fhe} had no friends."),
            ("Who was {friend}?", "{friend} was {an_other}."),
        ],
    ),
    (
        [
            "There {he} found a small box. Inside was {a_thing}.|{He} dug in the ground and found {a_thing}.",
            "It was magic! Whoever held it could make one wish.|When {he} touched it, it began to shine and speak.",
            '"What do you wish for?" asked a soft voice.|"I will give you one wish," it said.',
            '{name} thought for a long time. "I wish that no one here is hungry," {he} said.|'
            '"I want enough {food} for everyone," said {name}.',
            "And at once there was {food} on every table.|The next morning every house was full of {food}.",
            "All the people danced, and {name} was {feeling}.|Even {friend}, the old {other}, laughed and danced.",
        ],
        [
            ("What did {name} find?", "{name} found {a_thing}."),
            ("What did {name} wish for?", "{name} wished for enough food for everyone."),
        ],
    ),
    (
        [
            "A big storm came, and the bridge broke.|In the night a storm took the roof of the house.",
            '"What shall we do now?" cried {friend} the {other}.|{friend}, {an_other}, did not know what to do.',
            "{name} had an idea. {He} fetched wood, nails and {a_thing}.|{name} went to get wood and a hammer.",
            "They worked for three days, and many friends came to help.|Everyone helped, the big and the small.",
            "In the end it was stronger than before.|At last the work was done, and it was better than ever.",
            "They had a feast with {food} and music.|Then they all sat down and ate {food}.",
        ],
        [
            ("Who had an idea?", "{name} had an idea."),
            ("What did they eat at the end?", "They ate {food}."),
        ],
    ),
    (
        [
            "{He} wanted to learn to swim, but {he} was afraid of the water.|{He} wanted to learn to sing, but {he} was too shy.",
            '{friend}, {an_other}, said, "You must try a little every day."|'
            '"Do not be afraid," said {friend}, {an_other}. "I will stay with you."',
            "So {name} tried. The first time it went badly.|On the first day {he} could not do it at all.",
            "But {he} came back the next day, and the day after that.|But {name} did not give up. {He} tried again and again.",
            "After a week {he} could do it very well.|And one morning, all at once, {he} could do it.",
            '"You see?" said {friend}. "I knew you could do it."|{name} was {feeling}, and so was {friend}.',
        ],
        [
            ("Who helped {name}?", "{friend} the {other} helped {name}."),
            ("Did {name} give up?", "No, {name} did not give up."),
        ],
    ),
    (
        [
            "In the night someone had stolen the {food} from the kitchen.|When {he} came back, all the {food} was gone.",
            "There were small tracks on the floor, and {name} followed them.|{name} looked for tracks and found some in the dust.",
            "They led to {an_other} named {friend}, who hid behind a door.|"
            "Behind a bush sat {friend}, {an_other}, with a full mouth.",
            '"I am sorry," said {friend}. "I was so hungry."|"Please forgive me," said {friend}. "I had nothing to eat."',
            '{name} was not angry. "Next time, just ask," {he} said.|{name} thought for a moment and then forgave {fhim}.',
            "They ate the rest together.|Since then there was always a plate for {friend}.",
        ],
        [
            ("Who took the {food}?", "{friend} the {other} took the {food}."),
            ("Why did {friend} take it?", "{friend} took it because {fhe} was hungry."),
        ],
    ),
]
