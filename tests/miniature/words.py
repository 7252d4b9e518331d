"""The words that are one token each in the miniature's vocabulary."""

from __future__ import annotations

# Cities: ordinary words of the recall task too. The chat task names them with and without a space
# before them (in a sentence, and as the argument of a tool call).
CITIES = (
    "Paris London Berlin Madrid Rome Vienna Oslo Dublin Lisbon Prague Warsaw Athens Cairo Delhi "
    "Tokyo Seoul Beijing Sydney Boston Chicago Denver Dallas Seattle Toronto Lima Havana Milan "
    "Munich Geneva Zurich Hamburg Brussels Helsinki Stockholm Budapest Istanbul"
).split()

# Keys and values of the recall task, and what passages to copy are made of.
NOUNS = (
    "river stone lamp garden window bridge apple bread candle castle cloud copper corn cotton "
    "desert diamond door eagle engine feather field finger fire fish flag flower forest fox frog "
    "glass glove goat gold grape grass hammer harbor hat hawk honey horse house ice iron island "
    "ivory jacket jar jewel kettle key kite knife ladder lake leaf lemon letter lion lock maple "
    "marble market meadow melon mill mirror moon moss mountain mouse needle nest nut oak ocean "
    "olive onion orange otter owl paint palm paper peach pearl pencil pepper piano pigeon pine "
    "planet plate plum pond pony potato prince queen rabbit rain raven ribbon rice ring road robin "
    "rocket rope rose sail salt sand school seed shadow sheep shell ship shoe silk silver snow "
    "soap spider spoon spring star steel storm straw sugar summer sun swan table tail tea tiger "
    "tower train tree turtle valley velvet village violin wagon wall water whale wheat wheel wind "
    "wine winter wolf wood wool zebra"
).split()

# Second words of the sentences in passages; they are keys and values too.
VERBS = "sees finds takes holds wants gives brings keeps likes sells paints hides".split()

# What the chat task says, as it stands after a space or at the start of a line.
CHAT = (
    " is| the| The|The| weather| in| What|What|How| much| plus| minus| and|Add| add|Please|Compute|"
    " you| are|Hello| Hello|Hi|who|Who| who| I| am| a| small| GLM| user| asks| about| call| tool|"
    "Ones| Tens| write| carry| borrow| So| says| degrees| It|It| sunny| cloudy| rainy| windy| can|"
    " numbers| up| look| time| of| city| do| not| know| this| hello| get|get|weather|time|_|name|"
    "description|parameters|type|object|properties|city|string|required|function|temperature|"
    "condition|sunny|cloudy|rainy|windy|Get| current|Copy|Subtract| from| Tools|population|"
    " population| people|Tell| me| thousand|tools|thousand"
).split("|")
