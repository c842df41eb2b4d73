"""Words, and chat messages, that the example tasks share."""

from __future__ import annotations

PEOPLE = (
    "Maria John Anna Peter Lucy Omar Nina Paul Rosa Kenji Ivan Elsa Mina Carl Dora Emil Faye Gita Hans Igor Jana Karl"
    " Lena Milo Nora Otto Pia Ravi Sara Theo Uma Vera Walt Yara Zoe"
).split()
CITIES = (
    "Paris Rome Cairo Oslo Delhi Tokyo Madrid Berlin Dublin Athens Lisbon Vienna Prague Boston Denver Turin Quito Seoul"
    " Perth Bonn Bern Riga Kyiv Lyon"
).split()
THINGS = (
    "apple river stone garden window silver monkey bridge candle forest pencil rocket island butter castle"
    " dragon planet guitar tunnel velvet anchor basket button camera carpet cheese circle coffee copper desert"
    " dinner doctor engine farmer feather finger flower hammer honey jacket jungle kitten ladder lemon letter"
    " market meadow mirror mountain needle ocean orange paper parrot pepper pillow pocket potato rabbit ribbon"
    " saddle salmon school shadow signal spider spring summer sugar sunset temple thunder ticket tiger tomato"
    " tower turtle valley violin wagon walnut water whale winter wizard wolf yellow zebra"
).split()
KINDS: dict[str, list[str]] = {
    kind: words.split()
    for kind, words in {
        "animal": "tiger horse rabbit eagle cat dog lion wolf bear mouse sheep goat cow pig duck frog snake whale shark"
        " monkey zebra camel deer fox owl bee ant spider turtle salmon",
        "fruit": "apple banana cherry grape lemon cranberry peach pear plum mango melon fig date quince apricot kiwi"
        " berry papaya coconut pineapple",
        "colour": "red blue green yellow black white pink purple brown grey violet scarlet crimson turquoise beige"
        " maroon ivory navy indigo golden",
        "tool": "hammer saw drill wrench knife axe shovel rake pliers chisel screwdriver ladder scissors needle brush"
        " broom bucket file clamp crowbar",
        "job": "doctor teacher farmer lawyer baker nurse pilot painter driver judge writer singer actor dentist butcher"
        " plumber soldier tailor waiter engineer",
        "number": "seven twelve forty nine three two four five six eight ten eleven twenty thirty fifty sixty ninety"
        " hundred thousand million",
    }.items()
}
"""Words by kind, each of one kind alone."""


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def system(content: str) -> dict[str, str]:
    return {"role": "system", "content": content}
