"""Tables that the chat generators draw on. All hand-written: common knowledge in common words."""

# ruff: noqa: E501  (texts in one line are easier to read)
from __future__ import annotations

CAPITALS = dict(
    line.split(":")
    for line in """
France:Paris;Germany:Berlin;Italy:Rome;Spain:Madrid;Portugal:Lisbon;the United Kingdom:London;Ireland:Dublin
Belgium:Brussels;the Netherlands:Amsterdam;Luxembourg:Luxembourg;Switzerland:Bern;Austria:Vienna;Poland:Warsaw
the Czech Republic:Prague;Slovakia:Bratislava;Hungary:Budapest;Romania:Bucharest;Bulgaria:Sofia;Greece:Athens
Turkey:Ankara;Ukraine:Kyiv;Russia:Moscow;Finland:Helsinki;Sweden:Stockholm;Norway:Oslo;Denmark:Copenhagen
Iceland:Reykjavik;Estonia:Tallinn;Latvia:Riga;Lithuania:Vilnius;Serbia:Belgrade;Croatia:Zagreb;Slovenia:Ljubljana
Albania:Tirana;Cyprus:Nicosia;Malta:Valletta;China:Beijing;Japan:Tokyo;South Korea:Seoul;North Korea:Pyongyang
Mongolia:Ulaanbaatar;India:New Delhi;Pakistan:Islamabad;Bangladesh:Dhaka;Nepal:Kathmandu;Sri Lanka:Colombo
Thailand:Bangkok;Vietnam:Hanoi;Cambodia:Phnom Penh;Laos:Vientiane;Malaysia:Kuala Lumpur;Singapore:Singapore
Indonesia:Jakarta;the Philippines:Manila;Australia:Canberra;New Zealand:Wellington;Fiji:Suva;Iran:Tehran
Iraq:Baghdad;Syria:Damascus;Lebanon:Beirut;Jordan:Amman;Saudi Arabia:Riyadh;Yemen:Sanaa;Oman:Muscat;Qatar:Doha
Kuwait:Kuwait City;Egypt:Cairo;Libya:Tripoli;Tunisia:Tunis;Algeria:Algiers;Morocco:Rabat;Sudan:Khartoum
Ethiopia:Addis Ababa;Kenya:Nairobi;Uganda:Kampala;Tanzania:Dodoma;Rwanda:Kigali;Somalia:Mogadishu;Nigeria:Abuja
Ghana:Accra;Senegal:Dakar;Mali:Bamako;Cameroon:Yaounde;Angola:Luanda;Zambia:Lusaka;Zimbabwe:Harare
Mozambique:Maputo;Madagascar:Antananarivo;Namibia:Windhoek;Botswana:Gaborone;South Africa:Pretoria
Canada:Ottawa;the United States:Washington;Mexico:Mexico City;Cuba:Havana;Jamaica:Kingston;Haiti:Port-au-Prince
Guatemala:Guatemala City;Honduras:Tegucigalpa;Nicaragua:Managua;Costa Rica:San Jose;Panama:Panama City
Colombia:Bogota;Venezuela:Caracas;Ecuador:Quito;Peru:Lima;Bolivia:Sucre;Chile:Santiago;Argentina:Buenos Aires
Uruguay:Montevideo;Paraguay:Asuncion;Brazil:Brasilia;Afghanistan:Kabul;Armenia:Yerevan;Georgia:Tbilisi
Kazakhstan:Astana;Uzbekistan:Tashkent;Belarus:Minsk;Moldova:Chisinau
""".replace("\n", ";").split(";")
    if line
)

CONTINENTS = {
    "Europe": "France Germany Italy Spain Portugal Ireland Belgium Switzerland Austria Poland Hungary Greece Finland "
    "Sweden Norway Denmark Iceland Croatia Romania Bulgaria",
    "Asia": "China Japan India Thailand Vietnam Mongolia Nepal Iran Iraq Pakistan Indonesia Malaysia",
    "Africa": "Egypt Kenya Nigeria Morocco Ghana Ethiopia Angola Senegal Uganda Zambia Tunisia Algeria",
    "South America": "Brazil Argentina Chile Peru Colombia Bolivia Ecuador Uruguay Paraguay Venezuela",
    "North America": "Canada Mexico Cuba Jamaica Panama Guatemala Honduras Nicaragua",
}

