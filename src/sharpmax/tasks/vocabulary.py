"""Names, words and filler paragraphs that prompts are built from; a task whose list changes gets a new version."""

from __future__ import annotations

import random
import re
from pathlib import Path

_DATA = Path(__file__).parent / "data"

NAMES: tuple[str, ...] = tuple((_DATA / "names.txt").read_text(encoding="utf-8").split())
"""Distinct given names of one word."""

WORDS: tuple[str, ...] = tuple((_DATA / "words.txt").read_text(encoding="utf-8").split())
"""Distinct common words of four to nine letters."""

_ADJECTIVES = """
    able ancient awake bitter bold brave breezy brisk careful cheerful clever cloudy curious daring deep distant
    eager early elegant famous fierce fluffy fresh frosty gentle giant glad graceful grand handsome happy hidden
    honest hungry icy jolly keen kind lazy lively loud lucky massive mellow merry mighty modern neat nervous noble
    odd orange patient perfect polite proud quick rapid rare royal rustic salty secret shiny shy silent simple
    sleepy sly solid spicy steady stormy sunny swift tender thirsty tidy tiny tough vast vivid wandering wild wise
    witty young zany
"""
ADJECTIVES: tuple[str, ...] = tuple(_ADJECTIVES.split())
_NOUNS = """
    acorn actor anchor apple arrow badger balloon banjo beach beaver bell bridge broom bucket butter button cactus
    camel candle canoe carrot castle cello cherry circus cloud comet cookie crane desert dolphin donkey dragon eagle
    engine falcon feather fiddle forest fossil fountain fox garden ghost glacier goose grape guitar hammer harbor
    harp hazel hero hill hornet island ivory jacket jungle kettle kitten ladder lagoon lemon lion lizard magnet
    mango maple marble meadow melon monkey moon needle ocean olive otter owl oyster panda parrot peach pebble pencil
    pepper piano pirate planet pony pumpkin puppet rabbit raven ribbon river robin rocket salmon shadow shovel
    spider squirrel statue sugar sunset temple thunder tiger tulip turtle valley violin walnut whale willow window
    winter wizard zebra
"""
NOUNS: tuple[str, ...] = tuple(_NOUNS.split())


_TEMPLATES = (
    "The {people} {did} the {thing} before the {weather} came over the hills",
    "In the {time}, the {people} sat by the river and talked about the {thing}",
    "Nobody knew why the {thing} had been left beside the {place}",
    "A {mood} wind moved through the {place}, and the {people} went home",
    "Every {time}, somebody carried the {thing} from the {place} to the market",
    "The road to the {place} was {mood}, so the {people} walked slowly",
    "It was said that the {people} once {did} the {thing} for a whole season",
    "When the {weather} ended, the {place} looked {mood} and almost new",
    "Some of the {people} liked the {weather}, but most of them stayed near the {place}",
    "The {thing} in the corner reminded the {people} of a {mood} journey",
    "Behind the {place} there was a path that grew {mood} towards the {time}",
    "The {people} had always {did} the {thing} with great care",
)
_WORDS = {
    "people": """farmers sailors teachers neighbours children bakers gardeners painters shepherds travellers weavers
        musicians carpenters students fishermen cousins potters dancers""",
    "did": """repaired admired painted borrowed carried cleaned described guarded inspected measured polished wrapped
        watched treasured collected""",
    "thing": """lantern ladder wagon blanket kettle basket barrel compass carpet mirror plough anchor violin teapot
        umbrella saddle bench wheel rope curtain""",
    "place": """orchard meadow mill bridge well barn garden forest pond valley chapel stable vineyard quarry courtyard
        fountain hedge shore""",
    "weather": "rain fog snow storm heat frost wind drizzle thunder sunshine hail mist",
    "time": "morning evening spring autumn winter summer afternoon night",
    "mood": "quiet gentle cold strange pleasant narrow dusty calm restless warm pale lonely bright dull slow",
}
_CHOICES = {slot: tuple(words.split()) for slot, words in _WORDS.items()}


def paragraph(rng: random.Random) -> list[str]:
    """The sentences of one paragraph, three or four of different patterns: about fifty tokens."""
    patterns = rng.sample(_TEMPLATES, rng.randint(3, 4))
    return [re.sub(r"{(\w+)}", lambda slot: rng.choice(_CHOICES[slot[1]]), pattern) + "." for pattern in patterns]
