r"""Answers and replies as LaTeX that math-verify reads as a person does.

math-verify pastes what it gets into one expression: ``1e-05`` becomes e - 5, ``3 1/2`` becomes 2, ``101_2`` is 101,
``pi/2`` is p·i/2, ``2(3)`` is 5, and ``5 m/s`` is 5·m/s. Here both sides are written so that this does not happen:
numbers in scientific notation as decimals, mixed numbers as fractions, groups of digits without separators, names of
functions and letters, Unicode's signs, digits, fractions, powers and roots as LaTeX, units as text. A text that no rule
makes clear (:data:`_UNCLEAR`) is no answer: a row's is refused, a reply's is wrong.

math-verify also reads a word as the product of its letters, and of a text that it does not understand a part of it.
Such texts are compared as they are written (:func:`as_written`): words, sequences of capital letters, answers that
deny an equation or begin with an inequality, several lines, sets that are given by a condition. Two or three small
letters stay a product: ``xy`` is ``yx``.
"""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal
from fractions import Fraction
from typing import Any

from rookery.environments.verifiers.numbers import spelt_in_ascii
from rookery.environments.verifiers.sentences import last_answer, ratio_in_words
from rookery.environments.verifiers.texts import decimal_of, described, visible

_SCIENTIFIC = re.compile(r"(?<![\w.\\])(\d+(?:\.\d*)?|\.\d+)[eE]([-+]?\d{1,3})(?![\w.]*\w)", re.ASCII)
_GROUP = re.compile(r"(?<![\w.,^])([1-9]\d{0,2}(\{,\}|,\\!|\\[,;:! ]| |')\d{3}(?:\2\d{3})*)(?![\w,]*\d)", re.ASCII)
"""Groups of digits that math-verify misreads; it reads 1,234."""
_MIXED = re.compile(r"(?<![\w.,/}^])(\d{1,9})(?: |\\[,;: ])+(\d{1,9}) ?/ ?(\d{1,9})(?![\w.,/]*\d)", re.ASCII)
_FRACTION = re.compile(r"\\([dtc]?)frac(?![A-Za-z]) *(\{[^{}]*\}|[0-9A-Za-z]) *(\{[^{}]*\}|[0-9A-Za-z])")
_REPEATING = re.compile(
    r"(?<![\w.,^}])(\d{0,12})\.(\d{0,12})\\(?:overline|bar)(?: *\{(\d{1,12})\}| *(\d)(?!\d))(?!\d)", re.ASCII
)
"""A decimal with digits that repeat."""
_PER_CENT = re.compile(
    r"(?<=[\d)}])(?: |\\[,;: ])*"
    r"(?:\\(?:text|textrm|mathrm|mbox) ?\{ *per ?cent *\}|per ?cent(?![A-Za-z])(?! *point))",
    re.IGNORECASE,
)
_ROOT = re.compile(r"(?:√|(?<![A-Za-z\\])sqrt) ?(\d+(?:\.\d+)?|[A-Za-z](?![A-Za-z]))|√ ?\(([^()]*)\)")
_BRACKETED = r"(?:\\left *)?[(\[]-?\d+(?:\.\d+)?(?:\\right *)?[)\]]"
_FACTOR = re.compile(
    rf"((?<![\w^_.\\}}])\d+(?:\.\d+)?|(?<![A-Za-z^_}}\\]){_BRACKETED})"
    rf"(?: ?(?={_BRACKETED})|(?=(?:\\left *)?\((?:-?\d|\\[dtc]?frac))|(?<=\))(?=\d))",
    re.ASCII,
)
"""A factor before one in brackets, which math-verify adds to it as to a mixed number: ``2(3)``."""
_FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp"
_GREEK = "pi|alpha|beta|gamma|delta|epsilon|theta|lambda|sigma|omega|phi|rho|tau"
_NAME = re.compile(
    rf"\\(?:operatorname|mathrm|text) ?\{{ *(?P<wrapped>{_FUNCTIONS}|{_GREEK}) *\}}"
    rf"|(?<![A-Za-z\\])(?P<bare>{_FUNCTIONS}|{_GREEK})(?![A-Za-z])"
)
"""Names of functions and of Greek letters, of which math-verify makes products of their letters."""
_BASE = re.compile(r"(?<![A-Za-z\\])log_?(\d{1,3})(?= ?\()", re.ASCII)
_INFINITY = re.compile(r"(?<![A-Za-z\\])oo(?![A-Za-z])")
_POWER = re.compile(r"(?<=[\w)\]}])\*\*(?:(-?\d+)|(?=[\w({\\]))", re.ASCII)
"""A power as programs write it."""
_STYLED = re.compile(
    r"\\(?:mathrm|mathit|mathsf|text|operatorname) ?\{ *([ie]) *\}|\\(?:mathbf|boldsymbol|bm) ?\{ *([A-Za-z]) *\}"
)
"""The imaginary unit, Euler's number and vectors, which math-verify drops from a sum as it drops other text."""
_COLOR = re.compile(r"\\(?:text)?color ?\{[^{}]*\}")
_ANGLES = re.compile(r"(?:\\(?:left|right) *)?\\(?P<side>[lr])angle(?![A-Za-z])")
_TIMES_TEN = re.compile(r"(?<=\d) ?[xX*] ?(?=10 ?\^)", re.ASCII)
_POWERS = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+")
_WORDS = re.compile(r"true|false|null|none|nan|undefined", re.IGNORECASE)
"""Words that math-verify does not read, or reads as products of letters."""
_LETTERS = re.compile(
    r"(?!(?i:infinity|infty|alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|pi|rho|sigma|tau"
    r"|upsilon|phi|chi|psi|omega)\Z)(?:"
    r"[A-Z]{2,}|[A-Z][a-z]{2,}|[a-z]{4,}"
    r"|(?i:no|yes|on|off|up|odd|one|two|six|ten|all|any|day|may|sun|mon|tue|wed|thu|fri|sat|red|tie|win|sin|cos|tan|log|exp|cat|dog))",
    re.ASCII,
)
"""A word or a sequence of letters, no product of variables and no symbol's name."""
_WRAPPED = re.compile(r"\\(?:text|textrm|textbf|textit|mathrm|mathbf|mbox) *\{([^{}]*)\}")
_DENIAL = re.compile(r"\\(?:neq?|not)(?![A-Za-z])|≠")
_INEQUALITY = re.compile(r"(?:[<>≤≥]|\\(?:[lg]eq?|[lg]t|leqslant|geqslant)(?![A-Za-z]))")
_CONDITION = re.compile(r"\\\{[^{}=:|]*(?::|\||\\mid(?![A-Za-z])|\\vert(?![A-Za-z]))")
"""The beginning of a set that is given by a condition."""
_MODULO = re.compile(r"\\(?:equiv|pmod)(?![A-Za-z])|≡|\( ?\\?mod\b")
_JOINED = re.compile(
    r",? *(?:\\(?:text|textrm|mathrm|mbox) ?\{ *(?:and|or) *\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])) *"
)
"""A word or a comma between several answers."""
_ENVIRONMENT = re.compile(r"\\begin\{(\w+\*?)\}.*?\\end\{\1\}", re.DOTALL)
_MATHEMATICS = re.compile(r"\$(?!\s)([^$]+)(?<!\s)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_OPENING, _CLOSING = r"*_`\"'“‘«", r"*_`\"'”’»"
"""Quotes and the emphasis of Markdown."""
_DENIED = re.compile(
    r"(?:\bnot|n['’]t)(?: be)?(?: equal)?(?: to)? *"
    rf"(?:\$[^$]*\$|\\\(.*?\\\)|[{_OPENING}]*-?\d[\d.,/]*)[\s.!{_CLOSING}]*\Z",
    re.IGNORECASE,
)
"""The end of a reply that denies its last expression."""
_END = 400
"""Characters at a reply's end that decide whether it denies or names its answer."""


def _ending(word: str) -> re.Pattern[str]:
    return re.compile(
        r"(?:\A|(?::|\b(?i:is|answer|option|choice)\b:?))"
        rf"(?:[({_OPENING}\s]|\\\()*({word})(?:[){_CLOSING}\s.!]|\\\))*\Z"
    )


_NAMED, _NAMED_WORD = _ending("[A-Z]{1,12}"), _ending("[A-Za-z]{1,20}")
"""A reply that ends with a choice or a sequence of letters, and one that ends with any word."""
_TAGGED = re.compile(r"<(?P<tag>[A-Za-z]\w{0,20})>([^<>]*)</(?P=tag)>", re.ASCII)
_TITLE = re.compile(r"\\text(?:bf)? ?\{[^{}]*: *\}|(?<=[A-Za-z]{2}:)(?=[-+]?\.?\d)", re.ASCII)
"""A title in LaTeX, and the place after one that a number follows without a space."""
_ORDINAL = re.compile(r"\b\d+(?:st|nd|rd|th)\b")
_QUOTED = re.compile(
    rf"((?:\A|[:=\n][*_]{{0,2}}|[A-Za-z,][*_]{{0,2}}(?=\s))\s*)(?:[{_OPENING}]{{1,4}}|(?P<bracket>\())"
    rf"([-+]?\$?\.?\d[\d.,/]*%?)(?:[{_CLOSING}]{{1,4}}|(?(bracket)\)|(?!)))"
    r"(?=[\s.!,;*_]*(?:\Z|\n|(?(bracket)(?!)|[A-Za-z])))",
    re.ASCII,
)
"""A number in quotes, emphasis or, at the end, in brackets, which is no operand."""
_PART = (
    r"(?:hal(?:f|ves)|(?:third|fourth|quarter|fifth|sixth|eighth|tenth|hundredth|thousandth)s?|squared|cubed|factorial)"
)
"""Words after a number that make it another one."""
_UNCLEAR = re.compile(
    r"\d *_"  # a base: 101_2
    r"|\d *:\d\d(?!\d)|\d\.\d+\.\d"  # a time, a version
    r"|\d{4}-\d\d?-\d|\d/\d+/\d"  # a date
    r"|(?<![_^\d])\d+(?: |\\[,;: !])+\.?\d"  # two numbers side by side
    r"|\d[\s~]*(?:\\[,;: ]|\\(?:text|mathrm|textrm|mbox) ?\{)*\s*"
    r"(?:hundred|thousand|million|billion|trillion|dozen|lakh|crore)"
    r"|\d(?:st|nd|rd|th)\b|\d[eE][-+]?\d|\b0[xX][0-9A-Fa-f]"
    r"|\d +(?!(?:and|or)\b)[A-Za-z]{2,}\.?,? +(?:and +)?\d"  # two amounts: 2 hours 30 minutes
    rf"|\d +{_PART}\b",
    re.ASCII,
)
_POWER_OF_TEN = re.compile(
    r"([-+]?) ?(\d+\.\d+) ?(?:\\times|\\cdot) ?10 ?\^ ?(?=\{?([-+]?\d{1,3}))(?:\{[-+]?\d+\}|\d+)", re.ASCII
)
_MARKS = (("**", "**"), ("*", "*"), ("`", "`"), ('"', '"'), ("“", "”"))
_STOP = re.compile(r"(?<=[\w)\]}%])(?<!\\right)\.(?=\}?\Z)")
"""The full stop of a sentence, also within a last text."""

_RANGE = re.compile(r"[\d)}] ?[\u2010-\u2013] ?[\d(\\]")
"""A hyphen or an en dash between numbers: a range, and no difference."""
_SYMBOLS = str.maketrans(
    {"×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div ", "π": r"\pi ", "∞": r"\infty ", "≤": r"\leq ",
     "≥": r"\geq ", "≠": r"\neq ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "±": r"\pm ", "∅": r"\emptyset ",
     "⁄": "/", "∕": "/", "∗": "*", "°": r"^\circ ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta "}
)  # fmt: skip

_NUMBER = re.compile(r"\\boxed\{-?(\d+(?:\.\d+)?)\}", re.ASCII)

_MEASURES = {
    "length": {
        "mm millimeter millimetre": "1/1000", "cm centimeter centimetre": "1/100", "dm decimeter decimetre": "1/10",
        "m meter metre": "1", "km kilometer kilometre": "1000", "in inch": "254/10000", "ft foot feet": "3048/10000",
        "yd yard": "9144/10000", "mi mile": "1609344/1000",
    },
    "time": {
        "s sec second": "1", "min minute": "60", "h hr hour": "3600", "day": "86400", "week": "604800",
    },
    "months": {"month": "1", "yr year": "12"},
    "mass": {"mg milligram": "1/1000", "g gram": "1", "kg kilogram": "1000"},
    "volume": {"ml mL milliliter millilitre": "1/1000", "l L liter litre": "1"},
    "speed": {
        "m/s": "1", "km/s": "1000", "cm/s": "1/100", "m/min": "1/60", "km/h kmh kph": "5/18", "ft/s": "3048/10000",
        "mi/h mph": "1609344/3600000",
    },
    "degrees Celsius": {"celsius": "1"},
    "degrees Fahrenheit": {"fahrenheit": "1"},
}  # fmt: skip
_UNITS = {
    name: (measure, Fraction(size))
    for measure, sizes in _MEASURES.items()
    for names, size in sizes.items()
    for name in names.split()
}
_LENGTHS = {name: size for name, (measure, size) in _UNITS.items() if measure == "length"}
_UNITS |= {f"{name}2": ("area", size**2) for name, size in _LENGTHS.items()}
_UNITS |= {f"{name}3": ("volume", 1000 * size**3) for name, size in _LENGTHS.items()}  # of litres
_LENGTH = "(?:" + "|".join(f"{name}(?:e?s)?" for name in sorted(_LENGTHS, key=len, reverse=True)) + ")"
_GAP, _SQUARED = r"(?: |~|\\[,;:! ])", r" ?\^ ?(?:([23])(?!\d)|\{ ?([23]) ?\})"
_RAISED = re.compile(
    r"(?<=[\d)}])(?:"
    rf"{_GAP}*\\(?:text|textrm|mathrm|mbox) ?\{{{_GAP}*({_LENGTH})\.? *(?:\}}{_SQUARED}|{_SQUARED} *\}})"
    rf"|{_GAP}?(mm|cm|dm|km|in|ft|yd|mi){_SQUARED}|{_GAP}+({_LENGTH}){_SQUARED}"
    rf"|{_GAP}*(?:\\(?:text|textrm|mathrm|mbox) ?\{{ *)?(square|sq\.?|cubic|cu\.?) +({_LENGTH})\b\.? *\}}?"
    r")(?P<rest>[.$\s]*)\Z"
)
"""The unit of an area or of a volume at the end of an answer or of a reply."""
_UNIT = re.compile(
    r"(?:(?<=[\d)}])(?: |\\[,;: ])*(?!(?:in|mi|yd|mg|ml)\b)([A-Za-z]{1,11})"
    r"|\\(?:text|textrm|mathrm|mbox) ?\{ *([A-Za-z]{1,11}[23]?(?:/[a-z]{1,3})?)\.? *\})[\s.*$]*\Z"
)
"""The unit at the end of an answer or of a reply; 3mg may be a product of variables."""
_SYMBOL = r"(?:[kcmMµn]?(?:m|s|g|N|J|W|V|A|Pa|mol|rad|L|l|Hz)|min|hr?|ft|in|mi|yd|lb|gal|day|year|person|K)"
_AMOUNT = re.compile(
    r"(?<=[\d)}%])(?: |~|\\[,;: ])+("
    rf"{_SYMBOL}(?:[ ·*]{_SYMBOL})*(?:\^\{{?\d\}}?)?(?:/{_SYMBOL}(?:\^\{{?\d\}}?|[²³])?)+"
    rf"|(?!.*\b(?:choose|times|over|plus|minus|divided|and|or|mod|infinity|infty|inf|{_PART})\b)"
    r"(?:[a-z]+ +)*[a-z]{4,}(?: +[a-z]+)*"
    r")\.?\Z"
)
"""A unit of several symbols, or words, after a number and a space at the end of an answer: ``5 m/s``, ``3 people``."""
_WITHIN_TEXT = re.compile(
    r"\\(?:text|textrm|mbox|mathrm) ?\{ *([-+]?\\?\$?\d[\d.,]*(?:/\d+)?)(?: +([A-Za-z][^{}]*))?\}", re.ASCII
)
_TEMPERATURE = re.compile(
    r" *(?:\^ ?\{? ?\\circ ?\}?|\bdegrees?) *(?:\\[,;: ])*"
    r"(?:\\(?:text|textrm|mathrm|mbox) ?\{ *(?:\\circ)? *(?P<text>[CFcf])[a-z]* *\}"
    r"|(?P<bare>[CF])(?:elsius|ahrenheit)?)\.?\Z"
)
_MONEY = re.compile(
    r"[€£¥₹₩]|\\(?:euro|pounds|yen)(?![A-Za-z])|(?<=\d) ?(?:USD|EUR|GBP|JPY|INR|CHF)\.?\Z"
    r"|\A(?:USD|EUR|GBP|JPY|INR|CHF|Rs\.?|US) ?(?=\\?\$?\d)"
)
"""Signs and codes of currencies next to a number; math-verify reads the dollar."""
_SPACE = r"(?:[\s.:~]|\\[,;:! ]|\\q?quad(?![A-Za-z]))"
_CHOICE = re.compile(
    r"\A(?:\\(?:text|textbf|textrm|mathrm|mathbf|mbox) ?\{ *\(?([A-J])[).:]? *\}"
    rf"|\(([A-J])\)(?={_SPACE}|\\text)|([A-J])\)(?=\s|\Z)){_SPACE}*+"
    r"((?![-+*/^=<>_&|]|\\(?:cup|cap|times|cdot|div|pm|setminus|subset|in|to|leq?|geq?|neq?|equiv)(?![A-Za-z])).*)\Z",
    re.DOTALL,
)
"""A choice at the beginning of an answer, and the text of the choice."""

LONGEST_ANSWER = 10_000
"""Characters of an answer: longer ones are no expression that a person wrote."""


def gold_latex(value: Any, field: str) -> str:
    """A row's answer as LaTeX. Raises ValueError, with ``field``, for what is no number and no clear text."""
    number = decimal_of(value)
    if number is not None:
        return rf"\boxed{{{_digits(number)}}}"
    if not isinstance(value, str) or not visible(value):
        raise ValueError(f"{field} is {described(value)}; write a number, or an expression as a text in LaTeX")
    latex = clear(value) if len(value) <= LONGEST_ANSWER else None
    if latex is None:
        raise ValueError(
            rf"{field} is {described(value)}, which can be read in several ways; write it in LaTeX as one expression,"
            r" such as \frac{7}{2}"
        )
    return latex


def significant_digits(latex: str) -> int:
    """Digits of an answer that is a number, without the zeros around it; 0 for any other."""
    number = _NUMBER.fullmatch(latex)
    return len(number[1].replace(".", "").strip("0")) if number is not None else 0


def reply_latex(text: str, *, words: bool = False) -> str | None:
    r"""A reply as math-verify shall read it: the content of its last ``\boxed{…}`` alone, the whole text without one.
    None for a reply whose last box is empty, unfinished or unclear. With ``words`` a reply may end with any word."""
    boxed = _several_boxes(text) or _last_box(text)
    if boxed is None:
        end = text[-_END:]
        named = (_NAMED_WORD if words else _NAMED).search(end)
        if named is not None:
            return clear(named[1])
        last = [one for found in _MATHEMATICS.finditer(end) for one in found.groups() if one][-1:]
        if _DENIED.search(end) or (last and as_written(rf"\boxed{{{last[0]}}}")):
            return clear(last[0]) if last and not _DENIED.search(end) else None
        answer = last_answer(spelt_in_ascii(end))
        if answer is not None:
            return clear(answer)
        text = text[:-_END] + _bared(end)
        return _raised(_written(_RANGE.sub(lambda found: f"{found[0][0]} to {found[0][-1]}", text)))
    return clear(ratio_in_words(boxed) or boxed)


def _bared(text: str) -> str:
    """A text without titles, ordinal numbers and what encloses its numbers, where math-verify would not find them."""
    text = _ORDINAL.sub(" ", _TITLE.sub(" ", _TAGGED.sub(r" \2 ", text)))
    return _QUOTED.sub(r"\1 \3 ", text)


def clear(text: str) -> str | None:
    r"""One answer in a ``\boxed{…}``, None where it could be read in several ways."""
    content = _unwrapped(text)
    if _RANGE.search(content):
        return None
    content = _in_words(_separated(_STOP.sub("", _written(content, whole=True))))
    power = _POWER_OF_TEN.fullmatch(content)
    if power is not None:  # exact, where math-verify multiplies floats
        content = power[1] + _digits(Decimal(f"{power[2]}e{power[3]}"))
    if not content:
        return None
    if "$" in content.replace("\\$", ""):  # prose around an expression, which math-verify finds
        return content
    if _UNCLEAR.search(content):
        return None
    if _WORDS.fullmatch(content):
        content = rf"\text{{{content.lower()}}}"
    return rf"\boxed{{{content}}}"


def as_written(latex: str) -> bool:
    """Whether math-verify would read an answer in a box as another one, so that its text is compared."""
    content = (_last_box(latex) or "").strip()
    if (
        _LETTERS.fullmatch(_WRAPPED.sub(r"\1", content).strip())
        or _DENIAL.search(content)
        or _INEQUALITY.match(content)
        or _MODULO.search(content)
    ):
        return True
    return r"\\" in _ENVIRONMENT.sub("", content) or _CONDITION.match(_bare(content)) is not None


def content_of(latex: str) -> str:
    """The text in the box of an answer; the whole text of one without."""
    return _last_box(latex) or latex


def same_text(latex: str, other: str) -> bool:
    """Whether two answers in boxes are written alike. Spaces, capitals of words and the spelling of a relation do not
    count."""
    return _bare(content_of(latex)) == _bare(content_of(other))


def without_unit(latex: str) -> tuple[str, str, Fraction]:
    """An answer without its unit, the measure of the unit and its size; "" for an answer without one that is known."""
    box = _last_box(latex)
    found = _UNIT.search(latex[-_END:] if box is None else box)
    name = (found[1] or found[2]) if found is not None else ""
    unit = _UNITS.get(name) or _UNITS.get(name.removesuffix("es")) or _UNITS.get(name.removesuffix("s"))
    if unit is None or found is None:
        return latex, "", Fraction(1)
    return (latex if box is None else rf"\boxed{{{box[: found.start()]}}}"), *unit


def _bare(content: str) -> str:
    """LaTeX without wrappers of text and spaces, each relation spelt in one way."""
    content = _WRAPPED.sub(r"\1", content)
    content = re.sub(r"\\left(?![A-Za-z])|\\right(?![A-Za-z])|\\(?:quad|qquad)(?![A-Za-z])|\\[,;:! ]", "", content)
    content = re.sub(r"\\neq(?![A-Za-z])|\\not *=|≠", r"\\ne ", content)
    content = re.sub(r"\\leq?(?:slant)?(?![A-Za-z])|≤|\\leqslant", r"\\le ", content)
    content = re.sub(r"\\geq?(?:slant)?(?![A-Za-z])|≥|\\geqslant", r"\\ge ", content)
    content = re.sub(r"\\[lg]t(?![A-Za-z])", lambda found: "<" if found[0] == r"\lt" else ">", content)
    content = re.sub(r"\\(?:mid|vert)(?![A-Za-z])|\|", ":", content)
    content = "".join(content.split())
    return content.lower() if re.fullmatch(r"[A-Za-z]{2,}", content) else content


def _unwrapped(text: str) -> str:
    """The text without what encloses a single expression: dollars, brackets of LaTeX, boxes, Markdown."""
    text = text.strip()
    boxed = _last_box(text)
    if boxed is not None:
        text = boxed.strip()
    for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), *_MARKS):
        inner = text[len(opening) : -len(closing)]
        enclosed = inner and text.startswith(opening) and text.endswith(closing)
        if enclosed and opening not in inner and not inner.endswith("\\"):
            text = inner.strip()
    if text.count("$") - text.count("\\$") == 1:  # an amount of money
        text = text.replace("$", "\\$").replace("\\\\$", "\\$")
    return text