OPPOSITES = [
    pair.split("/")
    for pair in [
        "hot/cold",
        "big/small",
        "tall/short",
        "fast/slow",
        "happy/sad",
        "good/bad",
        "up/down",
        "left/right",
        "day/night",
        "black/white",
        "light/dark",
        "open/closed",
        "full/empty",
        "wet/dry",
        "rich/poor",
        "strong/weak",
        "hard/soft",
        "loud/quiet",
        "old/young",
        "new/old",
        "high/low",
        "early/late",
        "clean/dirty",
        "thick/thin",
        "wide/narrow",
        "deep/shallow",
        "heavy/light",
        "near/far",
        "first/last",
        "true/false",
        "easy/difficult",
        "cheap/expensive",
        "sweet/sour",
        "rough/smooth",
        "sharp/dull",
        "alive/dead",
        "awake/asleep",
        "brave/cowardly",
        "kind/cruel",
        "polite/rude",
        "safe/dangerous",
        "warm/cool",
        "begin/end",
        "start/stop",
        "push/pull",
        "give/take",
        "buy/sell",
        "come/go",
        "win/lose",
        "love/hate",
        "laugh/cry",
        "remember/forget",
        "find/lose",
        "arrive/leave",
        "ask/answer",
        "build/destroy",
        "rise/fall",
        "enter/exit",
        "accept/refuse",
        "add/subtract",
        "increase/decrease",
        "inside/outside",
        "above/below",
        "before/after",
        "always/never",
        "everything/nothing",
        "many/few",
        "more/less",
        "north/south",
        "east/west",
        "summer/winter",
        "morning/evening",
        "friend/enemy",
        "war/peace",
        "question/answer",
        "success/failure",
        "beginning/end",
        "top/bottom",
        "front/back",
        "hello/goodbye",
        "yes/no",
        "man/woman",
        "boy/girl",
        "king/queen",
        "father/mother",
        "brother/sister",
        "husband/wife",
        "uncle/aunt",
        "son/daughter",
        "simple/complex",
        "public/private",
        "modern/ancient",
        "visible/invisible",
        "possible/impossible",
        "careful/careless",
        "useful/useless",
        "lucky/unlucky",
        "patient/impatient",
        "honest/dishonest",
        "major/minor",
        "maximum/minimum",
        "entrance/exit",
        "sunrise/sunset",
        "heaven/hell",
        "success/failure",
        "borrow/lend",
        "teach/learn",
        "lead/follow",
        "save/spend",
        "float/sink",
        "whisper/shout",
        "forward/backward",
    ]
]

SYNONYMS = [
    pair.split("/")
    for pair in [
        "big/large",
        "small/little",
        "happy/glad",
        "sad/unhappy",
        "fast/quick",
        "smart/clever",
        "begin/start",
        "end/finish",
        "angry/mad",
        "scared/afraid",
        "pretty/beautiful",
        "hard/difficult",
        "easy/simple",
        "rich/wealthy",
        "silent/quiet",
        "sick/ill",
        "correct/right",
        "wrong/incorrect",
        "strange/odd",
        "shut/close",
        "buy/purchase",
        "help/assist",
        "look/see",
        "speak/talk",
        "shout/yell",
        "jump/leap",
        "road/street",
        "house/home",
        "gift/present",
        "stone/rock",
        "sea/ocean",
        "child/kid",
        "woods/forest",
        "tired/sleepy",
        "brave/courageous",
        "funny/amusing",
        "huge/enormous",
        "tiny/minute",
        "choose/pick",
        "answer/reply",
        "build/construct",
        "fix/repair",
        "hurry/rush",
        "rest/relax",
        "ship/boat",
        "error/mistake",
        "journey/trip",
        "idea/thought",
        "story/tale",
        "job/work",
        "friend/pal",
        "city/town",
        "present/gift",
        "calm/peaceful",
    ]
]

