"""Units of measurement at the end of answers: which can be compared with each other, and their sizes."""

from __future__ import annotations

from fractions import Fraction

_MEASURES = {
    "length": {
        "nm nanometer nanometre": "1/1000000000", "µm micrometer micrometre micron": "1/1000000",
        "mm millimeter millimetre": "1/1000", "cm centimeter centimetre": "1/100", "dm decimeter decimetre": "1/10",
        "m meter metre": "1", "km kilometer kilometre": "1000", "in inch": "254/10000", "ft foot feet": "3048/10000",
        "yd yard": "9144/10000", "mi mile": "1609344/1000",
    },
    "time": {
        "ns nanosecond": "1/1000000000", "µs microsecond": "1/1000000", "ms millisecond": "1/1000", "s sec second": "1",
        "min minute": "60", "h hr hour": "3600", "day": "86400", "week": "604800", "fortnight": "1209600",
    },
    "months": {"month": "1", "yr year": "12", "decade": "120"},
    "mass": {
        "µg microgram": "1/1000000", "mg milligram": "1/1000", "g gram": "1", "kg kilogram": "1000",
        "tonne": "1000000", "lb pound": "45359237/100000", "oz ounce": "45359237/1600000",
    },
    "volume": {
        "ml mL milliliter millilitre": "1/1000", "cl cL centiliter centilitre": "1/100",
        "dl dL deciliter decilitre": "1/10", "l L liter litre": "1", "gal gallon": "473176473/125000000",
        "quart": "473176473/500000000", "pint": "473176473/1000000000", "cup": "473176473/2000000000",
    },
    "speed": {
        "m/s": "1", "km/s": "1000", "cm/s": "1/100", "m/min": "1/60", "km/h kmh kph": "5/18", "ft/s": "3048/10000",
        "mi/h mph": "1609344/3600000",
    },
    "energy": {
        "J joule": "1", "kJ kilojoule": "1000", "MJ megajoule": "1000000", "cal calorie": "4184/1000",
        "kcal kilocalorie": "4184", "kWh": "3600000", "eV electronvolt": "1602176634/10000000000000000000000000000",
    },
    "power": {"mW milliwatt": "1/1000", "W watt": "1", "kW kilowatt": "1000", "MW megawatt": "1000000"},
    "force": {"mN millinewton": "1/1000", "N newton": "1", "kN kilonewton": "1000", "MN meganewton": "1000000"},
    "pressure": {"Pa pascal": "1", "kPa kilopascal": "1000", "MPa megapascal": "1000000", "bar": "100000",
                 "atm atmosphere": "101325"},
    "voltage": {"mV millivolt": "1/1000", "V volt": "1", "kV kilovolt": "1000"},
    "current": {"mA milliampere milliamp": "1/1000", "A ampere amp": "1"},
    "resistance": {"Ω ohm": "1", "kΩ kiloohm": "1000"},
    "frequency": {"Hz hertz": "1", "kHz kilohertz": "1000", "MHz megahertz": "1000000", "GHz gigahertz": "1000000000"},
    "data": {"bit": "1", "byte": "8"},
    "money": {"cent": "1/100", "dollar": "1"},
    "kelvin": {"K kelvin": "1"},
    "degrees Celsius": {"celsius": "1"},
    "degrees Fahrenheit": {"fahrenheit": "1"},
}  # fmt: skip

_UNITS = {
    name: (measure, Fraction(size))
    for measure, sizes in _MEASURES.items()
    for names, size in sizes.items()
    for name in names.split()
}

LENGTHS = {name: size for name, (measure, size) in _UNITS.items() if measure == "length"}
_UNITS |= {f"{name}2": ("area", size**2) for name, size in LENGTHS.items()}
_UNITS |= {f"{name}3": ("volume", 1000 * size**3) for name, size in LENGTHS.items()}  # of litres

_VARIABLES = frozenset("nm ns ms cl dl cL dL J MJ cal eV mW W MW mN N MN Pa bar atm mV V mA A K".split())
"""Units that are units within ``\\text{…}`` alone: after a bare number they may be products of variables."""

OPPOSITES = {
    word: (axis, side)
    for axis, sides in enumerate([
        "left/right", "up upward upwards/down downward downwards", "north/south", "east/west", "above over/below under",
        "before/after", "am/pm", "bc bce/ad ce", "more/less fewer", "profit gain/loss", "inward/outward",
        "increase increases increased increasing/decrease decreases decreased decreasing",
        "clockwise/counterclockwise anticlockwise", "horizontal/vertical", "maximum/minimum", "convex/concave",
    ])
    for side, words in enumerate(sides.split("/"))
    for word in words.split()
}  # fmt: skip
"""Words next to a number that say the opposite of each other: those of one number with different second ones."""


def unit_of(name: str, *, enclosed: bool) -> tuple[str, Fraction] | None:
    """The measure of a unit and its size; None for one that is not known. ``enclosed``: it is marked as text."""
    name = name.replace("μ", "µ")
    over, per, under = name.partition(" per ")
    if per:
        unit, other_unit = unit_of(over, enclosed=True), unit_of(under, enclosed=True)
        if unit is None or other_unit is None:
            return None
        (measure, size), (other, other_size) = unit, other_unit
        named = "speed" if (measure, other) == ("length", "time") else f"{measure} per {other}"
        return named, size / other_size
    for spelt in (name, name.removesuffix("es"), name.removesuffix("s")):
        if spelt in _VARIABLES and not enclosed:
            return None
        if found := _UNITS.get(spelt) or (_UNITS.get(spelt.lower()) if len(spelt) > 3 else None):
            return found
    return None