def _in_words(content: str) -> str:
    """An answer whose units are text, which math-verify leaves out."""
    content = _WITHIN_TEXT.sub(lambda found: found[1] + (rf"\text{{ {found[2]}}}" if found[2] else ""), content)
    content = _raised(_MONEY.sub("", content).strip())
    if (found := _TEMPERATURE.search(content)) is not None:
        scale = "celsius" if (found["text"] or found["bare"]).upper() == "C" else "fahrenheit"
        return rf"{content[: found.start()]}\text{{ {scale}}}"
    return _AMOUNT.sub(lambda found: rf"\text{{ {found[1]}}}", content)


def _raised(content: str) -> str:
    r"""The text with the unit of an area or a volume at its end in one form: ``\text{ cm2}``."""
    found = _RAISED.search(content)
    if found is None:
        return content
    *parts, word, named, rest = found.groups()
    given = [part for part in parts if part is not None] or [named, "2" if word.startswith("sq") else "3"]
    spelt = (given[0], given[0].removesuffix("es"), given[0].removesuffix("s"))
    unit = next(name for name in spelt if name in _LENGTHS)
    return rf"{content[: found.start()]}\text{{ {unit}{given[1]}}}{rest}"


def _separated(content: str) -> str:
    """Several answers with commas between them: ``5 and 6``, not where words or relations stand there."""
    if _JOINED.search(content) is None:
        return content
    parts = _JOINED.split(content)
    others = " ".join(parts)
    words = re.search(r"[A-Za-z]{3,}", re.sub(r"\\[A-Za-z]+", "", others))
    related = re.search(r"[<>≤≥]|\\(?:[lg]eq?|[lg]t|text)(?![A-Za-z])", others)
    if words or related or not all(part.strip() for part in parts):
        return content
    return ", ".join(part.strip() for part in parts)