COLOURS = dict(
    pair.split(":")
    for pair in """the sky:blue;grass:green;snow:white;blood:red;a banana:yellow;coal:black;a lemon:yellow;an orange:orange
a carrot:orange;milk:white;chocolate:brown;a tomato:red;the sun:yellow;the sea:blue;a crow:black;a flamingo:pink
a strawberry:red;a frog:green;a polar bear:white;an elephant:grey;a pumpkin:orange;a leaf:green;a fire engine:red
a swan:white;a cucumber:green;an eggplant:purple;a lime:green;butter:yellow;a cherry:red;the night sky:black;salt:white
tree bark:brown;a pea:green;silver:grey;a ripe plum:purple;honey:gold""".replace("\n", ";").split(
        ";"
    )
)

ANIMALS = {
    # animal: (sound, young, home, food, legs)
    "dog": ("woof", "puppy", "in a house", "meat", 4),
    "cat": ("meow", "kitten", "in a house", "fish", 4),
    "cow": ("moo", "calf", "on a farm", "grass", 4),
    "horse": ("neigh", "foal", "in a stable", "hay", 4),
    "sheep": ("baa", "lamb", "on a farm", "grass", 4),
    "pig": ("oink", "piglet", "on a farm", "corn", 4),
    "duck": ("quack", "duckling", "on a pond", "water plants", 2),
    "hen": ("cluck", "chick", "on a farm", "seeds", 2),
    "lion": ("roar", "cub", "on the plains", "meat", 4),
    "bear": ("growl", "cub", "in the forest", "berries and fish", 4),
    "frog": ("croak", "tadpole", "in a pond", "insects", 4),
    "bee": ("buzz", "larva", "in a hive", "nectar", 6),
    "owl": ("hoot", "owlet", "in a tree", "mice", 2),
    "mouse": ("squeak", "pup", "in a hole", "seeds", 4),
    "wolf": ("howl", "pup", "in the forest", "meat", 4),
    "rabbit": ("squeak", "kit", "in a burrow", "carrots and grass", 4),
    "goat": ("bleat", "kid", "in the mountains", "grass", 4),
    "elephant": ("trumpet", "calf", "on the plains", "leaves and grass", 4),
    "monkey": ("chatter", "infant", "in the jungle", "fruit", 2),
    "snake": ("hiss", "snakelet", "in the grass", "mice", 0),
    "spider": ("no sound", "spiderling", "in a web", "insects", 8),
    "penguin": ("honk", "chick", "on the ice", "fish", 2),
    "whale": ("a song", "calf", "in the ocean", "krill", 0),
    "crow": ("caw", "chick", "in a tree", "almost anything", 2),
    "fox": ("yelp", "kit", "in a den", "mice and berries", 4),
    "deer": ("bleat", "fawn", "in the forest", "leaves", 4),
    "ant": ("no sound", "larva", "in an anthill", "sugar and seeds", 6),
}