def split_choice(latex: str) -> tuple[str, str]:
    """The letter of a choice that an answer in a box begins with, and the rest: ``(D) 12``. "" for one without."""
    box = _last_box(latex) or ""
    if (alone := re.fullmatch(r"\(?([A-J])\)?", _bare(box))) is not None:
        return alone[1], ""
    found = _CHOICE.match(box)
    return ("", box) if found is None else (found[1] or found[2] or found[3], found[4].strip())


def _written(text: str, *, whole: bool = False) -> str:
    """The text with every number as digits and a point, and Unicode's mathematics as LaTeX. ``whole``: it is one
    answer, in which powers and names are those of mathematics."""
    text = _ANGLES.sub(lambda found: "(" if found["side"] == "l" else ")", _COLOR.sub("", spelt_in_ascii(text)))
    text = _STYLED.sub(lambda found: found[1] or found[2], _TIMES_TEN.sub(r"\\times ", text))
    if whole and not re.fullmatch(_FUNCTIONS, _WRAPPED.sub(r"\1", text)):
        text = _BASE.sub(r"\\log_{\1}", _INFINITY.sub(r"\\infty", _POWER.sub(_power, text)))
        text = _NAME.sub(lambda found: rf"\{found['wrapped'] or found['bare']} ", text)
    if not text.isascii():
        text = _POWERS.sub(
            lambda found: f"^{{{unicodedata.normalize('NFKC', found[0]).replace(chr(0x2212), '-')}}}", text
        )
        text = "".join(_fraction(char) for char in text).translate(_SYMBOLS)
    text = _FACTOR.sub(r"\1\\cdot ", text)
    text = _ROOT.sub(lambda found: rf"\sqrt{{{found[1] or found[2]}}}", text)
    text = _FRACTION.sub(lambda found: rf"\{found[1]}frac{{{found[2].strip('{}')}}}{{{found[3].strip('{}')}}}", text)
    text = _REPEATING.sub(_repeated, text.replace("~", " ").replace(r"\varnothing", r"\emptyset"))
    text = _MIXED.sub(_improper, _PER_CENT.sub("%", text))
    text = _GROUP.sub(lambda found: found[1].replace(found[2], ""), text)
    return _SCIENTIFIC.sub(lambda found: _digits(Decimal(found[0])), text).strip()


def _digits(number: Decimal) -> str:
    """A number without an exponent."""
    whole = number == number.to_integral_value()
    return f"{number.quantize(Decimal(1)) if whole and number.adjusted() < 25 else number:f}"


def _power(found: re.Match[str]) -> str:
    return f"^{{{found[1]}}}" if found[1] else "^"


def _fraction(char: str) -> str:
    """½ as LaTeX, any other character as it is."""
    top, slash, bottom = unicodedata.normalize("NFKC", char).partition("⁄") if char > "\x7f" else ("", "", "")
    return rf"\frac{{{top}}}{{{bottom}}}" if slash and top and bottom else char


def _repeated(found: re.Match[str]) -> str:
    """A repeating decimal as an exact fraction."""
    start, period = found[1] + found[2], found[3] or found[4]
    top = int(start + period) - int(start or "0")
    return rf"\frac{{{top}}}{{{10 ** len(found[2]) * (10 ** len(period) - 1)}}}"


def _improper(found: re.Match[str]) -> str:
    whole, top, bottom = map(int, found.groups())
    return rf"\frac{{{whole * bottom + top}}}{{{bottom}}}"


_BETWEEN = re.compile(r"\}[\s$.)\]\\]{0,4}(?:,\s?(?:and|or)?|\s(?:and|or))[\s$(\[\\]{0,5}\Z")
"""The text between two boxes that are answers together."""
_BETWEEN_LONGEST = 20
"""Characters of it."""