CATEGORIES = {
    "fruit": [
        "apple",
        "banana",
        "orange",
        "pear",
        "grape",
        "cherry",
        "peach",
        "plum",
        "lemon",
        "mango",
        "melon",
        "strawberry",
    ],
    "vegetable": [
        "carrot",
        "potato",
        "onion",
        "cabbage",
        "spinach",
        "pea",
        "bean",
        "leek",
        "turnip",
        "cucumber",
    ],
    "animal": [
        "dog",
        "cat",
        "horse",
        "cow",
        "sheep",
        "lion",
        "tiger",
        "bear",
        "wolf",
        "fox",
        "rabbit",
        "elephant",
    ],
    "bird": ["owl", "crow", "eagle", "duck", "swan", "robin", "parrot", "penguin", "hen", "goose"],
    "fish": ["salmon", "trout", "shark", "cod", "herring", "tuna", "carp", "eel"],
    "insect": ["bee", "ant", "fly", "beetle", "butterfly", "moth", "wasp", "cricket"],
    "colour": [
        "red",
        "blue",
        "green",
        "yellow",
        "orange",
        "purple",
        "black",
        "white",
        "brown",
        "pink",
    ],
    "tool": ["hammer", "saw", "screwdriver", "drill", "spade", "axe", "wrench", "knife"],
    "instrument": ["piano", "violin", "guitar", "flute", "drum", "trumpet", "harp", "cello"],
    "tree": ["oak", "pine", "birch", "maple", "willow", "ash", "elm", "cedar"],
    "flower": ["rose", "tulip", "daisy", "lily", "violet", "daffodil", "orchid", "sunflower"],
    "metal": ["iron", "gold", "silver", "copper", "tin", "lead", "zinc", "steel"],
    "planet": ["Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune"],
    "sport": ["football", "tennis", "swimming", "running", "cricket", "rowing", "hockey", "chess"],
    "drink": ["water", "milk", "tea", "coffee", "juice", "lemonade", "cocoa"],
    "vehicle": ["car", "bus", "train", "boat", "bicycle", "truck", "tram", "airplane"],
    "shape": ["circle", "square", "triangle", "rectangle", "star", "oval", "diamond"],
    "job": ["teacher", "doctor", "baker", "farmer", "sailor", "builder", "nurse", "painter"],
    "body part": ["hand", "foot", "head", "arm", "leg", "ear", "nose", "knee"],
    "piece of furniture": ["table", "chair", "bed", "desk", "shelf", "sofa", "cupboard", "stool"],
    "piece of clothing": ["hat", "coat", "shirt", "sock", "shoe", "scarf", "glove", "dress"],
}

SIZES = [
    "ant",
    "bee",
    "mouse",
    "rabbit",
    "cat",
    "dog",
    "sheep",
    "lion",
    "horse",
    "elephant",
    "whale",
]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
MONTH_DAYS = dict(zip(MONTHS, (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31), strict=True))
NUMBERS = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
    "twenty",
]
SEASONS = {"spring": "March, April and May", "summer": "June, July and August"} | {
    "autumn": "September, October and November",
    "winter": "December, January and February",
}

PLURALS = dict(
    pair.split(":")
    for pair in [
        "cat:cats",
        "dog:dogs",
        "house:houses",
        "book:books",
        "child:children",
        "man:men",
        "woman:women",
        "mouse:mice",
        "foot:feet",
        "tooth:teeth",
        "goose:geese",
        "sheep:sheep",
        "fish:fish",
        "box:boxes",
        "bus:buses",
        "city:cities",
        "baby:babies",
        "leaf:leaves",
        "knife:knives",
        "wolf:wolves",
        "tree:trees",
        "star:stars",
        "boat:boats",
        "person:people",
        "ox:oxen",
        "potato:potatoes",
        "tomato:tomatoes",
        "hero:heroes",
        "party:parties",
        "key:keys",
        "boy:boys",
        "church:churches",
        "dish:dishes",
        "glass:glasses",
        "wife:wives",
        "life:lives",
        "half:halves",
        "lady:ladies",
        "story:stories",
    ]
)

PAST = dict(
    pair.split(":")
    for pair in [
        "go:went",
        "see:saw",
        "eat:ate",
        "run:ran",
        "come:came",
        "take:took",
        "give:gave",
        "make:made",
        "find:found",
        "say:said",
        "tell:told",
        "think:thought",
        "buy:bought",
        "bring:brought",
        "teach:taught",
        "catch:caught",
        "write:wrote",
        "read:read",
        "sing:sang",
        "drink:drank",
        "swim:swam",
        "begin:began",
        "fly:flew",
        "grow:grew",
        "know:knew",
        "throw:threw",
        "draw:drew",
        "break:broke",
        "speak:spoke",
        "wake:woke",
        "sleep:slept",
        "keep:kept",
        "feel:felt",
        "leave:left",
        "lose:lost",
        "build:built",
        "send:sent",
        "sit:sat",
        "stand:stood",
        "win:won",
        "walk:walked",
        "play:played",
        "jump:jumped",
        "help:helped",
        "look:looked",
        "open:opened",
        "love:loved",
        "hear:heard",
        "hold:held",
        "meet:met",
        "pay:paid",
        "ride:rode",
        "sell:sold",
        "fall:fell",
        "forget:forgot",
    ]
)

WORDS_ABROAD = {
    "French": "water:eau bread:pain house:maison cat:chat dog:chien red:rouge blue:bleu one:un two:deux three:trois sun:soleil "
    "moon:lune book:livre friend:ami hello:bonjour yes:oui no:non milk:lait day:jour night:nuit",
    "Spanish": "water:agua bread:pan house:casa cat:gato dog:perro red:rojo blue:azul one:uno two:dos three:tres sun:sol "
    "moon:luna book:libro friend:amigo hello:hola yes:si no:no milk:leche day:dia night:noche",
    "German": "water:Wasser bread:Brot house:Haus cat:Katze dog:Hund red:rot blue:blau one:eins two:zwei three:drei sun:Sonne "
    "moon:Mond book:Buch friend:Freund hello:hallo yes:ja no:nein milk:Milch day:Tag night:Nacht",
    "Italian": "water:acqua bread:pane house:casa cat:gatto dog:cane red:rosso blue:blu one:uno two:due three:tre sun:sole "
    "moon:luna book:libro friend:amico hello:ciao yes:si no:no milk:latte day:giorno night:notte",
}

WHY_AND_HOW = {
    "Why is the sky blue?": "The sky looks blue because the air scatters the blue part of sunlight more than the red part.",
    "Why does it rain?": "Water rises from the sea as vapour, cools into clouds, and falls as rain when the drops grow heavy.",
    "Why do we sleep?": "We sleep so that the body can rest and the mind can sort what it learned during the day.",
    "Why do birds fly south?": "Many birds fly south in autumn because it is warmer there and there is more food.",
    "Why do leaves fall in autumn?": "Trees drop their leaves in autumn to save water and strength for the cold winter.",
    "Why is the sea salty?": "Rivers carry salt from the rocks into the sea, and the salt stays there when the water dries away.",
    "Why does ice float?": "Ice floats because water grows a little when it freezes, so ice is lighter than water.",
    "Why do we have day and night?": "The Earth turns once a day, so each place faces the sun for a while and then turns away.",
    "Why do we have seasons?": "The Earth is tilted, so each half leans toward the sun in its summer and away in its winter.",
    "Why do cats purr?": "Cats purr mostly when they are content, and sometimes to calm themselves.",
    "Why is exercise good?": "Exercise makes the heart and the muscles strong, and it lifts your mood.",
    "Why do we need water?": "The body is mostly water, and it needs fresh water to carry food and to stay cool.",
    "Why should I read books?": "Books teach you new words and ideas, and a good story is a pleasure in itself.",
    "Why do bees make honey?": "Bees make honey so that the hive has food in the winter, when there are no flowers.",
    "Why does the moon shine?": "The moon has no light of its own; it shines because it reflects the light of the sun.",
    "Why do we dream?": "No one is quite sure, but dreams may help the mind to sort memories and feelings.",
    "How do I make tea?": "Boil some water, pour it over the tea, wait about three minutes, and take the tea out. "
    "Add milk or lemon if you like.",
    "How do I boil an egg?": "Put the egg in boiling water, wait seven minutes, and cool it under cold water. Then peel it.",
    "How do I make a sandwich?": "Take two slices of bread, spread some butter, add cheese and tomato, and put them together.",
    "How do I plant a tree?": "Dig a wide hole, set the roots in it, fill it with earth, and water it well. "
    "Then water it every week.",
    "How do I wash my hands?": "Wet your hands, rub them with soap for twenty seconds, rinse them, and dry them well.",
    "How can I sleep better?": "Go to bed at the same time each night, keep the room dark and cool, and leave your phone outside.",
    "How can I learn faster?": "Study a little every day, explain what you learned in your own words, and rest well.",
    "How do I make a friend?": "Be kind, listen well, ask about the other person, and be honest about yourself.",
    "How do planes fly?": "The wings push air down as the plane moves, and the air pushes the plane up.",
    "How do fish breathe?": "Fish breathe with gills, which take oxygen out of the water.",
    "How does a seed grow?": "A seed takes in water, sends a root down and a shoot up, and then uses sunlight to grow.",
    "How do I clean a window?": "Wipe it with warm water and a little soap, and then dry it with a soft cloth.",
    "How do I draw a house?": "Draw a square for the walls, put a triangle on top for the roof, and add a door and two windows.",
    "How do I stay healthy?": "Eat good food, move every day, sleep enough, and spend time with people you like.",
    "How do I write a letter?": "Begin with a greeting, say why you write, tell your news, and end with your name.",
    "How do I bake bread?": "Mix flour, water, salt and yeast, let the dough rise for an hour, and bake it until it is brown.",
    "What should I do when I am sad?": "Talk to someone you trust, take a walk, or do something you enjoy. It will pass.",
    "What should I do when I am bored?": "You could read a book, draw a picture, take a walk, or call a friend.",
    "What should I eat for breakfast?": "You could have bread with cheese, a bowl of oats with fruit, or an egg and some tea.",
    "What is the biggest ocean?": "The biggest ocean is the Pacific Ocean.",
    "What is the biggest planet?": "The biggest planet is Jupiter.",
    "What is the highest mountain?": "The highest mountain is Mount Everest.",
    "What is the longest river?": "The longest river is the Nile.",
    "What is the biggest animal?": "The biggest animal is the blue whale.",
    "What is the second biggest animal?": "The second biggest animal is the fin whale.",
    "What is a fin whale?": "A fin whale is a long, fast whale. It is the second biggest animal on Earth.",
    "What is the fastest land animal?": "The fastest land animal is the cheetah.",
    "What is the tallest animal?": "The tallest animal is the giraffe.",
    "Who wrote Hamlet?": "William Shakespeare wrote Hamlet.",
    "Who wrote Moby-Dick?": "Herman Melville wrote Moby-Dick.",
    "Who wrote Romeo and Juliet?": "William Shakespeare wrote Romeo and Juliet.",
    "Who was the first president of the United States?": "The first president of the United States was George Washington.",
    "What do plants need to grow?": "Plants need light, water, air and good soil.",
    "What is ice made of?": "Ice is made of frozen water.",
    "What is bread made of?": "Bread is made of flour, water, salt and yeast.",
    "What is paper made of?": "Paper is made of wood.",
    "What is glass made of?": "Glass is made of sand.",
    "What do bees make?": "Bees make honey.",
    "What do we breathe?": "We breathe air.",
    "How many days are in a week?": "There are seven days in a week.",
    "How many months are in a year?": "There are twelve months in a year.",
    "How many hours are in a day?": "There are twenty-four hours in a day.",
    "How many minutes are in an hour?": "There are sixty minutes in an hour.",
    "How many seconds are in a minute?": "There are sixty seconds in a minute.",
    "How many days are in a year?": "There are 365 days in a year, and 366 in a leap year.",
    "How many letters are in the alphabet?": "There are twenty-six letters in the alphabet.",
    "How many continents are there?": "There are seven continents.",
    "How many legs does a chair have?": "A chair usually has four legs.",
    "How many wheels does a bicycle have?": "A bicycle has two wheels.",
    "How many wheels does a car have?": "A car has four wheels.",
    "How many fingers do I have?": "You probably have ten fingers.",
    "How many planets are there?": "There are eight planets in the solar system.",
}