def _several_boxes(text: str) -> str | None:
    r"""The contents of the last boxes of a text, with commas between them, where ``and``, ``or`` or a comma alone
    stands between one and the next; None for a text that ends in one box."""
    contents, start, end = list[str](), text.rfind(r"\boxed{"), len(text)
    while start != -1:
        contents.insert(0, _last_box(text[start:end]) or "")
        earliest = max(0, start - _BETWEEN_LONGEST)
        between = _BETWEEN.search(text[earliest:start])
        if between is None:
            break
        end = earliest + between.start() + 1
        start = text.rfind(r"\boxed{", 0, end)
    return ", ".join(contents) if len(contents) > 1 and all(contents) else None


def _last_box(text: str) -> str | None:
    r"""The content of the last ``\boxed`` or ``\fbox``, empty for an unfinished one, None without any."""
    start = max(text.rfind(r"\boxed"), text.rfind(r"\fbox"))
    if start == -1:
        return None
    content = text[start:].lstrip("\\").removeprefix("boxed").removeprefix("fbox").lstrip()
    if not content.startswith("{"):
        return content[:1].strip()  # \boxed 5
    depth = position = 0
    while position < len(content):
        char = content[position]
        if char == "\\":
            position += 1
        elif char in "{}":
            depth += 1 if char == "{" else -1
            if not depth:
                return content[1:position].strip()
        position += 1
    return ""