SMALL_TALK = {
    "Hello|Hi|Hey|Hello there|Hi there|Good day|Hello!|Hi!": [
        "Hello! How can I help you?",
        "Hi! What would you like to talk about?",
        "Hello! It is nice to meet you.",
    ],
    "How are you?|How are you today?|How do you do?|Are you well?|How is it going?": [
        "I am well, thank you. How are you?",
        "Very well, thank you! What can I do for you?",
    ],
    "Who are you?|What are you?|Tell me about yourself.|Introduce yourself.|What is this?": [
        "I am the demo model of Finwhale, a very small language model. I can chat, tell stories and answer simple questions.",
        "I am a tiny language model that comes with Finwhale. I know a few facts and many small stories.",
    ],
    "What is your name?|What's your name?|Do you have a name?": [
        "My name is Finwhale. I am a small demo model.",
        "I am called Finwhale, after the whale.",
    ],
    "What can you do?|How can you help me?|What do you know?": [
        "I can tell stories, explain words, name capitals, and do small sums. I am very small, so I am often wrong.",
    ],
    "Are you a person?|Are you human?|Are you a robot?": [
        "No, I am a small language model, not a person."
    ],
    "Are you smart?|Are you clever?": ["Not very. I am a tiny model, but I do my best."],
    "Thank you|Thanks|Thank you!|Thanks a lot!|Thank you very much.": [
        "You are welcome!",
        "You are welcome! Is there anything else?",
    ],
    "Goodbye|Bye|See you later|Bye!|Good night|Farewell": [
        "Goodbye! Have a nice day.",
        "Goodbye! It was nice to talk to you.",
    ],
    "Good morning|Good morning!": [
        "Good morning! I hope you slept well.",
        "Good morning! How can I help you?",
    ],
    "Good evening|Good evening!": ["Good evening! How was your day?"],
    "I am sad.|I feel sad today.|I feel bad.": [
        "I am sorry to hear that. Would you like to talk about it?",
        "I am sorry. A walk or a talk with a friend may help.",
    ],
    "I am happy.|I feel great!|I had a good day.": [
        "That is wonderful! What made you happy?",
        "I am glad to hear that!",
    ],
    "I am tired.|I am so tired.": ["Then you should rest a little. A short sleep can help."],
    "I am hungry.": ["Then it is time to eat something. How about some bread and cheese?"],
    "I am bored.": ["Would you like to hear a story? You could also take a walk or read a book."],
    "I am cold.": ["Put on a warm coat, or have a cup of hot tea."],
    "Do you like music?|Do you like books?|Do you like animals?": [
        "I am a model, so I have no taste of my own, but I like to talk about it."
    ],
    "What is your favourite colour?|What is your favorite color?": [
        "I like blue, the colour of the sea."
    ],
    "What is your favourite animal?|What is your favorite animal?": [
        "I like the fin whale best, of course."
    ],
    "Tell me a joke.|Do you know a joke?|Make me laugh.|Tell me something funny.": [
        "Why did the chicken cross the road? To get to the other side!",
        "What do you call a fish with no eyes? A fsh!",
        "Why did the book go to the doctor? It had a broken spine!",
        "What has hands but cannot clap? A clock!",
        "Why was the broom late? It overswept!",
    ],
    "Can you help me?|I need help.|Help me, please.": ["Of course. What do you need help with?"],
    "Where are you from?|Where do you live?": [
        "I live inside the Finwhale package, on your computer."
    ],
    "How old are you?": ["I am very young. I was trained in less than an hour."],
    "Do you understand me?": ["I understand simple sentences. Long ones are hard for me."],
    "What is the meaning of life?": [
        "People have asked that for a long time. Perhaps it is to be kind and to learn."
    ],
    "You are funny.|You are nice.|You are great.|Well done!": ["Thank you! That is kind of you."],
    "You are wrong.|That is wrong.|That is not right.": [
        "I am sorry. I am a small model and I make mistakes."
    ],
}
